"""The embedded cluster: prefill and decode engines of one process, and a request's way through.

A request is matched against the store, routed by the scheduler, carried along its `ReadPlan`,
decoded, and its new full blocks are persisted. The engines differ from a real deployment in what
is emulated: bandwidths of NICs (by the soft NIC and paced rings), and HBM, which is host memory
unless a GPU (`ClusterConfig.device`) is to hold it.
"""
import asyncio
import contextlib
from dataclasses import dataclass

from kvio.engine.collectives import CollectiveSetting, Collectives
from kvio.engine.decode import DecodeEngine
from kvio.engine.hbm import DeviceHbm, HostHbm, check_device
from kvio.engine.moves import drained
from kvio.engine.oracle import CopyMover, MemoryStore
from kvio.engine.prefill import PrefillEngine
from kvio.engine.request import MENDED, EngineRequest, usable_hits
from kvio.engine.rerouting import PatientRing, Recovery
from kvio.engine.serving import Serving
from kvio.engine.trace import Tracer
from kvio.errors import Busy, Closed, EngineLost, InvalidArgument, checked_int
from kvio.layout import BlockLayout, block_keys, root_key, token_array
from kvio.loader import Mover
from kvio.scheduler import DE, PE, EngineReport, Request, Scheduler
from kvio.scheduler.paths import spare_rate
from kvio.scheduler.quota import is_quota
from kvio.storage import BlockStore
from kvio.transfer import KV, Fabric, Nic, TrafficClass

__all__ = ["Cluster", "ClusterConfig", "MODES"]

MODES = ("none", "basic", "dualpath", "oracle")
INF = float("inf")
_POLICIES = {"none": "pe", "basic": "pe", "dualpath": "shorter_queue", "oracle": "pe"}


@dataclass(frozen=True)
class ClusterConfig:
    """Sizes and emulated bandwidths. Rates are bytes per second a direction; 0 is unlimited.

    nic: what every engine's compute NIC is opened on, "soft" or "verbs:HCA" (all of them on one
    HCA, then); only soft NICs can be paced. device: a GPU, "cuda:0", whose memory is all engines'
    HBM; its copy engines are their compute NICs. kv_class: the traffic class of all KV.
    collectives: what the decode engines exchange in each step beside it, None for nothing.
    persist_class: the traffic class of decode's copies from HBM to DRAM, None for kv_class.

    policy: who reads, a name or an object of `kvio.scheduler.paths`; None: by the mode. One that
    pushes says so (`pushes = True`, as `Push` does): PE HBM is open to others' writes then alone.
    recompute: a `LoadOrRecompute`, say: hits that would be there later than they are computed again
    are not loaded; None: all hits are.
    quota_s: predicted attention time of a prefill batch at most; None: a whole request a batch.
    attention_time(cached, new): that prediction in seconds, None for the compute's own.
    batch_tokens: what a batch may hold in PE HBM, hits included, None for max_tokens.
    max_attempts, read_timeout_s: what is put up with, see `rerouting.Recovery`.
    """

    layout: BlockLayout
    num_prefill: int = 1
    num_decode: int = 1
    snic_bytes_per_s: int = 0
    cnic_bytes_per_s: int = 0
    buffer_blocks: int = 512
    hbm_blocks: int = 512
    max_tokens: int = 8192
    depth: int = 2
    alpha: int = 1 << 40
    beta: int = 1 << 40
    model_name: str = "model"
    nic: str = "soft"
    kv_class: TrafficClass = KV
    collectives: CollectiveSetting | None = None
    persist_class: TrafficClass | None = None
    policy: object = None
    recompute: object = None
    quota_s: float | None = None
    attention_time: object = None
    batch_tokens: int | None = None
    max_attempts: int = 3
    read_timeout_s: float | None = None
    device: str | None = None

    def __post_init__(self):
        Recovery(self.max_attempts, self.read_timeout_s)
        for name in ("num_prefill", "num_decode", "buffer_blocks", "hbm_blocks", "max_tokens",
                     "depth", "batch_tokens"):
            if name != "batch_tokens" or self.batch_tokens is not None:
                checked_int(name, getattr(self, name), 1)
        checked_int("snic_bytes_per_s", self.snic_bytes_per_s, 0)
        if self.quota_s is not None and not is_quota(self.quota_s):
            raise InvalidArgument("quota_s must be a time above 0 s, or None, not "
                                  f"{self.quota_s!r}")
        if self.attention_time is not None and not callable(self.attention_time):
            raise InvalidArgument("attention_time must be callable, (cached, new) -> seconds, or "
                                  f"None, not {self.attention_time!r}")
        if self.nic != "soft" and self.cnic_bytes_per_s:
            raise InvalidArgument(f"cnic_bytes_per_s paces soft NICs; {self.nic!r} goes as fast "
                                  "as it goes: leave it 0")
        if self.device is not None:
            check_device(self)

    @property
    def recovery(self) -> Recovery:
        return Recovery(self.max_attempts, self.read_timeout_s)

    def namespace(self, session: str) -> bytes:
        """What a session's block keys begin with: hits count inside a session only. Model names
        have slashes in them, so the length says where the session's begins."""
        return f"{len(self.model_name)}:{self.model_name}/{session}".encode()


