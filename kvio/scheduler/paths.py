"""Which storage NICs read a request's hits: the policies.

A policy is asked once both engines of a request are known. It sees the nodes as they will be when
all that was decided before has been done, and answers with `Part`s in token order, the DE's first.
docs/policies.md shows each with a figure. Sources: DualPath §6 (`shorter_queue`, and splitting as
its future work); equal finish times and lent NICs are kvio's.

Common to all: a NIC whose rate is 0 is dead and gets nothing. When nobody who may read is alive,
nothing is loaded (no parts, so the hits are computed again), and the reason says so. Figures that
are negative or no numbers are refused with `InvalidArgument` before anything is decided.
"""
from dataclasses import dataclass

from kvio.errors import InvalidArgument, checked_int
from kvio.scheduler.data import DE, PE, Part
from kvio.scheduler.fill import INF, Lane, fill_some
from kvio.scheduler.reason import Reason

__all__ = ["AnyNode", "Basic", "NodeState", "POLICIES", "Push", "ReadChoice", "RoundRobin",
           "ShorterQueue", "Split", "choose_path", "policy", "spare_rate"]


@dataclass
class NodeState:
    """A node's storage NIC: `read_queue_tokens` grows with what is decided. The rest as in
    `EngineReport`."""

    node_id: int
    read_queue_tokens: int = 0
    snic_tokens_per_s: float = 1.0
    lend_tokens: int = 0
    lend_tokens_per_s: float = INF
    free_buffer_tokens: int | None = None
    cnic_tokens_per_s: float = INF

    def add(self, part: Part) -> None:
        """Count a part that was decided; what a helper lends becomes less."""
        self.read_queue_tokens += part.num_tokens
        if part.side not in (PE, DE):
            self.lend_tokens -= part.num_tokens


@dataclass(frozen=True)
class ReadChoice:
    """A policy's answer; `reason` (its `str()`) says why in one clause."""

    parts: tuple[Part, ...]
    reason: Reason | str
    push: bool = False


def choose_path(pe_queue_tokens: int, de_queue_tokens: int) -> str:
    """The side with the shorter reading queue; PE when they are equal."""
    return PE if pe_queue_tokens <= de_queue_tokens else DE


def _is_alive(node: NodeState) -> bool:
    """Whether its storage NIC reads at all; InvalidArgument for figures that mean nothing."""
    queue, rate = node.read_queue_tokens, node.snic_tokens_per_s
    try:
        if 0 <= queue < INF and 0 <= rate < INF:
            return rate > 0
    except TypeError:
        pass
    raise InvalidArgument(
        f"node {node.node_id} reports a reading queue of {queue!r} tokens and a storage NIC of "
        f"{rate!r} tokens/s; both must be finite and 0 or more (0 tokens/s: a dead NIC)")


def _check(num_tokens: int, block_tokens: int) -> None:
    try:
        if num_tokens >= 1 and block_tokens >= 1 and not num_tokens % block_tokens:
            return
    except TypeError:
        pass
    raise InvalidArgument(f"hits are read in whole blocks of {block_tokens!r} tokens, one at "
                          f"least, not {num_tokens!r} tokens")


def _lane(node: NodeState) -> Lane:
    return Lane(node.read_queue_tokens / node.snic_tokens_per_s, node.snic_tokens_per_s)


def _own(pe, de):
    """The request's nodes whose storage NIC reads, each once."""
    return [node for node in ((de, pe) if pe.node_id != de.node_id else (de,)) if _is_alive(node)]


def _whole(side: str, num_tokens: int, node: NodeState, *reason) -> ReadChoice:
    return ReadChoice((Part(side, (0, num_tokens), node.node_id),), Reason(*reason))


_NOBODY = ReadChoice((), Reason("no storage NIC that may read is alive: hits are computed again"))


