"""What goes into a scheduler and what comes out of it: plain data, all in tokens."""
import math
import numbers
import sys
from dataclasses import dataclass
from typing import NamedTuple

from kvio.errors import InvalidArgument, KvioError, checked_int
from kvio.loader.plan import Part, path_name
from kvio.scheduler.reason import Reason

__all__ = ["DE", "EngineReport", "PE", "Part", "PrefillWork", "Rejection", "Request", "Route"]

PE, DE = "pe", "de"                 # the two sides of a request


def _make_ints(record, *names) -> None:
    """Make int fields Python's ints (numpy's are taken); InvalidArgument that names the record."""
    for name in names:
        value = getattr(record, name)
        if type(value) is not int or value < 0:
            try:
                object.__setattr__(record, name, checked_int(name, value, 0))
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
        if not (type(self.request_id) is type(self.num_prompt_tokens)
                is type(self.num_cached_tokens) is type(self.max_new_tokens) is int
                and self.request_id | self.num_prompt_tokens | self.num_cached_tokens
                | self.max_new_tokens >= 0):
            _make_ints(self, "request_id", "num_prompt_tokens", "num_cached_tokens",
                       "max_new_tokens")
        if self.num_cached_tokens >= self.num_prompt_tokens:
            raise InvalidArgument("a request needs num_cached_tokens < num_prompt_tokens, for "
                                  f"one token at least is computed: {self}")

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens


@dataclass(slots=True)
class EngineReport:
    """What an engine says of itself at a fetch; copied out there, and not kept.

    `group_id` names the engines that fetch together, all PE or all DE; all of a node are in one.
    `read_queue_tokens` is the reading queue of its *node*'s storage NIC, waiting reads included.
    For decode engines: `free_hbm_tokens`, free HBM less what is promised already, and
    `hbm_tokens`, all HBM there is for KV (None: unknown, so no request is ever too long).

    `last_route` is the highest `Route.number` that these figures count: what was assigned since
    is added to them. None: they count all that was assigned. `incarnation` is higher each time
    an engine of this id starts anew: reports of one that was lost come late and are ignored.
    `request_ids` are the requests that the engine holds (None: it does not say). They are needed
    when the scheduler has started anew, see `Scheduler.observe`.

    `snic_tokens_per_s` is what the node's storage NIC reads; 0: it is dead. Policies that split
    compare nodes, so any unit that all share will do; `LoadOrRecompute` needs seconds.
    `lend_tokens` and `lend_tokens_per_s` are what the node lends for other nodes' requests: free
    DRAM buffer and spare compute NIC bandwidth; 0: nothing. `free_buffer_tokens` is what is free
    of the node's DRAM buffer, less what requests wait for (None: it is never full),
    `cnic_tokens_per_s` the rate of all its compute NICs.
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
    free_buffer_tokens: int | None = None
    cnic_tokens_per_s: float = math.inf

    def __post_init__(self):
        # Thousands of these a second: what is as it should be is seen at once.
        if not (type(self.engine_id) is type(self.node_id) is type(self.num_requests)
                is type(self.num_tokens) is type(self.read_queue_tokens)
                is type(self.free_hbm_tokens) is type(self.group_id) is type(self.lend_tokens)
                is type(self.incarnation) is int
                and self.engine_id | self.node_id | self.num_requests | self.num_tokens
                | self.read_queue_tokens | self.free_hbm_tokens | self.group_id
                | self.lend_tokens | self.incarnation >= 0):
            _make_ints(self, "engine_id", "node_id", "num_requests", "num_tokens",
                       "read_queue_tokens", "free_hbm_tokens", "group_id", "lend_tokens",
                       "incarnation")
        if self.last_route is not None and not (type(self.last_route) is int
                                                and self.last_route >= 0):
            _make_ints(self, "last_route")
        if self.hbm_tokens is not None and not (type(self.hbm_tokens) is int
                                                and self.hbm_tokens >= 0):
            _make_ints(self, "hbm_tokens")
        if self.free_buffer_tokens is not None and not (type(self.free_buffer_tokens) is int
                                                        and self.free_buffer_tokens >= 0):
            _make_ints(self, "free_buffer_tokens")
        if not (type(self.snic_tokens_per_s) is type(self.lend_tokens_per_s)
                is type(self.cnic_tokens_per_s) is float
                and 0 <= self.snic_tokens_per_s < math.inf and self.lend_tokens_per_s >= 0
                and self.cnic_tokens_per_s >= 0):
            self._make_rates()
        if self.request_ids is not None:
            self._make_request_ids()

    def _make_rates(self):
        for name, least, most in (("snic_tokens_per_s", 0, sys.float_info.max),
                                  ("lend_tokens_per_s", 0, math.inf),
                                  ("cnic_tokens_per_s", 0, math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or \
                    not least <= float(value) <= most:
                raise InvalidArgument(f"{name} must be a number, {least} to {most}, not {value!r}"
                                      f"; in {self}")
            setattr(self, name, float(value))

    def _make_request_ids(self):
        try:
            self.request_ids = frozenset(
                checked_int("a request id", i, 0) for i in self.request_ids)
        except TypeError:
            raise InvalidArgument(f"request_ids must be ints or None: {self}") from None


@dataclass(frozen=True, slots=True)
class Route:
    """The whole decision for a request. Committed: it is never changed silently.

    `parts` say which node's storage NIC reads which hit tokens; hits behind the last part are
    computed again. `push`: other nodes write their parts into PE HBM. `str(reason)` says why all
    this. `number` grows with every route that a scheduler commits.
    """

    request_id: int
    prefill_engine: int
    decode_engine: int
    parts: tuple[Part, ...]
    reason: Reason
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