class Cluster:
    """Use as `async with Cluster(...) as cluster: await cluster.generate(...)`. Leaving the block
    cancels the tasks whose requests are still being served, and waits until these have ended.

    `store` is None in mode "none" (nothing is reused or stored); "basic" reads on the prefill
    side only; "dualpath" on the side with the shorter reading queue. "oracle" is what no machine
    can be: hits are copied from a `MemoryStore` in no time (its own one if `store` is None), and
    only computing takes any. `make_compute()` gives each engine its arithmetic. `fabric` is the
    network of soft NICs, the cluster's own by default.
    """

    def __init__(self, config: ClusterConfig, mode: str, store: BlockStore | None, make_compute,
                 fabric: Fabric | None = None, tracer: Tracer | None = None):
        if mode not in MODES:
            raise InvalidArgument(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        if mode == "oracle" and store is None:
            store = MemoryStore(config.layout)
        if (store is None) != (mode == "none"):
            raise InvalidArgument("mode 'none' goes without a store, the others need one")
        if (mode == "oracle") != isinstance(store, MemoryStore):
            raise InvalidArgument("mode 'oracle' goes with a MemoryStore, and no other mode does: "
                                  f"not {mode!r} with {store!r}")
        if config.device is not None and (mode == "oracle" or fabric is not None):
            raise InvalidArgument(f"HBM on {config.device} is out of the CPU's reach and of a "
                                  "Fabric's: mode 'oracle' (which copies by the CPU), and fabric=, "
                                  "go without device=")
        self.config, self.mode, self.store = config, mode, store
        self.layout, self._make_compute = config.layout, make_compute
        self._tracer = tracer
        self.scheduler = Scheduler(
            config.alpha, config.beta, _POLICIES[mode] if config.policy is None else config.policy,
            self.layout.block_tokens, config.recompute)
        self._pushes = getattr(self.scheduler.policy, "pushes", False)
        self.prefill, self.decode, self._peers = [], [], {}
        self._waiting, self._ids = {}, 0            # request_id -> (request, future)
        self._serving, self._closed = {}, False     # task -> future: until `generate` has ended
        self.lost = {}                              # name -> why, of engines that have died
        self._routed, self._ending = set(), []      # Servings; tasks that see the dead off
        self._strays = set()                        # reads that were given up and go on
        self._mended = dict.fromkeys(MENDED, 0)
        self.collectives, self._fabric = None, fabric
        if self._fabric is None and config.nic == "soft" and config.device is None:
            self._fabric = Fabric()

    async def __aenter__(self):
        with contextlib.ExitStack() as stack:
            self._open(stack)
            self._to_close = stack.pop_all()        # had it failed, all of it would close now
        for engine in self.decode:
            engine.start()
        return self

    def _open(self, stack):
        config = self.config
        for i in range(config.num_prefill):
            self.prefill.append(PrefillEngine(
                i, i, f"pe{i}", self.layout, **self._parts(f"pe{i}", stack),
                max_tokens=config.max_tokens, depth=config.depth, quota_s=config.quota_s,
                attention_time=config.attention_time, batch_tokens=config.batch_tokens,
                pushed=self._pushes))
        for i in range(config.num_decode):
            self.decode.append(DecodeEngine(
                i, config.num_prefill + i, f"de{i}", self.layout, **self._parts(f"de{i}", stack),
                hbm_blocks=config.hbm_blocks))
        self._connect()

    def _parts(self, name, stack):
        """What every node has: a storage ring, a compute NIC, HBM, arithmetic, a buffer."""
        config, ring = self.config, None
        if self.store is not None:
            ring = stack.enter_context(contextlib.closing(self.store.open_ring(
                read_bytes_per_s=config.snic_bytes_per_s,
                write_bytes_per_s=config.snic_bytes_per_s, name=name)))
        nic = stack.enter_context(contextlib.closing(Nic.open(
            config.device or config.nic, name=name, fabric=self._fabric,
            bytes_per_s=config.cnic_bytes_per_s)))
        nic.listen(self._address(name))
        memory = HostHbm() if config.device is None else stack.enter_context(
            contextlib.closing(DeviceHbm(config.device, self._address(name))))
        compute = stack.enter_context(contextlib.closing(self._make_compute()))
        if self._tracer is not None:
            compute = self._tracer.compute(compute, name)
        return {"ring": ring, "nic": nic, "memory": memory, "compute": compute,
                "buffer_blocks": config.buffer_blocks}

    def _address(self, name):
        """Names on a GPU are those of the whole process, which may have other clusters."""
        return name if self.config.device is None else f"{name} of {id(self):x}"

    def _connect(self):
        """Every NIC with every other, once each way: any node may lend its NIC, or push."""
        persist = self.config.persist_class
        classes = [self.config.kv_class, *([] if persist in (None, self.config.kv_class)
                                           else [persist])]
        self._peers = {(a.name, b.name): a.nic.connect(self._address(b.name), classes=classes)
                       for a in self.engines for b in self.engines}
        self._max_sge = min(qp["max_sge"] for peer in self._peers.values()
                            for qp in peer.query().values())
        if self.config.collectives is not None:
            self.collectives = Collectives(self.config.collectives, self.decode)
            for i, engine in enumerate(self.decode):
                engine.exchange = self.collectives.of(i)

    @property
    def engines(self):
        """Prefill engines, then decode engines."""
        return [*self.prefill, *self.decode]

    async def __aexit__(self, failed, *exc):
        self._closed = True
        for task in self._serving:
            task.cancel()
        await drained(list(self._serving.values()))
        for engine in self.decode:
            await engine.stop()
        await drained(self._ending)
        if self._strays or failed:                  # a signal, say, cuts off moves under way
            await asyncio.gather(*(_close_ring(engine.ring) for engine in self.engines))
            await drained(list(self._strays))
        while failed and not _closed([engine.nic for engine in self.engines]):
            await asyncio.sleep(0.001)
        self._to_close.close()

    def kill(self, name: str) -> None:
        """An engine dies now, as its process would: queue pairs and storage ring end, its tasks as
        well. Requests that need it are routed anew (EngineLost, if no engine of its side is left)
        and go on behind the last token they have. Its memory stays until no device uses it."""
        engine = next((engine for engine in self.engines if engine.name == name), None)
        if engine is None:
            raise InvalidArgument(f"no engine is called {name!r}; there are "
                                  + ", ".join(engine.name for engine in self.engines))
        if name in self.lost or self._closed:
            return
        side = PE if engine in self.prefill else DE
        self.lost[name] = f"engine {name} has died"
        engine.nic.fail()                           # nothing is in flight on its queue pairs now
        _closed(self._ends_of(engine))
        if side == DE:
            engine.die()
            if self.collectives is not None:
                self.collectives.lose(engine.engine_id)
        for serving in list(self._routed):
            serving.lose(engine, self.lost[name])
        self._ending.append(asyncio.ensure_future(self._see_off(engine)))
        self.scheduler.lose(side, engine.engine_id)
        self._refuse_all()
        self.fetch()

    async def _see_off(self, engine):
        """Its ring and NIC end once no device works for them any more."""
        if engine.ring is not None:
            await _close_ring(engine.ring)
        while not _closed([*self._ends_of(engine), engine.nic]):
            await asyncio.sleep(0.001)

    def _ends_of(self, engine):
        return [peer for names, peer in self._peers.items() if engine.name in names]

    def _refuse_all(self):
        """Requests that wait for a route have none to wait for, if no engine of a side is left."""
        for request, routed in list(self._waiting.values()):
            failure = self._none_left(request)
            if failure is not None and not routed.done():
                self.scheduler.cancel(request.request_id)
                del self._waiting[request.request_id]
                routed.set_exception(failure)

    def _none_left(self, request):
        """EngineLost if there is no engine that could serve it."""
        for word, option, engines in (("prefill", "num_prefill", self.prefill),
                                      ("decode", "num_decode", self.decode)):
            names = [engine.name for engine in engines]
            if all(name in self.lost for name in names):
                return EngineLost(f"request {request.request_id}: all {word} engines have died "
                                  f"({', '.join(names)}): open a cluster with more of them "
                                  f"({option}) and submit it again", names[-1])
        return None

    def counters(self) -> dict:
        """What went wrong and was mended since the cluster was opened: requests planned again
        ("replans": fewer hits), tried again ("retries"), "read_failovers" (another storage NIC),
        "reroutes" (other engines); "engines_lost"; "persist_failures" (blocks not stored)."""
        return {**{figure[4:]: count for figure, count in self._mended.items()},
                "engines_lost": len(self.lost),
                "persist_failures": sum(e.num_persist_failures for e in self.decode)}

    async def generate(self, session: str, prompt, num_new_tokens: int) -> EngineRequest:
        """Serve one request: all tokens generated, all its full blocks stored."""
        if self._closed:
            raise Closed("the cluster is closed")
        if not self.prefill:
            raise Closed("the cluster is not open yet: use `async with Cluster(...) as cluster`")
        task, ended = asyncio.current_task(), asyncio.get_running_loop().create_future()
        self._serving[task] = ended
        try:
            return await self._generate(session, prompt, num_new_tokens)
        finally:
            del self._serving[task]
            ended.set_result(None)
            task = None                             # which holds what it ends by, and that us

    async def _generate(self, session, prompt, num_new_tokens):
        config, namespace = self.config, self.config.namespace(session)
        prompt = token_array(prompt).copy()         # the caller's array may change meanwhile
        longest = len(prompt) + checked_int("num_new_tokens", num_new_tokens, 0)
        if longest > config.max_tokens:
            raise InvalidArgument(f"{longest} tokens exceed max_tokens {config.max_tokens}")
        if self.layout.num_blocks(longest) > config.hbm_blocks:     # it would wait for ever
            raise InvalidArgument(f"{longest} tokens need {self.layout.num_blocks(longest)} blocks "
                                  f"of HBM, a decode engine has {config.hbm_blocks}: raise "
                                  "hbm_blocks")
        self._ids += 1
        request = EngineRequest(self._ids, session, prompt, num_new_tokens,
                                block_keys(prompt, self.layout, namespace),
                                root_key(self.layout, namespace))
        try:
            await self._serve(request)
        finally:
            for figure in MENDED:
                self._mended[figure] += getattr(request, figure)
        return request

    async def _serve(self, request):
        """Until all tokens are there, over as many routes as it takes: an engine that dies ends
        one. What there is of the request then is matched anew, generated tokens included."""
        while True:
            if self.store is not None:
                stored = self.store.match(request.keys) * self.layout.block_tokens
                request.num_hit_tokens = usable_hits(stored, request.num_prompt_tokens,
                                                     self.layout)
            serving = await self._route(request)
            try:
                return await serving.run()
            except EngineLost as lost:
                request = serving.request
                if request.finished:                # some blocks are not stored: it costs reuse
                    return
                request.note("num_reroutes", str(lost))
                request = request.rest(self.layout)
            finally:
                self._routed.discard(serving)

    async def _route(self, request):
        """Wait until the scheduler has a place for the request. EngineLost if there is none."""
        failure = self._none_left(request)
        if failure is not None:
            raise failure
        routed = asyncio.get_running_loop().create_future()
        self._submit(request)
        self._waiting[request.request_id] = request, routed
        try:
            self.fetch()
            return await routed
        except BaseException:                       # cancelled, or there is no route for it
            self.scheduler.cancel(request.request_id)
            self._waiting.pop(request.request_id, None)
            if routed.done() and not routed.cancelled() and routed.exception() is None:
                self._routed.discard(routed.result())
                routed.result().leave_all()
            raise

    def _submit(self, request):
        blocks = self.layout.num_blocks(request.num_prompt_tokens + request.num_new_tokens)
        # HBM comes in whole blocks, so the scheduler is told whole blocks of tokens.
        self.scheduler.submit(Request(
            request.request_id, request.num_prompt_tokens, request.num_hit_tokens,
            blocks * self.layout.block_tokens - request.num_prompt_tokens))

    def fetch(self) -> None:
        """Ask the scheduler what can start now; at once, since nobody here is far away."""
        if not self.scheduler.num_waiting:
            return
        left = False
        for route in self._fetched():
            request, routed = self._waiting.pop(route.request_id)
            if routed.cancelled():                  # and its task has not heard of it yet
                left = True
                continue
            if route.push and not self._pushes:     # PE HBM is closed to others' writes
                routed.set_exception(InvalidArgument(
                    "the policy pushes and does not say so: give it an attribute pushes = True"))
                left = True
                continue
            request.parts, request.reason = route.parts, str(route.reason)
            request.num_hit_tokens = route.num_load_tokens
            nodes = self._nodes(route)
            serving = Serving(request, route, nodes, self._mover(nodes, request),
                              self.fetch, self.config.recovery)
            self._routed.add(serving)
            routed.set_result(serving)
        for request_id, error in self.scheduler.rejections():
            routed = self._waiting.pop(request_id)[1]
            if not routed.done():
                routed.set_exception(error)
        if left:
            self.fetch()                            # its place is somebody else's

    def _fetched(self):
        """Routes. A policy that fails with an error of its own costs the request that it was asked
        about alone: that one is among the rejections then, and the others get theirs."""
        while True:
            num_waiting = self.scheduler.num_waiting
            try:
                return self.scheduler.fetch(*self._reports())
            except Exception:
                if self.scheduler.num_waiting == num_waiting:   # it is not about one request
                    raise

    def _nodes(self, route):
        """The engines of a route by the side that they take in it."""
        nodes = {PE: self.prefill[route.prefill_engine], DE: self.decode[route.decode_engine]}
        engines = self.engines
        nodes.update((part.side, engines[part.node_id]) for part in route.parts)
        return nodes

    def _mover(self, nodes, request):
        mover = self._plain_mover(nodes)
        if self._tracer is None:
            return mover
        return self._tracer.mover(mover, {side: node.name for side, node in nodes.items()},
                                  request.request_id)

    def _plain_mover(self, nodes):
        rings = {side: self._ring(node) for side, node in nodes.items()}
        if self.mode == "oracle":
            return CopyMover(self.layout, rings)
        peers = {(a, b): self._peers[nodes[a].name, nodes[b].name] for a in nodes for b in nodes}
        return Mover(self.layout, rings, peers, self.config.kv_class,
                     persist_class=self.config.persist_class, max_sge=self._max_sge)

    @property
    def _snic_tokens_per_s(self):
        """All nodes have the same storage NIC: one that is not paced counts as 1."""
        return self._in_tokens(self.config.snic_bytes_per_s) or 1.0

    def _in_tokens(self, nbytes):
        return nbytes / sum(self.layout.layer_bytes_per_token)

    def _ring(self, node):
        """The node's ring as a request uses it: it does not wait for ever, unless it is to."""
        timeout_s = self.config.read_timeout_s
        if node.ring is None or timeout_s is None or self.mode == "oracle":
            return node.ring
        return PatientRing(node.name, node.ring, timeout_s, self._strays, node.buffer.regrant)

    def _reports(self):
        """What the engines say of themselves."""
        prefill, decode = [], []
        cnic = self._in_tokens(self.config.cnic_bytes_per_s) or INF
        for node, engine in enumerate(self.engines):
            if engine.name in self.lost:
                continue
            queue = engine.read_queue_tokens if engine.ring is not None else 0
            figures = engine.engine_id, node, engine.num_requests, engine.num_tokens, queue
            lends = {"snic_tokens_per_s": self._snic_tokens_per_s,
                     # Room for the longest request stays, or who borrows holds up the lender.
                     "lend_tokens": max(0, engine.free_buffer_tokens - self.config.max_tokens)
                     if engine.ring is not None else 0,
                     "lend_tokens_per_s": spare_rate(
                         PE if node < len(self.prefill) else DE, len(self.prefill),
                         len(self.decode),
                         self._in_tokens(self.config.snic_bytes_per_s), cnic),
                     "free_buffer_tokens": engine.free_buffer_tokens, "cnic_tokens_per_s": cnic}
            if node < len(self.prefill):
                prefill.append(EngineReport(*figures, **lends))
            else:
                decode.append(EngineReport(*figures, engine.free_hbm_tokens, **lends,
                                           hbm_tokens=engine.num_hbm_tokens))
        return prefill, decode


async def _close_ring(ring):
    """Without blocking the loop: what a device has begun has to end first."""
    if ring is not None:
        await asyncio.get_running_loop().run_in_executor(None, lambda: ring.close(cancel=True))


def _closed(ends) -> bool:
    """Close what is idle of these; are all closed?"""
    busy = False
    for end in ends:
        try:
            end.close()
        except Busy:
            busy = True
    return not busy
