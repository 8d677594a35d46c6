"""Loader, scheduler, soft NICs and store under random faults, all drawn from one seed.

A seed gives a cluster (1 to 3 engines a side, a policy, sizes, rates), agents with their turns, and
a schedule of faults: each goes off when so many steps of plans have begun. Whatever happens, each
request has the right tokens, or an error that the faults explain; afterwards nothing is held, and
no byte has come into memory that belonged to somebody else.

    python tests/engine/fault_driver.py --first 17 --seeds 1     # that seed again, told in full
    python tests/engine/fault_driver.py --seeds 5000 --log FILE

With --real time and disk are real: nothing is the same again, and storage is truly asynchronous.
"""
import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field

from failing import (FLOWS, LAYOUT, READ, WRITE, Canaries, Steps, compute, config, in_flight,
                     in_link_time, leaks, new_pool, pause, prime, right_tokens, settled, spoil)
from kvio._ext import nic as ext
from kvio.engine.cluster import Cluster
from kvio.errors import Closed, EngineLost, KvioError, TransferError
from kvio.layout import block_keys
from kvio.scheduler import AttentionModel
from kvio.storage import BlockStore
from kvio.transfer import Fabric

LOOK_S, LIMIT_S = 0.25, 30.0        # of link time: without progress for so long, or for ever
POLICIES = (*FLOWS, "shorter_queue", "round_robin", "split", "any_node", "push")
KINDS = ("kill", "kill", "kill", "nic_status", "nic_status", "nic_fail", "delay", "delay", "spoil",
         "stall", "stall", "read_error", "write_error", "cancel", "cancel")
ATTENTION = AttentionModel(1e-8, 1e-7)


@dataclass(frozen=True)
class Fault:
    """`kind`, when `at` steps have begun, to the engine (or agent, or block) that `where` picks;
    `size` is how much of it: a delay, a count, a duration."""

    at: int
    kind: str
    where: int
    size: float


@dataclass
class Plan:
    """All that is drawn from a seed."""

    seed: int
    policy: str = ""
    changes: dict = field(default_factory=dict)     # of the configuration
    agents: list = field(default_factory=list)      # [(context, [(append, num_new_tokens)])]
    faults: list = field(default_factory=list)
    watched: bool = False                           # somebody else gets what becomes free
    leave_at: int | None = None                     # the cluster is left then
    capacity_blocks: int | None = None

    @classmethod
    def drawn(cls, seed: int) -> "Plan":
        draw = random.Random(seed)

        def tokens(least, most):
            return [draw.randrange(1000) for _ in range(draw.randint(least, most))]

        plan = cls(seed, draw.choice(POLICIES))
        plan.watched = draw.random() < 0.4
        blocks = draw.choice((24, 32, 48))
        plan.changes = {
            "num_prefill": draw.randint(1, 3), "num_decode": draw.randint(1, 3),
            "buffer_blocks": 600 if plan.watched else blocks,
            "hbm_blocks": 600 if plan.watched else draw.choice((24, 40)), "max_tokens": 88,
            "depth": draw.randint(1, 2), "max_attempts": draw.randint(1, 4),
            "read_timeout_s": draw.choice((None, 0.01, 0.01)),
            "cnic_bytes_per_s": draw.choice((0, 0, 2 << 20, 16 << 20))}
        if draw.random() < 0.3:
            plan.changes |= {"quota_s": draw.choice((2e-6, 1e-5)), "attention_time": ATTENTION}
        if draw.random() < 0.2:
            plan.capacity_blocks = draw.randint(3, 12)
        for _ in range(draw.randint(1, 4)):
            plan.agents.append((tokens(0, 24), [(tokens(1, 12), draw.randint(1, 8))
                                                for _ in range(draw.randint(1, 3))]))
        steps = 25 * sum(len(turns) for _, turns in plan.agents)
        if draw.random() < 0.08:
            plan.leave_at = draw.randrange(steps)
        plan.faults = sorted(
            (Fault(draw.randrange(steps), draw.choice(KINDS), draw.randrange(1000), draw.random())
             for _ in range(draw.choice((0, 1, 1, 2, 3, 5)))), key=lambda fault: fault.at)
        return plan

    def kinds(self) -> set:
        return {fault.kind for fault in self.faults}


