"""Which storage NICs read a request's hits: the policies.

A policy is asked once both engines of a request are known. It sees the nodes as they will be when
all that was decided before has been done, and answers with `Part`s in token order, the DE's first.
"""
from dataclasses import dataclass

from kvio.errors import InvalidArgument
from kvio.scheduler.data import DE, PE, Part

__all__ = ["NodeState", "POLICIES", "ReadChoice", "choose_path", "policy"]


@dataclass
class NodeState:
    """A node's storage NIC: `read_queue_tokens` grows with what is decided. The rest as in
    `EngineReport`."""

    node_id: int
    read_queue_tokens: int = 0
    snic_tokens_per_s: float = 1.0
    lend_tokens: int = 0
    lend_tokens_per_s: float = float("inf")


@dataclass(frozen=True)
class ReadChoice:
    """A policy's answer; `reason` says why in one clause."""

    parts: tuple[Part, ...]
    reason: str
    push: bool = False


def choose_path(pe_queue_tokens: int, de_queue_tokens: int) -> str:
    """The side with the shorter reading queue; PE when they are equal."""
    return PE if pe_queue_tokens <= de_queue_tokens else DE


class Basic:
    """The prefill side reads."""

    def choose(self, num_tokens: int, block_tokens: int, pe: NodeState, de: NodeState,
               others) -> ReadChoice:
        """Who reads `num_tokens` >= 1 (whole blocks). `others` are the remaining nodes."""
        return ReadChoice((Part(PE, (0, num_tokens), pe.node_id),),
                          "Basic reads at the prefill side")


class ShorterQueue:
    """The side with the shorter reading queue (DualPath)."""

    def choose(self, num_tokens, block_tokens, pe, de, others):
        side = choose_path(pe.read_queue_tokens, de.read_queue_tokens)
        node = pe if side == PE else de
        return ReadChoice((Part(side, (0, num_tokens), node.node_id),),
                          f"reading queues of {pe.read_queue_tokens} (PE) and "
                          f"{de.read_queue_tokens} (DE) tokens")


POLICIES = {"pe": Basic, "shorter_queue": ShorterQueue}


def policy(name):
    """A policy by its name, or the caller's own (anything with `choose`)."""
    if hasattr(name, "choose"):
        return name
    if not isinstance(name, str) or name not in POLICIES:
        raise InvalidArgument(f"policy must be one of {', '.join(map(repr, POLICIES))} or an "
                              f"object with a method choose, not {name!r}")
    return POLICIES[name]()
