"""The index: which blocks are stored, and where. A cache of the segment headers, never the truth.

Blocks form a trie by parent. What a user finds is what `match` reaches walking from the first
block of a chain, so a block whose ancestor is gone is invisible until the ancestor returns. The
work is done in C: include/kvio/index.h says what each method means.
"""
import numpy as np

from kvio._ext import index as _index
from kvio.layout import KEY_DTYPE
from kvio.storage.format import BLOCK_IO

__all__ = ["Index", "keys_of"]


class Index(_index.Index):
    """Key -> places. A place is a row of BLOCK_IO (segment, slot, crc, generation, ...).

    One key may stand in several segments; any valid copy serves. Thread-safe.
    """

    def __contains__(self, key: bytes):
        return self.match(np.frombuffer(key + bytes(16), KEY_DTYPE)) == 1

    def find(self, keys: np.ndarray, now_s: int = 0) -> np.ndarray:
        """A row of BLOCK_IO per key: status -EINPROGRESS, or -ENOENT where it is not stored. With
        `now_s` what is found counts as used."""
        out = np.empty(len(keys), BLOCK_IO)
        self.find_into(keys, now_s, out)
        return out

    def evict(self, count: int) -> np.ndarray:
        """Up to `count` own places, which have left the index."""
        out = np.empty(count, BLOCK_IO)
        return out[:self.evict_into(out)]


def keys_of(blocks: np.ndarray) -> np.ndarray:
    """(key, parent) of rows of BLOCK_IO."""
    keys = np.empty(len(blocks), KEY_DTYPE)
    for name in ("key", "parent"):
        keys[name] = np.ascontiguousarray(blocks[name]).view(np.uint8).reshape(-1, 16)
    return keys
