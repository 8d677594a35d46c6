"""What goes into a scheduler and what comes out of it: plain data, all in tokens."""
import math
from dataclasses import dataclass
from typing import NamedTuple

from kvio.errors import InvalidArgument, KvioError, checked_int
from kvio.loader.plan import Part, path_name

__all__ = ["DE", "DecodeReason", "EngineReport", "PE", "Part", "PrefillReason", "PrefillWork",
           "Rejection", "Request", "Route", "RouteReason"]

PE, DE = "pe", "de"                 # the two sides of a request


def _make_ints(record, least: dict) -> None:
    """Check the int fields of a frozen record (numpy's become Python's); InvalidArgument."""
    for name, lowest in least.items():
        value = getattr(record, name)
        if type(value) is not int or value < lowest:
            try:
                object.__setattr__(record, name, checked_int(name, value, lowest))
            except InvalidArgument as wrong:
                raise InvalidArgument(f"{wrong}; in {record}") from None


@dataclass(frozen=True, slots=True)
class Request:
    """What the scheduler must know of a request; all in tokens.

    `num_tokens` is len in the paper: the prompt and the tokens that may be generated, which is
    what the request will hold in HBM. `num_cached_tokens` of the prompt are stored (hits); one
    token at least of every prompt is computed, so a prompt that is stored whole (nothing was
    appended) is to be submitted with its last block, or token, as a miss.
    """

    request_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    max_new_tokens: int

    def __post_init__(self):
        _make_ints(self, {"request_id": 0, "num_prompt_tokens": 1, "num_cached_tokens": 0,
                          "max_new_tokens": 0})
        if self.num_cached_tokens >= self.num_prompt_tokens:
            raise InvalidArgument("a request needs num_cached_tokens < num_prompt_tokens, for "
                                  f"one token at least is computed: {self}")

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens


_REPORT_INTS = {"engine_id": 0, "node_id": 0, "num_requests": 0, "num_tokens": 0,
                "read_queue_tokens": 0, "free_hbm_tokens": 0, "group_id": 0, "lend_tokens": 0,
                "incarnation": 0}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine says of itself at a fetch.

    `group_id` names the engines that fetch together, all PE or all DE; all of a node are in one.
    `read_queue_tokens` is the reading queue of its *node*'s storage NIC, waiting reads included.
    For decode engines: `free_hbm_tokens`, free HBM less what is promised already, and
    `hbm_tokens`, all HBM there is for KV (None: unknown, so no request is ever too long).

    `last_route` is the highest `Route.number` that these figures count: what was assigned since
    is added to them. None: they count all that was assigned. `incarnation` is higher each time
    an engine of this id starts anew: reports of one that was lost come late and are ignored.
    `request_ids` are the requests that the engine holds (None: it does not say). They are needed
    when the scheduler has started anew, see `Scheduler.observe`.

    `snic_tokens_per_s` is what the node's storage NIC reads (any unit that all nodes share;
    policies that split need it). `lend_tokens` and `lend_tokens_per_s` are what the node lends
    for other nodes' requests: free DRAM buffer and spare compute NIC bandwidth; 0: nothing.
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
    lend_tokens_per_s: float = math.inf
    hbm_tokens: int | None = None
    incarnation: int = 0
    request_ids: frozenset | None = None

    def __post_init__(self):
        _make_ints(self, _REPORT_INTS)
        for name in ("last_route", "hbm_tokens"):
            if getattr(self, name) is not None:
                _make_ints(self, {name: 0})
        if not _is_rate(self.snic_tokens_per_s) or self.snic_tokens_per_s in (0, math.inf) or \
                not _is_rate(self.lend_tokens_per_s):
            raise InvalidArgument("snic_tokens_per_s must be a finite number above 0 and "
                                  f"lend_tokens_per_s one that is not negative: {self}")
        if self.request_ids is not None:
            try:
                ids = frozenset(checked_int("a request id", i, 0) for i in self.request_ids)
            except TypeError:
                raise InvalidArgument(f"request_ids must be ints or None: {self}") from None
            object.__setattr__(self, "request_ids", ids)


def _is_rate(value) -> bool:
    try:
        return type(value) is not bool and value >= 0       # NaN is not
    except TypeError:
        return False


class PrefillReason(NamedTuple):
    """Why a prefill engine was chosen; figures as they were before the request was added."""

    short_queue: bool               # its class: else the long reading queue
    read_queue_tokens: int          # of its node
    num_engines: int                # in its class
    num_tokens: int                 # its load, the least of the class

    def __str__(self):
        return (f"{'short' if self.short_queue else 'long'} reading queue "
                f"({self.read_queue_tokens} tokens), least load of {self.num_engines} "
                f"({self.num_tokens} tokens)")


class DecodeReason(NamedTuple):
    """Why a decode engine was chosen; figures as they were before the request was added."""

    normal: bool                    # below Z with the request: else all that fit are above
    load_limit: float               # Z of the paper, in tokens
    num_requests: int
    num_tokens: int
    group_id: int = 0

    def __str__(self):
        if self.normal:
            return f"fewest requests ({self.num_requests}) below Z = {self.load_limit:.0f} tokens"
        return (f"all that fit are above Z = {self.load_limit:.0f} tokens, least load "
                f"({self.num_tokens})")


class RouteReason(NamedTuple):
    """Why a route is as it is. Plain data; `str()` puts it into words, when somebody asks."""

    read: object                    # the policy's, anything with a str()
    prefill: PrefillReason
    decode: DecodeReason

    def __str__(self):
        return f"{self.read}; PE: {self.prefill}; DE: {self.decode}"


@dataclass(frozen=True, slots=True)
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
    reason: RouteReason
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


class Rejection(NamedTuple):
    """A request that was waiting and will get no route; `error` says why and what to do."""

    request_id: int
    error: KvioError


@dataclass(frozen=True)
class PrefillWork:
    """A request (or what is left of it) that is ready to be prefilled."""

    request_id: int
    num_cached_tokens: int
    num_new_tokens: int             # bsz in the paper
