"""What the tests of the LMCache connector share: its keys, buffers and a way to wait."""
import mmap
import select
import time
import weakref

import numpy as np

SIZE = 8192
ODD = 5000                          # no whole pages: always copied


def names(count, tag="a"):
    """As LMCache writes its keys."""
    return [f"org/model@01000100@0@{tag}{i:063x}" for i in range(count)]


class Buffers:
    """`count` chunks of `nbytes` in one mapping, as LMCache's pool of chunks is."""

    def __init__(self, count, nbytes=SIZE, shift=0, gap=0):
        self.memory = mmap.mmap(-1, shift + count * (nbytes + gap) + mmap.PAGESIZE)
        step = nbytes + gap
        self.views = [memoryview(self.memory)[shift + i * step:shift + i * step + nbytes]
                      for i in range(count)]

    def fill(self, tag=0):
        for i, view in enumerate(self.views):
            view[:] = pattern(i, len(view), tag)
        return self

    def holds(self, i, tag=0):
        return bytes(self.views[i]) == pattern(i, len(self.views[i]), tag)


def pattern(i, nbytes, tag=0):
    return np.random.default_rng([i, tag]).bytes(nbytes)


_told = weakref.WeakKeyDictionary()         # connector -> what completed before it was asked for


def result(connector, number, timeout_s=20.0):
    """(ok, error, flags) of one number, once."""
    poll, told = select.poll(), _told.setdefault(connector, {})
    poll.register(connector.event_fd(), select.POLLIN)
    end = time.monotonic() + timeout_s
    while number not in told:
        assert poll.poll(max(0, end - time.monotonic()) * 1000), f"{number} did not complete"
        for done, *rest in connector.drain_completions():
            assert done not in told
            told[done] = tuple(rest)
    return told.pop(number)


def put(connector, keys, views):
    return result(connector, connector.submit_batch_set(keys, views))


def get(connector, keys, views):
    return result(connector, connector.submit_batch_get(keys, views))


def exists(connector, keys):
    return result(connector, connector.submit_batch_exists(keys))


def shelf_of(connector, nbytes=SIZE):
    return connector._mover._shelves[nbytes]
