"""Touches: readers tell writers which of their blocks are used (docs/format.md, Touches).

Each reader rewrites one file of its own, at most once a second; writers read the files of the
others before they evict. All of it is a hint: what is damaged, late or lost costs nothing but a
worse choice of what to evict.
"""
import collections
import os

import numpy as np

from kvio._ext.index import newest_keys
from kvio.storage import format as fmt
from kvio.storage.scan import open_file, read_pages, write_pages

__all__ = ["Touches"]

_KEEP_S = 3.0


class Touches:
    """This store's touch file and those of others. Its caller's lock guards all but `note`."""

    def __init__(self, folder, store, writer):
        self._folder, self._store, self._writer = folder, store, writer
        self._path = os.path.join(folder, fmt.touch_name(writer))
        self._fd, self._sequence = -1, 0
        self._noted = collections.deque(maxlen=4096)    # (when, keys), not published yet
        self._recent = collections.deque()              # the same, of the last 3 s
        self._seen: dict[str, int] = {}                 # files of others -> sequence
        self.counts = {"touches_written": 0, "touches_read": 0, "touched_blocks": 0}

    def note(self, keys, now) -> None:
        """These keys (a bytearray, 16 bytes a key) are being read from others' segments."""
        if len(keys):
            self._noted.append((now, keys))

    def publish(self, now) -> None:
        """Rewrite the file if something was read since the last time. OSError."""
        if not self._noted:
            return
        while self._noted:
            self._recent.append(self._noted.popleft())
        while self._recent and self._recent[0][0] < now - _KEEP_S:
            self._recent.popleft()
        # Newest first: whoever touches them in this order leaves the newest warmest.
        keys = bytes(newest_keys([some for _, some in reversed(self._recent)], fmt.MAX_TOUCHES))
        if self._fd >= 0 and os.fstat(self._fd).st_nlink == 0:
            os.close(self._fd)                  # taken for a leftover and deleted
            self._fd = -1
        if self._fd < 0:
            self._fd, _ = open_file(self._path, os.O_RDWR | os.O_CREAT)
        self._sequence += 1
        write_pages(self._fd, fmt.encode_touches(self._store, self._writer, self._sequence, keys))
        self.counts["touches_written"] += 1

    def names(self, names) -> None:
        """What the directory holds now."""
        found = {name for name in names if fmt.parse_touch_name(name)}
        found.discard(os.path.basename(self._path))
        self._seen = {name: self._seen.get(name, 0) for name in found}

    def skip_old(self) -> None:
        """What lies there when the store is opened was told to others, maybe long ago."""
        for name in self._seen:
            self._seen[name] = self._read(name, 0)[0]

    def merge(self, index, now) -> int:
        """Touch what the others have named since the last time; how many own places that were."""
        touched = 0
        for name, before in list(self._seen.items()):
            sequence, keys = self._read(name, before)
            if sequence != before and keys is not None:
                touched += index.touch(fmt.as_keys(keys), int(now))
                self._seen[name] = sequence
                self.counts["touches_read"] += 1
        self.counts["touched_blocks"] += touched
        return touched

    def _read(self, name, before):
        """(sequence, keys or None): None where nothing is new, or it is being rewritten."""
        try:
            fd, _ = open_file(os.path.join(self._folder, name), os.O_RDONLY)
            try:
                page = bytes(read_pages(fd, fmt.PAGE, 0))
                head = fmt.check_touches(page, self._store, name)
                if head is None or head[0] == before:
                    return before, None
                data = bytes(read_pages(fd, -(-16 * head[1] // fmt.PAGE) * fmt.PAGE, fmt.PAGE)) \
                    if head[1] else b""
            finally:
                os.close(fd)
        except OSError:                         # it is gone, or will be read the next time
            return before, None
        keys = data[:16 * head[1]]
        if len(keys) < 16 * head[1] or fmt.crc32c(keys) != head[2]:
            return before, None
        return head[0], np.frombuffer(keys, np.uint8).reshape(-1, 16)

    def close(self) -> None:
        """Remove the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            try:
                os.unlink(self._path)
            except OSError:
                pass
