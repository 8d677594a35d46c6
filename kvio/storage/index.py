"""The index: which blocks are stored, and where. A cache of the segment headers, never the truth.

Blocks form a trie by parent. What a user finds is what `match` reaches walking from the first
block of a chain, so a block whose ancestor is gone is invisible until the ancestor returns; no
bookkeeping is needed for that.
"""
import numpy as np

from kvio.storage.format import BLOCK_IO, key_list

__all__ = ["Index"]


class Index:
    """Key -> place. A place is a row of BLOCK_IO (segment, slot, crc, generation, ...).

    One key may stand in several segments; any valid copy serves, the others are kept in reserve.
    Not thread-safe: the store holds its lock.
    """

    def __init__(self):
        self._rows: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        self._places = np.zeros(1024, BLOCK_IO)
        self._spare: list[int] = []
        self._used = 0

    def __len__(self):
        return len(self._rows)

    def __contains__(self, key: bytes):
        return key in self._rows

    def match(self, keys: np.ndarray) -> int:
        """How many keys from the first on are stored without a gap."""
        rows = self._rows
        for count, key in enumerate(key_list(keys)):
            if key not in rows:
                return count
        return len(keys)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Row per key for `places`, -1 where it is not stored."""
        get = self._rows.get
        return np.fromiter((get(key, -1) for key in key_list(keys)), np.int64, len(keys))

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Copies of the places of `rows`; those of -1 are meaningless."""
        return self._places[rows]

    def insert(self, places: np.ndarray) -> int:
        """Add blocks; returns how many were not stored before (the rest are further copies)."""
        new = 0
        keys = np.ascontiguousarray(places["key"]).tolist()
        for key, row in zip(keys, self._add_rows(places)):
            if self._rows.setdefault(key, row) == row:
                new += 1
            else:
                self._copies.setdefault(key, []).append(row)
        return new

    def _add_rows(self, places):
        count = len(places)
        while len(self._spare) < count and self._used + count > len(self._places):
            self._places = np.concatenate([self._places, np.zeros_like(self._places)])
        if len(self._spare) >= count:
            rows = [self._spare.pop() for _ in range(count)]
        else:
            rows = list(range(self._used, self._used + count))
            self._used += count
        self._places[rows] = places
        return rows

    def remove(self, place: np.void) -> bool:
        """Forget this copy of a block; another one takes over. False if it was not known."""
        key = bytes(place["key"])
        if key not in self._rows:
            return False
        rows = [self._rows[key], *self._copies.pop(key, ())]
        where = [place[name] for name in ("segment", "slot", "generation")]
        gone = [row for row in rows
                if [self._places[row][name] for name in ("segment", "slot", "generation")] == where]
        left = [row for row in rows if row not in gone]
        self._spare.extend(gone)
        if left:
            self._rows[key] = left[0]
        else:
            del self._rows[key]
        if len(left) > 1:
            self._copies[key] = left[1:]
        return bool(gone)