def _only_side(num_tokens, pe, de):
    """The choice where there is none, because a storage NIC is dead; None when both are alive."""
    pe_alive, de_alive = _is_alive(pe), _is_alive(de)
    if pe_alive and de_alive:
        return None
    if pe_alive:
        return _whole(PE, num_tokens, pe, "the DE's storage NIC is dead")
    if de_alive:
        return _whole(DE, num_tokens, de, "the PE's storage NIC is dead")
    return _NOBODY


class Basic:
    """The prefill side reads (what systems with one path do)."""

    def choose(self, num_tokens: int, block_tokens: int, pe: NodeState, de: NodeState,
               others) -> ReadChoice:
        """Who reads `num_tokens` >= 1 (whole blocks). `others` are the remaining nodes, any
        iterable of them in the order in which their storage NICs come free."""
        _check(num_tokens, block_tokens)
        if not _is_alive(pe):
            return _NOBODY
        return _whole(PE, num_tokens, pe, "Basic reads at the prefill side")

    def lanes(self, pe: NodeState, de: NodeState, others) -> list[Lane]:
        """The NICs that would read a request now; changes nothing (for `load_or_recompute`)."""
        return [_lane(pe)] if _is_alive(pe) else []


class _OneSide:
    """Policies that give a whole request to the PE's or the DE's node."""

    def choose(self, num_tokens, block_tokens, pe, de, others):
        _check(num_tokens, block_tokens)
        only = _only_side(num_tokens, pe, de)
        if only is not None:
            return only
        side, *reason = self._side(pe, de)
        return _whole(side, num_tokens, pe if side == PE else de, *reason)

    def lanes(self, pe, de, others):
        alive = [node for node in (pe, de) if _is_alive(node)]
        if len(alive) == 2:
            alive = [pe if self._peek(pe, de) == PE else de]
        return [_lane(node) for node in alive]


class ShorterQueue(_OneSide):
    """The side with the shorter reading queue (DualPath §6)."""

    def _peek(self, pe, de):
        return choose_path(pe.read_queue_tokens, de.read_queue_tokens)

    def _side(self, pe, de):
        return (self._peek(pe, de), "reading queues of {} (PE) and {} (DE) tokens",
                pe.read_queue_tokens, de.read_queue_tokens)


class RoundRobin(_OneSide):
    """PE, DE, PE, DE... whatever the queues say (the peer of DualPath's figure 13)."""

    def __init__(self):
        self._next = PE

    def _peek(self, pe, de):
        return self._next

    def _side(self, pe, de):
        side = self._next
        self._next = DE if side == PE else PE
        return side, "round robin: the {} side's turn", side.upper()


class Split:
    """Both sides, so that they finish together, when that is worth it.

    With queues q, rates r and L tokens the PE reads x = (r_P (q_D + L) - r_D q_P) / (r_P + r_D),
    clipped to [0, L]; with equal rates (L + q_D - q_P) / 2. Of the whole blocks next to x those
    are taken whose later finish is the earliest. `min_gain`: split only if the hits are there
    earlier by that share of the time that the better side alone takes; behind long queues halves
    gain next to nothing, while a request then depends on two queues.

    The DE reads all if the request has to wait for the DE's buffer anyway, and the PE's compute
    NICs are no faster than the DE's storage NIC: what the PE reads goes back through them, which
    takes as long as is saved in reading it, and would hold the PE's buffer all that time.
    """

    def __init__(self, min_gain: float = 0.05):
        self.min_gain = _share("min_gain", min_gain)

    def choose(self, num_tokens, block_tokens, pe, de, others):
        _check(num_tokens, block_tokens)
        only = _only_side(num_tokens, pe, de)
        if only is not None:
            return only
        if pe.node_id == de.node_id:
            return _whole(DE, num_tokens, de, "both engines are on one node")
        if _returns_in_vain(num_tokens, pe, de):
            return _whole(DE, num_tokens, de,
                          "the DE's buffer has room for {} tokens only, and the PE's compute NICs "
                          "are no faster than the DE's storage NIC", de.free_buffer_tokens)
        at_pe, finish = _shares(num_tokens, block_tokens, pe, de)
        alone = [(node.read_queue_tokens + num_tokens) / node.snic_tokens_per_s
                 for node in (de, pe)]
        if not 0 < at_pe < num_tokens or finish > (1 - self.min_gain) * min(alone):
            side, node = (PE, pe) if alone[1] < alone[0] else (DE, de)
            return _whole(side, num_tokens, node,
                          "reading queues of {} (PE) and {} (DE) tokens: both sides would take "
                          "{:.3g} of the time of one", pe.read_queue_tokens, de.read_queue_tokens,
                          finish / min(alone))
        at_de = num_tokens - at_pe
        return ReadChoice(
            (Part(DE, (0, at_de), de.node_id), Part(PE, (at_de, num_tokens), pe.node_id)),
            Reason("equal finish behind queues of {} (PE) and {} (DE) tokens: {} from the PE, {} "
                   "from the DE", pe.read_queue_tokens, de.read_queue_tokens, at_pe, at_de))

    def lanes(self, pe, de, others):
        return [_lane(node) for node in _own(pe, de)]


