"""`kvio bench transfer`: what the transfer engine does on this machine, beside a C memcpy loop.

Two NICs of this process; one reads scattered blocks of the other's memory into its own, a batch
a doorbell, post to completion. The ceiling is a plain C loop of memcpy over the same work
requests, measured in turn with the NIC. It needs numpy and nothing else.
"""
import argparse
import contextlib
import json
import os
import statistics
import textwrap
import time
from dataclasses import asdict, dataclass

import numpy as np

from kvio._ext import nic as ext
from kvio.errors import InvalidArgument, TransferError
from kvio.layout import READ, WR_DTYPE
from kvio.transfer import COLLECTIVE, KV, Fabric, Nic, TrafficClass

__all__ = ["Cell", "measure", "run", "transfer_bench"]

SAMPLE_S = 0.002                # a sample repeats a batch until it takes about this long
MIN_SAMPLES = 5
WIDE = 0.2                      # of the median, between the quartiles
MAX_NBYTES = 1 << 30
ADDRESS = "kvio-bench"
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


@dataclass(frozen=True)
class Cell:
    """Medians of one size, batch and class; `*_quartiles` are the first and the third.
    share_of_ceiling: the loop's time over the NIC's, pair by pair."""

    nbytes: int
    batch: int
    traffic_class: str
    gb_per_s: float
    gb_per_s_quartiles: tuple
    ceiling_gb_per_s: float
    share_of_ceiling: float
    share_quartiles: tuple
    cpu_s_per_gib: float
    doorbells_per_wr: float
    num_samples: int
    num_batches: int


class _Pair:
    """Two NICs of one provider in this process, connected in each class."""

    def __init__(self, device, classes, stack):
        fabric = Fabric() if device == "soft" else None
        self.a, self.b = (stack.enter_context(Nic.open(device, name=name, fabric=fabric))
                          for name in ("bench-a", "bench-b"))
        listener = self.b.listen(ADDRESS)
        stack.callback(listener.close)
        self.peer = self.a.connect(ADDRESS, classes=classes)


@contextlib.contextmanager
def _blocks(pair, nbytes, count):
    """Work requests that read `count` scattered blocks, their target and what has to be in it."""
    draw = np.random.default_rng(1)
    source = draw.integers(0, 256, (count, nbytes), np.uint8)
    target = np.zeros((count, nbytes), np.uint8)
    local, remote = pair.a.register(target), pair.b.register(source)
    order = draw.permutation(count)
    wrs = np.zeros(count, WR_DTYPE)
    wrs["opcode"], wrs["length"] = READ, nbytes
    wrs["lkey"], wrs["rkey"] = local.key, remote.key
    wrs["local_addr"] = local.addr + np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
    wrs["remote_addr"] = remote.addr + order.astype(np.uint64) * np.uint64(nbytes)
    try:
        yield wrs, target, source[order]
    finally:
        pair.a.deregister(local)
        pair.b.deregister(remote)


def measure(pair, nbytes: int, batch: int, traffic_class: TrafficClass, seconds: float) -> Cell:
    """One cell, in about `seconds`. TransferError if a byte is not what it should be."""
    with _blocks(pair, nbytes, batch) as (wrs, target, expected):
        def read():
            pair.peer.read(wrs, traffic_class).wait()

        def loop():
            ext.memcpy_loop(wrs)

        read()                              # pages touched, descriptors cached
        _check(target, expected, "the first batch")
        repeats = max(1, round(SAMPLE_S / _timed(read, 1)[0]))
        before, begin, samples = pair.a.stats(), time.monotonic(), []
        while len(samples) < MIN_SAMPLES or time.monotonic() - begin < seconds:
            pair_of = [(read, repeats), (loop, repeats)]
            turned = pair_of[::-1] if len(samples) % 2 else pair_of
            took = {what: _timed(what, count) for what, count in turned}
            samples.append((*took[read], took[loop][0]))
        after = pair.a.stats()
        target[:] = 0                       # the loop has written there as well
        read()
        _check(target, expected, "the last batch")
    moved = nbytes * batch * repeats
    return _cell(nbytes, batch, traffic_class, np.array(samples), moved, repeats,
                 (after["doorbells"] - before["doorbells"])
                 / (after["work_requests"] - before["work_requests"]))


