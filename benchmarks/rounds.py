"""Contenders in processes of their own, run in turn; claims about the ratios of neighbours."""
import multiprocessing
import os
import statistics
import traceback
from typing import NamedTuple

import contenders
import numpy as np
import peers                            # noqa: F401  registers its contenders

PATIENCE = 300                          # seconds


class Claim(NamedTuple):
    """`kind` of a against b: "rate" (GB/s), "time" or "cpu" are ratios, "cpu+" is a difference in
    s/GB; "cpu rate" is a's GB in a second of CPU. `at_least` or `at_most` is what is wanted;
    neither: it is only shown."""
    kind: str
    a: str
    b: str
    at_least: float | None = None
    at_most: float | None = None

    def of(self, a, b):
        """Of two runs."""
        if self.kind == "rate":
            return a["nbytes"] / a["seconds"] / (b["nbytes"] / b["seconds"])
        if self.kind == "time":
            return a["seconds"] / a["nbytes"] / (b["seconds"] / b["nbytes"])
        if self.kind == "cpu":
            return a["cpu"] / a["nbytes"] / max(1e-15, b["cpu"] / b["nbytes"])
        if self.kind == "cpu rate":
            return a["nbytes"] / a["cpu"] / 1e9
        return 1e9 * (a["cpu"] / a["nbytes"] - b["cpu"] / b["nbytes"])

    def __str__(self):
        what = {"rate": "{} / {}, GB/s", "time": "{} / {}, time", "cpu": "{} / {}, CPU",
                "cpu+": "{} - {}, CPU s/GB", "cpu rate": "{}, GB/CPU s"}[self.kind]
        return what.format(self.a, self.b)

    @property
    def wanted(self):
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:g}"

    def met(self, value):
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most


class Result(NamedTuple):
    claim: Claim
    measured: tuple             # lower quartile, median, upper quartile
    null: tuple                 # the reference against itself, likewise
    rounds: int

    @property
    def verdict(self):
        met = self.claim.met(self.measured[1])
        if met is None:
            return ""
        noisy = self.claim.kind in ("rate", "time") and self.null[2] - self.null[0] > 0.1
        return ("inconclusive, " if noisy else "") + ("met" if met else "MISSED")

    def cells(self):
        low, median, high = self.measured
        return [str(self.claim), self.claim.wanted, f"{median:.3f} [{low:.3f}, {high:.3f}]",
                "" if "cpu" in self.claim.kind else "{1:.3f} [{0:.3f}, {2:.3f}]".format(*self.null),
                self.verdict]


def quartiles(values):
    if len(values) < 2:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def serve(pipe, name, setting):
    """The process of one contender."""
    one = None
    try:
        one = contenders.CONTENDERS[name](setting)
        pipe.send("ready")
        while (order := pipe.recv()) is not None:
            pipe.send(one.run(*order))
    except contenders.Missing as missing:
        pipe.send(missing)
    except EOFError:
        pass
    except BaseException as failed:
        traceback.print_exc()
        pipe.send(RuntimeError(f"{name}: {type(failed).__name__}: {failed}"))
    finally:
        if one is not None:
            one.close()
    pipe.close()


class Process:
    def __init__(self, name, setting):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, name, setting), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self):
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError(f"{self.name} has said nothing for {PATIENCE} s")
        try:
            answer = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name} died") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, ids, whole):
        self.pipe.send((ids, whole))
        return self.answer()

    def stop(self):
        try:
            self.pipe.send(None)
        except OSError:
            pass
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()


def play(names, setting, *, rounds, nbytes):
    """({name: [run, ...]}, [the reference's second runs], {name: why it does not run here}).

    Each round is in an order of its own (a disk may have a burst left from whoever went before).
    The first name is the reference.
    """
    processes, skipped, random = {}, {}, np.random.default_rng(7)
    count = min(setting.num_blocks, max(setting.depth, nbytes // setting.nbytes))
    try:
        processes |= {name: Process(name, setting) for name in names}
        for name in names:
            try:
                processes[name].answer()
            except contenders.Missing as missing:
                skipped[name] = str(missing)
                processes.pop(name).stop()
        runs, again = {name: [] for name in processes}, []
        reference = next(name for name in names if name in processes)
        order = [*processes, None]                      # None: the reference's second turn
        at = 0
        for number in range(-1, rounds):                # the first one warms up, and is checked
            random.shuffle(order)
            for name in order:
                ids = random.choice(setting.num_blocks, count, replace=False)
                if setting.writes:
                    ids, at = (at + np.arange(count)) % setting.num_blocks, at + count
                run = processes[name or reference].run(ids, number < 0)
                if number >= 0:
                    (runs[name] if name else again).append(run)
    finally:
        for process in processes.values():
            process.stop()
    return runs, again, skipped


def judge(claims, runs, again):
    """A Result for each claim whose two contenders ran."""
    reference = next(iter(runs))
    results = []
    for claim in claims:
        if claim.a in runs and claim.b in runs:
            null = [claim.of(*pair) for pair in zip(again, runs[reference])]
            each = [claim.of(*pair) for pair in zip(runs[claim.a], runs[claim.b])]
            results.append(Result(claim, quartiles(each), quartiles(null), len(each)))
    return results


def summary(runs):
    """[name, median GB/s, median CPU s/GB, its quartiles] of each contender."""
    lines = []
    for name, of in runs.items():
        rate = statistics.median(run["nbytes"] / run["seconds"] / 1e9 for run in of)
        low, cpu, high = quartiles([1e9 * run["cpu"] / run["nbytes"] for run in of])
        lines.append([name, f"{rate:.2f}", f"{cpu:.4f} [{low:.4f}, {high:.4f}]"])
    return lines


def table(head, lines):
    widths = [max(len(str(cell)) for cell in column) for column in zip(head, *lines)]
    return "\n".join("  ".join(str(cell).ljust(width) for cell, width in zip(line, widths)).rstrip()
                     for line in [head, *lines])


def load():
    return os.getloadavg()[0]