class Run:
    """One plan carried out; `problems` says what should not have been."""

    def __init__(self, plan: Plan, real: bool = False):
        self.plan, self.real, self.problems, self.told = plan, real, [], []
        self.cluster = self.store = None
        self.tasks, self.prompts, self.left = {}, [], list(plan.faults)
        self.cancelled, self.num_finished, self.num_failed = set(), 0, 0
        self.steps, self.leave = None, asyncio.Event()

    # ---- the requests

    async def agent(self, number):
        context, turns = self.plan.agents[number]
        context = list(context)
        for append, num_new_tokens in turns:
            context += append
            expected = right_tokens(context, num_new_tokens)
            self.prompts.append((f"a{number}", context + expected[:-1]))
            try:
                request = await self.cluster.generate(f"a{number}", context, num_new_tokens)
            except KvioError as failure:
                self.num_failed += 1
                self.judge(number, failure)
            else:
                self.num_finished += 1
                if request.generated != expected:
                    self.problems.append(f"agent {number} got wrong tokens: {request}")
                if len(request.token_times) != num_new_tokens:
                    self.problems.append(f"agent {number} was told tokens twice: {request}")
            context += expected

    def judge(self, number, failure):
        """Is there a fault that explains it?"""
        lost = self.cluster.lost
        if isinstance(failure, EngineLost):
            explained = any(all(engine.name in lost for engine in side)
                            for side in (self.cluster.prefill, self.cluster.decode))
        elif isinstance(failure, Closed) and self.leave.is_set():
            explained = True
        else:                                   # a fault costs a request one try, and no more
            explained = isinstance(failure, TransferError) and \
                sum(fault.kind.startswith("nic") for fault in self.plan.faults) \
                >= self.plan.changes["max_attempts"]
        self.told.append(f"agent {number}: {failure!r}")
        if not explained:
            self.problems.append(f"agent {number}: no fault explains {failure!r}\\n"
                                 + "".join(traceback.format_exception(failure)))

    # ---- the faults

    def at(self, n, when, step):
        if n == self.plan.leave_at:
            self.leave.set()
        while when == "before" and self.left and self.left[0].at <= n:
            fault = self.left.pop(0)
            getattr(self, f"_{fault.kind}")(fault, asyncio.get_running_loop())

    def _engine(self, fault):
        """One that lives, and says so; None if none does."""
        engines = [e for e in self.cluster.engines if e.name not in self.cluster.lost]
        if not engines:
            return None
        engine = engines[fault.where % len(engines)]
        self.told.append(f"{fault.kind} of {engine.name}, size {fault.size:.3f}, at {fault.at}")
        return engine

    def _kill(self, fault, loop):
        engine = self._engine(fault)
        if engine is not None:
            self.cluster.kill(engine.name)

    def _nic_status(self, fault, loop):
        engine = self._engine(fault)
        if engine is not None:
            engine.nic._ext._fault(ext.STATUS, 1 + int(10 * fault.size), 11)

    def _nic_fail(self, fault, loop):
        engine = self._engine(fault)
        if engine is not None:
            engine.nic.fail()

    def _delay(self, fault, loop):
        engine = self._engine(fault)
        if engine is not None:
            engine.nic._ext._fault(ext.DELAY, 0, int(2e6 * fault.size))
            loop.call_later(0.004, self._end_delay, engine)

    def _stall(self, fault, loop):
        engine = self._engine(fault)
        if engine is not None:
            pause(engine, True)
            loop.call_later(0.04 * fault.size, pause, engine, False)

    def _end_delay(self, engine):
        if engine.name not in self.cluster.lost:
            engine.nic._ext._fault(ext.DELAY, 0, 0)

    def _read_error(self, fault, loop):
        engine = self._engine(fault)
        if engine is not None:
            engine.ring._ring._fault(READ, -5, count=1 + int(4 * fault.size))

    def _write_error(self, fault, loop):
        engine = self._engine(fault)
        if engine is not None:
            engine.ring._ring._fault(WRITE, -28 if fault.size < 0.5 else -5,
                                     count=1 + int(10 * fault.size))

    def _spoil(self, fault, loop):
        session, prompt = self.prompts[fault.where % len(self.prompts)]
        keys = block_keys(prompt, LAYOUT, self.cluster.config.namespace(session))
        if len(keys):
            block = int(fault.size * len(keys))
            found = spoil(self.store, keys[block])
            self.told.append(f"block {block} of {session} spoilt: {found}")

    def _cancel(self, fault, loop):
        running = [n for n, task in self.tasks.items() if not task.done()]
        if running:
            number = running[fault.where % len(running)]
            self.cancelled.add(number)
            self.told.append(f"agent {number} is cancelled at {fault.at}")
            loop.call_soon(self.tasks[number].cancel)

    # ---- all of it

    async def main(self, fabric):
        plan = self.plan
        conf = config(plan.policy, **plan.changes)
        with new_pool() as pool:
            for number, (context, _) in enumerate(plan.agents):
                with contextlib.suppress(TransferError):        # it may be too small
                    prime(self.store, pool, conf, f"a{number}", context)
        with Canaries() if plan.watched else contextlib.nullcontext() as canaries:
            async with Cluster(conf, "dualpath", self.store, compute, fabric) as self.cluster:
                with Steps(self.at).watched() as self.steps:
                    await self.serve()
                self.end_faults()
                if not self.problems and not self.leave.is_set():
                    await settled(self.cluster)
            await asyncio.gather(*self.tasks.values(), return_exceptions=True)
            if self.problems:
                return
            self.check_tasks()
            if canaries is not None:
                self.problems += canaries.give_back()
            self.problems += leaks(self.cluster)
            self.check_counters()

    async def serve(self):
        """Until all agents have ended, the cluster is to be left, or nothing goes on."""
        self.tasks = {number: asyncio.ensure_future(self.agent(number))
                      for number in range(len(self.plan.agents))}
        leaving = asyncio.ensure_future(self.leave.wait())
        all_ended = asyncio.gather(*self.tasks.values(), return_exceptions=True)
        loop, seen, still = asyncio.get_running_loop(), None, 0
        limit = loop.time() + LIMIT_S
        while not all_ended.done() and not leaving.done():
            await asyncio.wait([all_ended, leaving], timeout=LOOK_S,
                               return_when=asyncio.FIRST_COMPLETED)
            progress = self.steps.count, self.num_finished, self.num_failed
            still = still + 1 if progress == seen and not in_flight() else 0
            if still > (80 if self.real else 0) or loop.time() > limit:
                self.problems += [f"nothing goes on: {waits_in(task)}"
                                  for task in asyncio.all_tasks(loop)]
                break
            seen = progress
        leaving.cancel()

    def check_tasks(self):
        for number, task in self.tasks.items():
            if task.cancelled():
                if number not in self.cancelled and not self.leave.is_set():
                    self.problems.append(f"agent {number} was cancelled by nobody")
            elif task.exception() is not None:
                self.problems.append(f"agent {number}: " + "".join(
                    traceback.format_exception(task.exception())))

    def end_faults(self):
        for engine in self.cluster.engines:
            if engine.name not in self.cluster.lost:
                pause(engine, False)
                engine.ring._ring._fault(0, 0)
                for kind in (ext.STATUS, ext.DELAY):
                    engine.nic._ext._fault(kind, 0, 0)

    def check_counters(self):
        counters, kinds = self.cluster.counters(), self.plan.kinds()
        causes = {"replans": {"spoil", "read_error", "write_error"},    # a full disk evicts
                  "retries": {"nic_status", "nic_fail"}, "read_failovers": {"stall", "kill"},
                  "reroutes": {"kill"}, "engines_lost": {"kill"},
                  "persist_failures": {"write_error", "kill", "nic_status", "nic_fail", "stall"}}
        for name, count in counters.items():
            possible = kinds & causes[name] or \
                (name in ("replans", "persist_failures")
                 and self.plan.capacity_blocks is not None) or \
                (self.real and name in ("read_failovers", "persist_failures"))  # a busy disk
            if count and not possible:
                self.problems.append(f"{name} is {count}, and no fault explains it")