def _timed(what, repeats):
    """Seconds of wall clock and of CPU."""
    cpu, begin = time.process_time(), time.perf_counter()
    for _ in range(repeats):
        what()
    return max(time.perf_counter() - begin, 1e-9), time.process_time() - cpu


def _check(target, expected, what):
    if not np.array_equal(target, expected):
        wrong = int(np.count_nonzero((target != expected).any(axis=1)))
        raise TransferError(5, f"bench: {wrong} of {len(target)} blocks of {what} are not what "
                            "was sent")


def _cell(nbytes, batch, traffic_class, samples, moved, repeats, doorbells):
    wall, cpu, loop = samples.T
    rate, share = moved / wall / 1e9, loop / wall
    return Cell(nbytes, batch, traffic_class.name, statistics.median(rate),
                _quartiles(rate), moved / statistics.median(loop) / 1e9,
                statistics.median(share), _quartiles(share),
                float(cpu.sum()) / (moved * len(samples) / 2**30), doorbells, len(samples),
                repeats * len(samples))


def _quartiles(values):
    return tuple(float(q) for q in np.percentile(values, [25, 75]))


def transfer_bench(nic: str = "soft", sizes=(4 << 10, 48 << 10, 256 << 10), batches=(1, 16, 256),
                   classes=(COLLECTIVE, KV), seconds: float = 0.3, show=None) -> list:
    """All cells, size by size; `show(cell)` is called as each is done."""
    for what, values in ("sizes", sizes), ("batches", batches):
        if not values or not all(1 <= value <= MAX_NBYTES for value in values):
            raise InvalidArgument(f"{what} must be numbers from 1 to {MAX_NBYTES}")
    if max(sizes) * max(batches) > MAX_NBYTES:
        raise InvalidArgument(f"{max(sizes)} bytes x {max(batches)} exceeds {MAX_NBYTES} bytes a "
                              "batch: smaller sizes or batches")
    if not 0 <= seconds < 1e6:
        raise InvalidArgument(f"seconds must be 0 or more, not {seconds}")
    cells = []
    with contextlib.ExitStack() as stack:
        pair = _Pair(nic, list(classes), stack)
        for nbytes in sizes:
            for batch in batches:
                for traffic_class in classes:
                    cells.append(measure(pair, nbytes, batch, traffic_class, seconds))
                    if show is not None:
                        show(cells[-1])
    return cells


# ---- the command

def add_command(commands) -> None:
    """`kvio bench transfer` as a subcommand of `commands`."""
    bench = commands.add_parser("bench", help="what this machine does, measured")
    bench = bench.add_subparsers(title="what", metavar="WHAT", required=True)
    command = bench.add_parser(
        "transfer", help="NIC to NIC, beside a C memcpy loop",
        description="Reads scattered blocks between two NICs of this process, post to completion, "
        "beside a plain C loop of memcpy over the same blocks in the same run. Medians with "
        "quartiles; the bytes are checked.")
    command.add_argument("--nic", default="soft", metavar="DEVICE", help="soft (default), or "
                         "verbs:HCA")
    command.add_argument("--sizes", type=_sizes, default="4K,48K,256K", metavar="LIST",
                         help="block sizes, like 4K,48K,1M (default: %(default)s)")
    command.add_argument("--batches", type=_sizes, default="1,16,256", metavar="LIST",
                         help="blocks a doorbell (default: %(default)s)")
    command.add_argument("--class", dest="classes", action="append", metavar="NAME:SL:TCLASS",
                         type=_class, help="traffic class; may be repeated (default: "
                         "collective:0:184 and kv:2:32)")
    command.add_argument("--seconds", type=float, default=0.3, help="for each line (default: "
                         "%(default)s)")
    command.add_argument("--json", action="store_true", help="for programs")
    command.set_defaults(run=run)


