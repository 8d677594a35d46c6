"""Sharing: what other writers have stored, who of them is alive, and what others have read.

A thread looks every `poll_s` (`Watch.look`): it lists the directory, opens segments that are new
and forgets those whose file is gone, and lets C read page 1 and the marked header pages of the
others' (`_ext/ring_watch.c`). Only this store's own segments and its own touch file are ever
written; a segment of a dead writer is deleted by `reclaim` and by nobody else.

Locks: look, reclaim and the tables are under `Watch._lock`; the store's lock and the writer's are
never taken while it is held, so who holds those may call here.
"""
import errno
import os
import threading
import time
import warnings

import numpy as np

from kvio._ext import ring as _ring
from kvio._ext.index import foreign_keys
from kvio.storage import format as fmt
from kvio.storage.scan import open_segment
from kvio.storage.touch import Touches

__all__ = ["Watch"]

_WATCHED = np.dtype([("first", "<u4"), ("count", "<u4"), ("news", "<u4"), ("error", "<i4")])
_SLOW_S = 1.0           # how often dead writers are looked at, and touches exchanged
_RELIST = 3             # looks after a change of the directory that list it again
_MAX_SEGMENTS = 65_536
_FULL = (errno.EMFILE, errno.ENFILE)


class _Writer:
    """Another writer, as its segments show it."""

    def __init__(self, uuid, beat):
        self.uuid, self.beat = uuid, beat       # beat: when its heartbeat was last seen to change
        self.segments = {}                      # n -> (number, file name)
        self.closed = self.dead = False

    @property
    def gone(self):
        """It will not write again, as far as anybody can tell."""
        return self.closed or self.dead


