"""Requests as the engines see them, and the agents' sessions they come from."""
from dataclasses import dataclass, field

import numpy as np

from kvio.engine.clock import now_s
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout, block_keys
from kvio.loader import path_name

__all__ = ["EngineRequest", "MENDED", "Session", "Turn", "chained_keys", "predicted_hit_tokens",
           "stored_tokens"]

MENDED = ("num_replans", "num_retries", "num_read_failovers", "num_reroutes")


@dataclass(frozen=True)
class Turn:
    """One request of an agent: `append` tokens are added to the context, `num_new_tokens` are
    generated."""

    append: tuple[int, ...]
    num_new_tokens: int


@dataclass(frozen=True)
class Session:
    """An agent: what is stored of it already (`context`), then its turns, one after the other."""

    name: str
    turns: tuple[Turn, ...]
    context: tuple[int, ...] = ()


@dataclass(eq=False)
class EngineRequest:
    """A prompt on its way through the engines, and what became of it.

    Times are seconds on the engines' clock. `num_hit_tokens` comes from the store, `parts` and
    `reason` from the scheduler's route.

    What went wrong on the way, and was mended: `num_replans` (with fewer hits), `num_retries` (a
    transfer failed), `num_read_failovers` (another storage NIC reads), `num_reroutes` (other
    engines, since one has died); `mended` says each in words. After an engine's death what is
    left is a request of its own (`rest`), whose `origin` gets its tokens and its figures.
    """

    request_id: int
    session: str
    prompt: np.ndarray = field(repr=False)  # uint32 token ids
    num_new_tokens: int
    keys: np.ndarray = field(repr=False)    # KEY_DTYPE, of the prompt's full blocks
    root: bytes                             # parent of the first block
    num_hit_tokens: int = 0
    parts: tuple = ()
    reason: str = ""
    arrived_s: float = field(default_factory=now_s)
    token_times: list = field(default_factory=list)
    generated: list = field(default_factory=list)
    margins: list = field(default_factory=list)     # top logit less the second, per token
    num_replans: int = 0
    num_retries: int = 0
    num_read_failovers: int = 0
    num_reroutes: int = 0
    mended: list = field(default_factory=list)
    origin: "EngineRequest | None" = field(default=None, repr=False)

    def __post_init__(self):
        if len(self.prompt) == 0 or self.num_new_tokens < 1:
            raise InvalidArgument("a request needs a prompt and at least one new token")

    def add_token(self, token: int, margin: float) -> None:
        """A token was generated now."""
        self.generated.append(int(token))
        self.margins.append(float(margin))
        self.token_times.append(now_s())
        if self.origin is not None:
            self.origin.add_token(token, margin)

    def note(self, figure: str, why: str) -> None:
        """Count one of `MENDED`, here and where this request comes from."""
        setattr(self, figure, getattr(self, figure) + 1)
        self.mended.append(f"{figure[4:]}: {why}")
        if self.origin is not None:
            self.origin.note(figure, why)

    def rest(self, layout: BlockLayout) -> "EngineRequest":
        """What is left to do, after the death of an engine: this very request while it has no
        token, later one whose prompt is all that there is already. No token is made twice."""
        if not self.generated:
            return self
        prompt = np.concatenate([self.prompt, np.asarray(self.generated, np.uint32)])
        return EngineRequest(self.request_id, self.session, prompt,
                             self.num_new_tokens - len(self.generated),
                             chained_keys(self, prompt, layout), self.root,
                             arrived_s=self.arrived_s, origin=self.origin or self)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def path(self) -> str:
        """Who read the hits: "none", "pe", "de", "split" or "any"."""
        return path_name(self.parts)

    @property
    def finished(self) -> bool:
        return len(self.generated) >= self.num_new_tokens


def chained_keys(request, tokens, layout: BlockLayout) -> np.ndarray:
    """Keys of all full blocks of `tokens`, of which the request's own keys are the beginning."""
    known = len(request.keys)
    parent = request.keys[-1]["key"].tobytes() if known else request.root
    more = block_keys(tokens[known * layout.block_tokens:], layout, parent=parent)
    return np.concatenate([request.keys, more])


def stored_tokens(num_prompt_tokens: int, num_new_tokens: int, layout: BlockLayout) -> int:
    """Tokens that are stored once a request is done: the full blocks of all tokens with KV.

    The last generated token was never fed to the model and has none.
    """
    return layout.num_full_blocks(num_prompt_tokens + num_new_tokens - 1) * layout.block_tokens


def usable_hits(num_stored_tokens: int, num_prompt_tokens: int, layout: BlockLayout) -> int:
    """Stored tokens that a prompt can use: whole blocks, one token at least is computed."""
    most = layout.num_full_blocks(num_prompt_tokens - 1) * layout.block_tokens
    return min(num_stored_tokens, most)


def predicted_hit_tokens(session: Session, layout: BlockLayout) -> list[int]:
    """Hit tokens of each turn, from the trace alone."""
    stored = layout.num_full_blocks(len(session.context)) * layout.block_tokens
    total, hits = len(session.context), []
    for turn in session.turns:
        total += len(turn.append)
        hits.append(usable_hits(stored, total, layout))
        stored = stored_tokens(total, turn.num_new_tokens, layout)
        total += turn.num_new_tokens
    return hits