def _sizes(text):
    try:
        return tuple(int(each.rstrip("KkMm")) * UNITS[each.lstrip("0123456789").upper()]
                     for each in text.split(","))
    except (ValueError, KeyError):
        raise argparse.ArgumentTypeError(f"a list is like 4K,48K,1M, not {text!r}") from None


def _class(text):
    name, *numbers = text.rsplit(":", 2)
    try:
        sl, tclass = (int(number, 0) for number in numbers)
        return TrafficClass(name, sl, tclass)
    except ValueError as wrong:
        why = str(wrong) if isinstance(wrong, InvalidArgument) else \
            f"{text!r} is not NAME:SL:TCLASS, like kv:2:32"
        raise argparse.ArgumentTypeError(why) from None


def run(arguments) -> int:
    """The command. 0 when every byte was right."""
    classes = tuple(arguments.classes or (COLLECTIVE, KV))
    head = [f"{arguments.nic}: one NIC reads blocks of another's memory, in this process; median "
            "(quartiles)", HEAD]

    def show(cell):                         # no heading over an error
        while head:
            print(head.pop(0))
        print(_line(cell), flush=True)

    cells = transfer_bench(arguments.nic, arguments.sizes, arguments.batches, classes,
                           arguments.seconds, None if arguments.json else show)
    if arguments.json:
        print(json.dumps({"nic": arguments.nic, "cells": [asdict(cell) for cell in cells],
                          "load": os.getloadavg()[0], "cpus": os.cpu_count(),
                          "note": spread_note(cells)}, indent=2))
    else:
        print("ceiling: a C loop of memcpy over the same blocks, in turn with the NIC; all bytes "
              "as they should be")
        print(textwrap.fill(spread_note(cells), 100))
    return 0


def spread_note(cells) -> str:
    """What the quartiles are of, and, where they lie far apart, why that may be."""
    counts = sorted(cell.num_samples for cell in cells)
    wide = sum(high - low > WIDE * cell.gb_per_s for cell in cells
               for low, high in [cell.gb_per_s_quartiles])
    note = f"quartiles: of {counts[0]} to {counts[-1]} samples a line, each of about " \
        f"{SAMPLE_S * 1e3:g} ms or one batch"
    if wide:
        note += f"; {wide} of {len(cells)} lines are spread over more than {WIDE:.0%}: so short " \
            "a sample feels caches, the CPU's clock, and whatever else runs here (load " \
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs). The share of the ceiling says " \
            "more than GB/s then, for both are measured in turn. More --seconds steady the " \
            "medians, an idle machine the quartiles"
    return note


HEAD = (f"{'size':>9} {'batch':>6} {'class':<12} {'GB/s':>22} {'of ceiling':>20} "
        f"{'ceiling':>8} {'CPU s/GiB':>9} {'doorbells/WR':>12}")


def _line(cell):
    low, high = cell.gb_per_s_quartiles
    share_low, share_high = cell.share_quartiles
    rate = f"{cell.gb_per_s:.3f} ({low:.3f}-{high:.3f})"
    share = f"{cell.share_of_ceiling:.0%} ({share_low:.0%}-{share_high:.0%})"
    return (f"{_size(cell.nbytes):>9} {cell.batch:>6} {cell.traffic_class:<12} {rate:>22} "
            f"{share:>20} {cell.ceiling_gb_per_s:>8.3f} {cell.cpu_s_per_gib:>9.3f} "
            f"{cell.doorbells_per_wr:>12.4f}")


def _size(nbytes):
    for unit, divisor in (" MiB", 1 << 20), (" KiB", 1 << 10):
        if nbytes % divisor == 0:
            return f"{nbytes // divisor}{unit}"
    return f"{nbytes} B"