class Watch:
    """The others. Thread-safe. It holds no reference to its store."""

    def __init__(self, folder, description, files, index, writer, rings, scan, *,
                 dead_after_s, poll_s):
        self._folder, self._description, self._files = folder, description, files
        self._index, self._writer, self._rings, self._scan = index, writer, rings, scan
        self._dead_after_s, self._poll_s = dead_after_s, poll_s
        self._lock = threading.RLock()
        self._writers: dict[bytes, _Writer] = {}
        self._foreign = np.zeros(_MAX_SEGMENTS, np.uint8)      # by number
        self._names: dict[str, tuple[_Writer, int]] = {}    # segments that are open
        self._pending: dict[str, tuple[float, float]] = {}  # not usable: when to look, then wait
        self._groups = {}               # "live", "gone" -> (writers, segments, array for C)
        self._listed = set()
        self._mtime, self._relist, self._slow_at = None, 0, 0.0
        self._skipped_s, self._looked = 0.0, time.monotonic()
        self._retired = False           # files wait to be closed
        self._announced: dict[str, str] = {}
        self._thread, self._ended = None, threading.Event()
        self._touches = Touches(folder, description.store, writer.uuid)
        self.gone: tuple[int, ...] = ()     # segments whose writers have closed or died
        self._counts = {"polls": 0, "writers_seen": 0, "writers_died": 0, "writers_returned": 0,
                        "segments_found": 0, "segments_lost": 0, "zombie_segments": 0,
                        "reclaimed_segments": 0, "poll_failures": 0}

    # ---- life ----

    def load(self) -> None:
        """The first look: all segments that are there. OSError if the directory or its files
        cannot be opened for want of descriptors."""
        with self._lock:
            self._list(time.monotonic(), first=True)
            self._poll("live")
            self._note_gone()
            self._touches.skip_old()

    def start(self) -> None:
        """Look every poll_s from now on; never if that is 0."""
        if self._poll_s:
            thread = threading.Thread(target=self._run, name="kvio-watch", daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """No look after this; the touch file is removed."""
        self._ended.set()
        self._files.rouse()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:                        # somebody's refresh() may still be under way
            self._touches.close()

    def _run(self):
        while not self._rest():
            try:
                self.look()
            except Exception as failed:         # the next look may fare better
                self._counts["poll_failures"] += 1
                if not self._ended.is_set():
                    self._announce("look", f"looking for other writers' blocks failed: {failed!r}")

    def _rest(self):
        """Sleep until a look is due; True once there will be none. While nobody else writes here
        and nothing is under way, C sees to it that there is nothing to look for."""
        with self._lock:
            busy = self._group("live")[0] or self._pending or self._relist or self._retired
            mtime, until = self._mtime, self._slow_at
        if busy or mtime is None:
            return self._ended.wait(self._poll_s)
        looks = self._files.doze(os.fsencode(self._folder), mtime, self._poll_s, until)
        with self._lock:
            self._counts["polls"] += max(0, looks - 1)      # the last one is `look` itself
        return self._ended.is_set()

    def _announce(self, what, message):
        """Warn, once until it is another message or `_recovered`."""
        if self._announced.get(what) != message:
            self._announced[what] = message
            try:
                warnings.warn(f"store {self._folder}: {message}", RuntimeWarning, stacklevel=3)
            except Warning:                     # made an error: nobody is there to catch it
                pass

    def _recovered(self, what):
        self._announced.pop(what, None)

    # ---- one look ----

    def look(self) -> int:
        """One look at everything; how many places of blocks appeared or went."""
        self._drop_unlinked()
        with self._lock:
            if self._ended.is_set():
                return 0
            now = time.monotonic()
            before = self._files.watch_stats()["places_changed"]
            # While nobody looks (poll_s is late by far: this process was stopped) nobody's
            # heartbeat is seen either, and no writer may be taken for dead on that account.
            if self._poll_s and now - self._looked > 1 + 10 * self._poll_s:
                self._skipped_s += now - self._looked
            slow = now >= self._slow_at
            self._list(now, force=slow)
            self._poll("live")
            if slow:
                self._slow_at = now + _SLOW_S
                self._poll("gone")
            self._bury(now - self._skipped_s)
            self._note_gone()
            if slow:
                self._exchange_touches(now)
            self._sweep()
            self._counts["polls"] += 1
            self._looked = time.monotonic()
            return self._files.watch_stats()["places_changed"] - before

    def _clock(self):
        return time.monotonic() - self._skipped_s

    def _drop_unlinked(self):
        """Own segments whose file others have deleted: this writer was taken for dead (it was
        stopped for longer than others wait). What it still writes there nobody would find."""
        for number in self._files.unlinked():
            path = self._writer.path(number)
            if path is None or os.path.exists(path):    # closing; or this file system counts oddly
                continue
            self._files.retire(number)
            if not self._writer.lose(number):           # another thread's refresh() was faster
                continue
            self._index.drop_segment(number)
            self._counts["zombie_segments"] += 1
            self._retired = True
            self._announce(f"zombie {number}", f"{os.path.basename(path)} was deleted while this "
                           "store had it open: its blocks are lost and it is not written any more "
                           "(was this process stopped for long, or the directory removed?)")

    # ---- files that come and go ----

    def _list(self, now, *, first=False, force=False):
        """Opens new segments, forgets those that are gone. A change of the directory within one
        tick of its time stamp is found by listing it a few times more."""
        try:
            mtime = os.stat(self._folder).st_mtime_ns
            if mtime != self._mtime:
                self._mtime, self._relist = mtime, _RELIST
            if self._relist or force or first:
                self._relist = max(0, self._relist - 1)
                self._compare(set(os.listdir(self._folder)), now)
            self._recovered("list")
        except (FileNotFoundError, NotADirectoryError):
            if first:
                raise
            self._mtime = None
            self._compare(set(), now)
            self._announce("list", "the directory is gone: nothing can be found or written until "
                           "it is back")
        except OSError as failed:               # what is known stays
            if first:
                raise
            self._mtime = None
            self._announce("list", f"the directory cannot be read ({failed.strerror}): segments "
                           "of other writers that come or go are not noticed")
        for name, (due, _) in list(self._pending.items()):
            if due <= now or first:
                self._try(name, now, first)

    def _compare(self, names, now):
        for name in self._listed - names:
            self._pending.pop(name, None)
            self._scan.ignored.pop(name, None)
            if name in self._names:
                self._counts["segments_lost"] += 1
                self._forget(name)
        for name in names - self._listed:
            parsed = fmt.parse_segment_name(name)
            if parsed is not None and parsed[0] != self._writer.uuid:
                self._pending[name] = (now, 0.0)
        self._listed = names
        self._touches.names(names)

    def _try(self, name, now, first=False):
        """Open a segment; look at it again later if it is not usable (yet): its writer may be in
        the middle of making it, or descriptors short."""
        uuid, number = None, -1
        try:
            fd, direct, uuid = open_segment(self._folder, name, self._description,
                                            self._files.direct_io)
            if fd >= 0:
                number = self._add_file(fd, uuid)
            self._recovered("open")
        except OSError as failed:
            uuid = failed.strerror
            if failed.errno in _FULL:
                if first:
                    raise
                self._announce("open", f"segments of other writers cannot be opened ({uuid}): "
                               "raise the limit of open files (ulimit -n)")
        if number < 0:
            wait = self._pending[name][1]
            self._pending[name] = (now + wait, min(10.0, 2 * wait or 0.03))
            self._scan.ignored[name] = uuid
            return
        del self._pending[name]
        self._scan.ignored.pop(name, None)
        self._scan.direct_io = direct if self._scan.direct_io is None else \
            self._scan.direct_io and direct
        self._add(name, number)

    def _add_file(self, fd, uuid):
        try:
            number = self._files.add_segment(fd, False, uuid)
        except BaseException:
            os.close(fd)
            raise
        self._index.add_segment(number, self._description.geometry.slots, False)
        return number

    def _add(self, name, number):
        uuid, n = fmt.parse_segment_name(name)
        writer = self._writers.get(uuid)
        if writer is None:
            writer = self._writers[uuid] = _Writer(uuid, self._clock())
            self._counts["writers_seen"] += 1
        # Whatever was known of it: a new segment has to be looked at.
        writer.closed, writer.dead = False, False
        writer.segments[n] = (number, name)
        self._names[name] = (writer, n)
        self._foreign[number] = 1
        self._counts["segments_found"] += 1
        self._groups.clear()

    def _forget(self, name):
        """Its blocks leave the index; reads in flight keep the file until they have drained."""
        writer, n = self._names.pop(name)
        number, _ = writer.segments.pop(n)
        if not writer.segments:
            del self._writers[writer.uuid]
        self._files.retire(number)
        self._index.drop_segment(number)
        self._retired = True
        self._groups.clear()

    def _sweep(self):
        if self._retired:
            self._retired = self._files.sweep() > 0
            for ring in list(self._rings):
                ring._ring.wake()               # rings hold registered files too

    # ---- what they have written, and whether they live ----

    def _group(self, which):
        """(writers, their segments, the array for C) of those that are live, or gone but not
        closed; newest segment first."""
        if not self._groups:
            chosen = {"live": [], "gone": []}
            for writer in self._writers.values():
                if not writer.closed:
                    chosen["gone" if writer.dead else "live"].append(writer)
            for key, writers in chosen.items():
                numbers, watched = [], np.zeros(len(writers), _WATCHED)
                for i, writer in enumerate(writers):
                    watched[i]["first"], watched[i]["count"] = len(numbers), len(writer.segments)
                    numbers += [writer.segments[n][0] for n in sorted(writer.segments,
                                                                      reverse=True)]
                self._groups[key] = writers, np.array(numbers, np.uint32), watched
        return self._groups[which]

    def _poll(self, which, only=None):
        writers, segments, watched = self._group(which)
        if only is not None:
            at = writers.index(only)
            writers, watched = [only], watched[at:at + 1].copy()
        if not writers or not self._files.poll(self._index, segments, watched):
            return
        now = self._clock()
        for i in np.flatnonzero(watched["news"]):
            writer, news = writers[i], int(watched["news"][i])
            if news & _ring.NEWS_BEAT:
                writer.beat = now
                if writer.dead:
                    writer.dead = False
                    self._counts["writers_returned"] += 1
                    self._groups.clear()
            if news & _ring.NEWS_CLOSED:
                writer.closed = True
                self._groups.clear()
                self._finals(writer)
            if news & _ring.NEWS_FAILED:
                self._counts["poll_failures"] += 1
                self._mtime = None              # its file may be gone: list again
                self._announce("poll", "segments of another writer cannot be read: "
                               + os.strerror(-int(watched["error"][i])))

    def _finals(self, writer):
        """Nobody writes these segments any more, and the index knows what they hold."""
        for number, _ in writer.segments.values():
            self._files.set_final(number)

    def _bury(self, now):
        """now: when the look began, by `_clock`. We may have been stopped since we polled."""
        for writer in self._group("live")[0]:
            if now - writer.beat > self._dead_after_s and not writer.gone:
                writer.dead = True
                self._counts["writers_died"] += 1
                self._groups.clear()

    def _note_gone(self):
        self.gone = tuple(number for writer in self._writers.values() if writer.gone
                          for number, _ in writer.segments.values())

    def dead_segments(self) -> list[tuple[int, str, int]]:
        """(number, path, bytes on disk) of segments whose writer has closed or is dead."""
        found = []
        with self._lock:
            for writer in self._writers.values():
                for number, name in writer.segments.values() if writer.gone else ():
                    path = os.path.join(self._folder, name)
                    try:
                        file = os.stat(path)
                    except OSError:
                        continue                # the next look finds out
                    found.append((number, path, min(file.st_size, file.st_blocks * 512)
                                  or file.st_size))
        return found

    def reclaim(self, number: int) -> bool:
        """Delete a segment of a writer that has closed or is dead and forget its blocks. False if
        there is no such segment, or its writer turns out to be alive. OSError if the file cannot
        be deleted. Should the writer return all the same, it finds its file without a name."""
        with self._lock:
            for name, (writer, n) in self._names.items():
                if writer.segments[n][0] == number:
                    break
            else:
                return False
            if writer.dead and not writer.closed:
                self._poll("gone", only=writer)
            if not writer.gone:
                return False
            _delete(os.path.join(self._folder, name), cut=writer.closed)
            self._listed.discard(name)
            self._forget(name)
            self._note_gone()
            self._counts["reclaimed_segments"] += 1
            self._sweep()
        return True

    # ---- touches ----

    def note_reads(self, blocks) -> None:
        """Places (rows of BLOCK_IO) that are being read: owners of foreign ones will be told."""
        if self._names:
            self._touches.note(foreign_keys(blocks, self._foreign), time.monotonic())

    def merge_touches(self) -> int:
        """What others have read lately counts as used here; how many own places were touched."""
        with self._lock:
            return self._touches.merge(self._index, time.monotonic()) \
                if self._writer.segments else 0

    def _exchange_touches(self, now):
        try:
            self._touches.publish(now)
            self._recovered("touch")
        except OSError as failed:
            self._announce("touch", "what is read here cannot be told to those who wrote it "
                           f"({failed.strerror}): they may evict it sooner")
        self.merge_touches()

    def stats(self) -> dict:
        """Figures of the others and of looking for them."""
        with self._lock:
            closed = sum(writer.closed for writer in self._writers.values())
            dead = sum(writer.gone for writer in self._writers.values()) - closed
            return {**self._counts, "writers_live": len(self._writers) - closed - dead,
                    "writers_dead": dead, "writers_closed": closed,
                    "foreign_segments": len(self._names),
                    **self._files.watch_stats(), **self._touches.counts}


def _delete(path, cut):
    """Unlink a file. `cut`: give its space back at once though others have it open; what they
    still read there is short, which is a miss. A writer that has not closed may return: what it
    wrote after a cut would make the file long again, with zeros where its blocks were, and who
    does not compare their CRC would take those for the blocks. So then the space comes back when
    everybody has closed the file."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC) if cut else -1
        try:
            os.unlink(path)
            if cut:
                os.ftruncate(fd, 0)
        finally:
            if cut:
                os.close(fd)
    except FileNotFoundError:               # somebody else was faster
        pass
