"""Stand-in until the C index is merged: the same interface, in plain Python."""
import itertools

import numpy as np

from kvio.layout import KEY_DTYPE
from kvio.storage.format import BLOCK_IO, key_list


def keys_of(blocks: np.ndarray) -> np.ndarray:
    keys = np.empty(len(blocks), KEY_DTYPE)
    for name in ("key", "parent"):
        keys[name] = np.ascontiguousarray(blocks[name]).view(np.uint8).reshape(-1, 16)
    return keys

_NONE = bytes(16)


class Index:
    def __init__(self):
        self._places = {}       # (segment, slot) -> row
        self._keys = {}         # key -> [(segment, slot)]
        self._parent, self._used, self._pins = {}, {}, {}
        self._children = {}     # key -> set of stored keys
        self._own, self._clock = {}, itertools.count(1)

    def add_segment(self, number, slots, own):
        self._own[number] = own

    def __len__(self):
        return len(self._keys)

    def __contains__(self, key):
        return key in self._keys

    def match(self, keys):
        for count, key in enumerate(key_list(keys)):
            if key not in self._keys:
                return count
        return len(keys)

    def find(self, keys, now_s=0):
        out = np.zeros(len(keys), BLOCK_IO)
        for i, key in enumerate(key_list(keys)):
            places = self._keys.get(key)
            if places:
                best = next((p for p in places if self._own.get(p[0])), places[0])
                out[i] = self._places[best]
                out[i]["status"] = -115
            else:
                out[i]["status"] = -2
            out[i]["key"] = np.void(key)
            out[i]["parent"] = np.void(bytes(keys["parent"][i]))
        if now_s:
            self.touch(keys, now_s)
        return out

    def insert(self, blocks):
        new = 0
        for row in blocks:
            key, place = bytes(row["key"]), (int(row["segment"]), int(row["slot"]))
            old = self._places.get(place)
            if old is not None:
                if old["generation"] == row["generation"]:
                    continue
                self.remove(*place, int(old["generation"]))
            self._places[place] = row.copy()
            new += key not in self._keys
            self._keys.setdefault(key, []).append(place)
            self._parent[key] = bytes(row["parent"])
            self._children.setdefault(bytes(row["parent"]), set()).add(key)
            self._used.setdefault(key, (0, 0))
        return new

    def remove(self, segment, slot, generation):
        row = self._places.get((segment, slot))
        if row is None or row["generation"] != generation:
            return False
        del self._places[segment, slot]
        key = bytes(row["key"])
        self._keys[key].remove((segment, slot))
        if not self._keys[key]:
            del self._keys[key]
            self._children[self._parent[key]].discard(key)
            self._used.pop(key, None)
        return True

    def drop_segment(self, number):
        gone = [row for place, row in self._places.items() if place[0] == number]
        return sum(self.remove(number, int(r["slot"]), int(r["generation"])) for r in gone)

    def touch(self, keys, now_s):
        for key in reversed(key_list(keys)):
            if key in self._keys:
                self._used[key] = (now_s, next(self._clock))

    def pin(self, keys, by):
        count, prefix = 0, True
        for key in key_list(keys):
            prefix = prefix and key in self._keys
            count += prefix
            if key in self._keys:
                self._pins[key] = max(0, self._pins.get(key, 0) + by)
        return count

    def _orphan(self, key):
        parent = self._parent[key]
        return parent != _NONE and parent[:4] != b"root" and parent not in self._keys

    def evict(self, count):
        out = []
        while len(out) < count:
            own = [k for k, ps in self._keys.items() if not self._pins.get(k)
                   and any(self._own.get(p[0]) for p in ps)]
            if not own:
                break
            key = min(own, key=lambda k: (not self._orphan(k), bool(self._children.get(k)),
                                          self._used[k]))
            place = next(p for p in self._keys[key] if self._own.get(p[0]))
            row = self._places[place]
            out.append(row)
            self.remove(*place, int(row["generation"]))
        return np.array(out, BLOCK_IO)

    def segment_use(self, number):
        rows = [row for place, row in self._places.items() if place[0] == number]
        return len(rows), max((self._used[bytes(r["key"])][0] for r in rows), default=0)

    def stats(self):
        own = [p for p in self._places if self._own.get(p[0])]
        return {"blocks": len(self._keys), "places": len(self._places), "own_places": len(own),
                "orphans": sum(self._orphan(bytes(self._places[p]["key"])) for p in own),
                "ghosts": 0, "pinned": sum(v > 0 for v in self._pins.values()), "memory_bytes": 0}
