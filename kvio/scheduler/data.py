"""What goes into a scheduler and what comes out of it: plain data, all in tokens."""
from dataclasses import dataclass

from kvio.errors import InvalidArgument
from kvio.loader.plan import Part, path_name

__all__ = ["DE", "DecodeChoice", "EngineReport", "PE", "Part", "PrefillChoice", "PrefillWork",
           "Request", "Route"]

PE, DE = "pe", "de"                 # the two sides of a request


@dataclass(frozen=True)
class Request:
    """What the scheduler must know of a request; all in tokens.

    `num_tokens` is len in the paper: the prompt and the tokens that may be generated, which is
    what the request will hold in HBM. `num_cached_tokens` of the prompt are stored (hits).
    """

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    max_new_tokens: int

    def __post_init__(self):
        if not 0 <= self.num_cached_tokens < self.num_prompt_tokens or self.max_new_tokens < 0:
            raise InvalidArgument(
                "a request needs 0 <= num_cached_tokens < num_prompt_tokens (one token at least "
                f"is computed) and max_new_tokens >= 0: {self}")

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens


@dataclass(frozen=True)
class EngineReport:
    """What an engine says of itself at a fetch.

    `read_queue_tokens` is the reading queue of its *node*'s storage NIC, waiting reads included.
    `group_id` names the engines that fetch together, all PE or all DE (all of a node are in one).
    `free_hbm_tokens` counts only for decode engines: free HBM less what is promised already.

    `last_route` is the highest `Route.number` that these figures count: what was assigned since
    is added to them. None: they count all that was assigned. `snic_tokens_per_s` is what the
    node's storage NIC reads (any unit that all nodes share; policies that split need it).
    `lend_tokens` and `lend_tokens_per_s` are what the node lends for other nodes' requests: free
    DRAM buffer and spare compute NIC bandwidth; 0 tokens: nothing.
    """

    engine_id: int
    node_id: int
    num_requests: int = 0
    num_tokens: int = 0
    read_queue_tokens: int = 0
    free_hbm_tokens: int = 0
    group_id: int = 0
    last_route: int | None = None
    snic_tokens_per_s: float = 1.0
    lend_tokens: int = 0
    lend_tokens_per_s: float = float("inf")

    def __post_init__(self):
        if min(self.num_requests, self.num_tokens, self.read_queue_tokens,
               self.free_hbm_tokens) < 0:
            raise InvalidArgument(f"negative figures in {self}")


@dataclass(frozen=True)
class PrefillChoice:
    """`engine_id` prefills `request_id`; `reason` names the class it was in."""

    request_id: int
    engine_id: int
    reason: str


@dataclass(frozen=True)
class DecodeChoice:
    """`engine_id` decodes `request_id`; its HBM is promised from now on."""

    request_id: int
    engine_id: int
    reason: str


@dataclass(frozen=True)
class Route:
    """The whole decision for a request. Committed: it is never changed silently.

    `parts` say which node's storage NIC reads which hit tokens; hits behind the last part are
    computed again. `push`: other nodes write their parts into PE HBM. `number` grows with every
    route that a scheduler commits.
    """

    request_id: int
    prefill_engine: int
    decode_engine: int
    parts: tuple[Part, ...]
    reason: str
    push: bool = False
    number: int = 0

    @property
    def path(self) -> str:
        """"none", "pe", "de", "split" or "any"."""
        return path_name(self.parts)

    @property
    def num_load_tokens(self) -> int:
        """Hit tokens that are loaded."""
        return self.parts[-1].tokens[1] if self.parts else 0


@dataclass(frozen=True)
class PrefillWork:
    """A request (or what is left of it) that is ready to be prefilled."""

    request_id: int
    num_cached_tokens: int
    num_new_tokens: int             # bsz in the paper