def _returns_in_vain(num_tokens, pe, de):
    """See `Split`; the DE's buffer has to hold the whole prompt, the hits at least."""
    return de.free_buffer_tokens is not None and de.free_buffer_tokens < num_tokens and \
        pe.cnic_tokens_per_s <= de.snic_tokens_per_s


def _share(name, value):
    if isinstance(value, (int, float)) and 0 <= value < 1:
        return value
    raise InvalidArgument(f"{name} is a share of the time, 0 <= {name} < 1, not {value!r}")


def _shares(num_tokens, block_tokens, pe, de):
    """(tokens for the PE, finish in s): see `Split`. A tie goes to the DE, whose tokens need not
    be sent back to it."""
    pe_rate, de_rate = pe.snic_tokens_per_s, de.snic_tokens_per_s
    exact = (pe_rate * (de.read_queue_tokens + num_tokens) - de_rate * pe.read_queue_tokens) \
        / (pe_rate + de_rate)
    low = min(max(int(exact // block_tokens) * block_tokens, 0), num_tokens)
    best = None
    for at_pe in (low, low + block_tokens):
        if at_pe > num_tokens:
            break
        finish = max((pe.read_queue_tokens + at_pe) / pe_rate if at_pe else 0.0,
                     (de.read_queue_tokens + num_tokens - at_pe) / de_rate
                     if at_pe < num_tokens else 0.0)
        if best is None or finish < best[1]:
            best = at_pe, finish
    return best


class AnyNode:
    """`Split`, and idle storage NICs of other nodes as well.

    A helper reads no more than it lends (`lend_tokens` of DRAM), less room for a request of its
    own that is as long as this one, and no faster than the compute NIC share that it lends
    (`lend_tokens_per_s`), for what it reads has to leave through that NIC. It comes in through the
    PE's, and goes on to the DE's: all helpers together read no faster than these two lend, too.
    All who read finish together to within one block. A helper gets `min_helper_blocks` at least,
    and at most `max_helpers` help: each has to be reached, and holds a buffer. Helpers are taken
    only if the hits are there earlier by `min_gain` of the time without them.

    Who helps is idle: what waits at its NIC must not last longer than `max_wait` of the time
    without helpers (0: nothing waits). Busy NICs would level the queues of all nodes, and then a
    burst in which one request is very long delays everybody, instead of those behind it.
    """

    def __init__(self, max_helpers: int = 4, min_helper_blocks: int = 8, min_gain: float = 0.05,
                 max_wait: float = 0.0):
        self.max_helpers = checked_int("max_helpers", max_helpers, 0)
        self.min_helper_blocks = checked_int("min_helper_blocks", min_helper_blocks, 1)
        self.max_wait = _share("max_wait", max_wait)
        self._split = Split(min_gain)

    @property
    def min_gain(self) -> float:
        return self._split.min_gain

    def choose(self, num_tokens, block_tokens, pe, de, others):
        """`others` in the order in which they come free. Of those that can help the first
        `2 * max_helpers` are looked at, so that a decision costs the same in a large cluster."""
        _check(num_tokens, block_tokens)
        own = _own(pe, de)
        without_s = _without(num_tokens, block_tokens, pe, de, own)
        least = self.min_helper_blocks if own else 1        # nobody else can read
        keep = num_tokens if own else 0
        spare = min(pe.lend_tokens_per_s, de.lend_tokens_per_s) if own else INF
        nodes, lanes = self._lenders(least * block_tokens, keep, spare, without_s, others)
        num_blocks = num_tokens // block_tokens
        if not own:                                 # what they lend may not be enough for all
            largest = sorted((lane.max_tokens // block_tokens for lane in lanes), reverse=True)
            num_blocks = min(num_blocks, sum(largest[:self.max_helpers]))
        helpers, counts, finish_s = fill_some(
            [_lane(node) for node in own], lanes, num_blocks, block_tokens,
            least_blocks=least, max_helpers=self.max_helpers) \
            if lanes else ({}, (), INF)
        if not helpers or finish_s > (1 - self.min_gain) * without_s:
            return self._split.choose(num_tokens, block_tokens, pe, de, ())
        shares = [(DE if node is de else PE, node, count)
                  for node, count in zip(own, counts, strict=True) if count]
        shares += [(f"h{number}", nodes[i], helpers[i])
                   for number, i in enumerate(sorted(helpers, key=lambda i: nodes[i].node_id))]
        return ReadChoice(_parts(shares, block_tokens), Reason(
            "equal finish behind queues of {} (PE) and {} (DE) tokens with {} of {} nodes that "
            "lend: blocks {}", pe.read_queue_tokens, de.read_queue_tokens, len(helpers),
            len(nodes), tuple((side, count) for side, _, count in shares)))

    def _lenders(self, least_tokens, keep_tokens, spare, without_s, others):
        """Nodes that can help, and their lanes; `spare` tokens/s in all."""
        nodes, lanes, most_wait_s = [], [], INF if without_s == INF else self.max_wait * without_s
        for node in others:
            rate, lent = node.snic_tokens_per_s, node.lend_tokens_per_s
            if not _is_alive(node) or not lent > 0:
                continue
            start_s = node.read_queue_tokens / rate
            if start_s > most_wait_s or len(lanes) >= 2 * self.max_helpers or not spare > 0:
                break
            if node.lend_tokens - keep_tokens >= least_tokens:
                nodes.append(node)
                lanes.append(Lane(start_s, min(rate, lent, spare), node.lend_tokens - keep_tokens))
                spare -= lanes[-1].tokens_per_s
        return nodes, lanes

    def lanes(self, pe, de, others):
        own = self._split.lanes(pe, de, ())
        spare = min(pe.lend_tokens_per_s, de.lend_tokens_per_s) if own else INF
        _, lanes = self._lenders(1, 0, spare, 0.0 if own else INF, others)
        return own + lanes[:self.max_helpers]


def _without(num_tokens, block_tokens, pe, de, own):
    """When the hits are there without helpers; inf if neither side can read."""
    if len(own) == 2:
        return _shares(num_tokens, block_tokens, pe, de)[1]
    return _lane(own[0]).start_s + num_tokens / own[0].snic_tokens_per_s if own else INF


def spare_rate(side: str, num_prefill: int, num_decode: int, snic_rate: float,
               cnic_rate: float) -> float:
    """What a node can lend of its compute NICs (`lend_tokens_per_s`), in the unit of the rates.

    With all P + D storage NICs reading at `snic_rate` over both paths alike, a PE's node sends
    2 snic_rate and gets (1 + D/P) snic_rate, a DE's node sends (P/D + 2) and gets (2 P/D + 1).
    `cnic_rate` is that of all compute NICs of the node together. Outside the bottleneck-free
    range nothing is left: helpers would only lengthen the queue at the compute NICs. Source: the
    loads of links in DualPath §4.
    """
    if side not in (PE, DE) or min(num_prefill, num_decode) < 1 or not 0 <= snic_rate < INF or \
            not cnic_rate >= 0:
        raise InvalidArgument(f"a side 'pe' or 'de', P and D of 1 or more and rates of 0 or more "
                              f"are needed; got {side!r}, {num_prefill}, {num_decode}, "
                              f"{snic_rate!r}, {cnic_rate!r}")
    ratio = num_prefill / num_decode
    own = max(2, 1 + 1 / ratio) if side == PE else max(ratio + 2, 2 * ratio + 1)
    return max(0.0, cnic_rate - own * snic_rate)


def _parts(shares, block_tokens):
    """Parts one after the other from (side, node, blocks)."""
    parts, start = [], 0
    for side, node, count in shares:
        parts.append(Part(side, (start, start + count * block_tokens), node.node_id))
        start += count * block_tokens
    return tuple(parts)


class Push:
    """The parts of another policy, written into PE HBM by their owners instead of read by the PE.

    PE HBM holds a layer's blocks one after the other, so a pushed part is one long target filled
    by gather lists; and no request for the bytes has to travel first.
    """

    pushes = True                   # who carries it out opens PE HBM to others' writes

    def __init__(self, inner=None):
        self.inner = policy("shorter_queue" if inner is None else inner)

    def choose(self, num_tokens, block_tokens, pe, de, others):
        choice = self.inner.choose(num_tokens, block_tokens, pe, de, others)
        return ReadChoice(choice.parts, Reason("pushed; {}", choice.reason), True)

    def lanes(self, pe, de, others):
        return self.inner.lanes(pe, de, others)


def is_own(policy) -> bool:
    """Whether it is one of the library's, whose answers the tests check and nobody else has to."""
    if type(policy) is Push:
        return is_own(policy.inner)
    return type(policy) in POLICIES.values()


def checked_choice(choice, num_tokens: int, block_tokens: int, pe: NodeState,
                   de: NodeState) -> ReadChoice:
    """The answer of a caller's own policy for `num_tokens` hits; InvalidArgument if its parts are
    none that a plan can be made of: whole blocks one after the other from token 0 on, one a node
    and side, the DE's first, "pe" and "de" at the nodes of these."""
    parts = getattr(choice, "parts", None)
    if isinstance(choice, ReadChoice) and isinstance(parts, tuple) and \
            all(isinstance(part, Part) for part in parts):
        starts, stops = [part.tokens[0] for part in parts], [part.tokens[1] for part in parts]
        sides, nodes = [part.side for part in parts], [part.node_id for part in parts]
        homes = {PE: pe.node_id, DE: de.node_id}
        if starts == [0, *stops][:len(parts)] and max(stops, default=0) <= num_tokens and \
                not any(stop % block_tokens for stop in stops) and DE not in sides[1:] and \
                len(set(nodes)) == len(set(sides)) == len(parts) and all(
                    homes[side] == node if side in homes else node not in homes.values()
                    for side, node in zip(sides, nodes, strict=True)):
            return choice
    raise InvalidArgument(
        f"a policy answers with a ReadChoice whose parts, a tuple, cover hits from token 0 on, "
        f"{num_tokens} at most, in whole blocks of {block_tokens}, each with its node_id and one a "
        f"node, the DE's (node {de.node_id}) first, 'pe' being node {pe.node_id}; got {choice!r}")


POLICIES = {"pe": Basic, "round_robin": RoundRobin, "shorter_queue": ShorterQueue, "split": Split,
            "any_node": AnyNode, "push": Push}


def policy(name):
    """A policy by its name, or the caller's own (anything with `choose`)."""
    if callable(getattr(name, "choose", None)) and not isinstance(name, type):
        return name
    if not isinstance(name, str) or name not in POLICIES:
        raise InvalidArgument(f"policy must be one of {', '.join(map(repr, POLICIES))} or an "
                              f"object with a method choose, not {name!r}")
    return POLICIES[name]()
