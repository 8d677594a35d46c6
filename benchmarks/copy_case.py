"""What the copy benchmark measures: a case (blocks, how many, which way), ways to do it, and rounds
in which all ways take their turn, so that a busy machine hits all of them.

A way has `name`, `calls` (for how many calls or blocks its submission stands), `submit()`, which
returns the nanoseconds of the submitting call, `finish()`, and `note()`, what is worth telling.
"""
import random
import time
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

KIB = 1 << 10
HOST_STRIDE = 2         # blocks: in host memory every second Layer Block belongs to another layer


class Sample(NamedTuple):
    """One transfer: CPU is of the whole process, all threads."""
    submit_ns: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Case:
    """`count` Layer Blocks of `block` bytes. Scattered: in a random order on both sides; regular:
    equal strides on both."""
    direction: str              # H2D, D2H; H2H without a GPU
    block: int
    count: int
    pattern: str = "scattered"

    def __str__(self):
        return f"{self.direction}-{self.size}x{self.count}-{self.pattern}"

    @property
    def size(self):
        return f"{self.block >> 10}K"

    @property
    def nbytes(self):
        return self.block * self.count

    def within(self, nbytes):
        """The same with as many blocks as `nbytes` hold."""
        return Case(self.direction, self.block, max(1, min(self.count, nbytes // self.block)),
                    self.pattern)

    def orders(self):
        """Where block i lies on the host side and on the device side, as ids."""
        if self.pattern == "regular":
            return np.arange(self.count), np.arange(self.count)
        rng = np.random.default_rng(self.count)
        return rng.permutation(self.count), rng.permutation(self.count)


def fresh(nbytes, seed):
    """Random bytes, other ones for each case (SFC64: the memory is the slow part)."""
    words = np.random.Generator(np.random.SFC64(seed)).integers(
        0, 2**64, -(-nbytes // 8), np.uint64)
    return words.view(np.uint8)[:nbytes]


def address(array):
    return array.__array_interface__["data"][0]


def take_turns(benchmark, ways, run, most=30, seconds=1.0):
    """`run(way) -> Sample` for each way in each round, in a new random order; {name: samples}.

    As many rounds as fit into `seconds`, 5 to `most`, after two that warm up. Smoke mode: one.
    """
    samples, order = {way.name: [] for way in ways}, random.Random(1)
    assert len(samples) == len(ways), "two ways of one name"

    def one_round():
        for way in order.sample(ways, len(ways)):
            samples[way.name].append(run(way))
    rounds = 1
    if not benchmark.disabled:
        one_round()
        start = time.perf_counter()
        one_round()
        took = time.perf_counter() - start
        rounds = max(5, min(most, int(seconds / took)))
        for taken in samples.values():
            taken.clear()
    benchmark.pedantic(one_round, rounds=rounds, iterations=1)
    return samples