def waits_in(task) -> str:
    return f"{task.get_name()} " + " <- ".join(
        f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in task.get_stack())


def run_seed(seed: int, real: bool = False) -> Run:
    """Its problems are empty if all is well. `real`: not in link time, on a real disk."""
    plan = Plan.drawn(seed)
    run = Run(plan, real)
    capacity = None if plan.capacity_blocks is None else plan.capacity_blocks * LAYOUT.stride
    with tempfile.TemporaryDirectory(prefix="kvio-faults-") as path:
        try:
            with BlockStore.open(path, LAYOUT, segment_bytes=1 << 17,
                                 capacity_bytes=capacity) as run.store:
                if real:
                    asyncio.run(run.main(Fabric()))
                else:
                    in_link_time(run.main)
        except BaseException as failure:        # what else went wrong may be why
            if isinstance(failure, KeyboardInterrupt):
                raise
            run.problems.append("".join(traceback.format_exception(failure)))
    if not run.problems and in_flight():
        run.problems.append(f"{in_flight()} transfers are in flight for ever")
    return run


def report(run: Run) -> str:
    """What a failure prints."""
    return "\n".join([f"seed {run.plan.seed}: {len(run.problems)} problems", *run.problems,
                      f"plan: {run.plan}", "what happened:", *run.told,
                      f"again: python tests/engine/fault_driver.py --seeds 1 {'--real ' * run.real}"
                      f"--first {run.plan.seed}"])


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=200, help="how many, one after the other")
    parser.add_argument("--log", help="a line a seed goes there")
    parser.add_argument("--real", action="store_true", help="real time, a real disk")
    options = parser.parse_args(arguments)
    bad, finished, failed, begin = [], 0, 0, time.monotonic()
    log = open(options.log, "a") if options.log else contextlib.nullcontext(None)
    with log as file:
        for seed in range(options.first, options.first + options.seeds):
            run = run_seed(seed, options.real)
            finished, failed = finished + run.num_finished, failed + run.num_failed
            if file is not None:
                print(f"seed {seed}: {run.num_finished} served, {run.num_failed} failed typed, "
                      f"{len(run.problems)} problems; {'; '.join(run.told)}", file=file, flush=True)
            if run.problems or options.seeds == 1:
                print(report(run), flush=True)
            if run.problems:
                bad.append(seed)
    print(f"{options.seeds} seeds in {time.monotonic() - begin:.0f} s: {finished} requests served, "
          f"{failed} failed by a typed error; seeds with problems: {bad or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
