"""A store as it lies on disk, read without opening it: what the administrator's tools look at."""
import errno
import mmap
import os
import re
import time
from dataclasses import dataclass, field

import numpy as np

from kvio._ext import ring as _ring
from kvio.errors import StoreError
from kvio.storage import format as fmt
from kvio.storage.format import BLOCK_IO, HEADER_NBYTES, PAGE, Description
from kvio.storage.scan import open_file

__all__ = ["ALIVE", "CLOSED", "DEAD", "Folder", "Look", "SegmentView", "is_root", "list_folder",
           "read_at", "read_description", "stamp", "view_segment"]

ALIVE, CLOSED, DEAD = "alive", "closed", "silent"
_DRAFT = re.compile(r"kvio\.json\.[0-9a-f]{32}\Z")
_LOOK_EVERY_S = 0.25


def read_description(folder: str) -> Description:
    """kvio.json; StoreError where there is none, FormatError where it is damaged."""
    found = fmt.read_description(folder)
    if found is None:
        raise StoreError(errno.ENOENT, f"there is no store at {folder} (no {fmt.JSON_NAME})")
    return found


def is_root(parents: np.ndarray) -> np.ndarray:
    """Per parent (V16): is it the root of a chain, not the key of a block?"""
    words = np.ascontiguousarray(parents).view(np.uint8).reshape(-1, 16)
    return (words[:, :4] == np.frombuffer(b"root", np.uint8)).all(axis=1) | ~words.any(axis=1)


# ---- files ----

@dataclass
class Folder:
    """The names in a store's directory, by what they are. Names only: nothing was opened."""

    segments: list[str] = field(default_factory=list)
    drafts: list[str] = field(default_factory=list)         # of kvio.json
    touches: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)         # not the store's

    def by_writer(self) -> dict[bytes, list[str]]:
        """Segments of each writer, in the order of their numbers."""
        writers: dict[bytes, list[str]] = {}
        for name in sorted(self.segments, key=lambda name: fmt.parse_segment_name(name)[1]):
            writers.setdefault(fmt.parse_segment_name(name)[0], []).append(name)
        return writers


def list_folder(folder: str) -> Folder:
    """What lies in the directory; StoreError if it cannot be listed."""
    found = Folder()
    try:
        names = sorted(os.listdir(folder))
    except OSError as failed:
        raise StoreError(failed.errno, f"cannot list {folder}") from failed
    for name in names:
        if fmt.parse_segment_name(name):
            found.segments.append(name)
        elif _DRAFT.match(name):
            found.drafts.append(name)
        elif fmt.parse_touch_name(name):
            found.touches.append(name)
        elif name != fmt.JSON_NAME:
            found.others.append(name)
    return found


def stamp(folder: str, name: str):
    """What changes when a file is written or replaced; None if there is none."""
    try:
        about = os.stat(os.path.join(folder, name), follow_symlinks=False)
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns, about.st_ino


def read_at(fd: int, nbytes: int, offset: int, memory: mmap.mmap | None = None) -> memoryview:
    """Up to nbytes in page-aligned memory (`memory` is used again); short at the file's end."""
    view, done = memoryview(memory or mmap.mmap(-1, max(PAGE, nbytes)))[:nbytes], 0
    while done < nbytes:
        got = os.preadv(fd, [view[done:]], offset + done)
        done += got
        if got == 0 or done % PAGE:         # the end, or so near that O_DIRECT cannot go on
            break
    return view[:done]


@dataclass
class SegmentView:
    """One segment file: usable (`uuid` is set), or why not (`reason`)."""

    name: str
    writer: bytes
    number: int
    uuid: bytes | None = None
    reason: str = ""
    nbytes: int = 0                 # length of the file
    allocated: int = 0              # what it takes on disk
    mtime: float = 0.0
    page1: bytes = b""
    headers: np.ndarray = field(default_factory=lambda: np.zeros((0, HEADER_NBYTES), np.uint8))
    blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, BLOCK_IO))
    damaged: dict[int, str] = field(default_factory=dict)       # slot: what is wrong
    beyond_end: list[int] = field(default_factory=list)         # valid headers, no payload

    def page1_problem(self, header_pages: int) -> str:
        """What is wrong with page 1, or an empty string."""
        if len(self.page1) < PAGE:
            return "the file ends before it does"
        if not fmt.is_sealed(self.page1):
            return "fails its CRC"
        page = np.frombuffer(self.page1, fmt.PAGE1)[0]
        if (page["magic"], page["version"], page["header_pages"]) != (
                b"KVIOPG1", fmt.VERSION, header_pages) or page["epoch"] == 0:
            return "its figures are not those of this segment"
        return "" if bytes(page["segment"]) == self.uuid else "belongs to another segment"


def view_segment(folder: str, name: str, description: Description) -> SegmentView:
    """Read page 0, page 1 and all headers of a segment file. Raises nothing about the file."""
    view = SegmentView(name, *fmt.parse_segment_name(name))
    fd = -1
    try:
        fd = open_file(os.path.join(folder, name), os.O_RDONLY)[0]
        about = os.fstat(fd)
        view.nbytes, view.allocated, view.mtime = (about.st_size, about.st_blocks * 512,
                                                   about.st_mtime)
        checked = fmt.check_page0(bytes(read_at(fd, PAGE, 0)), description, name)
        view.page1 = bytes(read_at(fd, PAGE, PAGE))
        if isinstance(checked, bytes):
            view.uuid = checked
            _view_headers(fd, view, description.geometry)
        else:
            view.reason = checked
    except OSError as failed:
        view.uuid, view.reason = None, failed.strerror or str(failed)
    finally:
        if fd >= 0:
            os.close(fd)
    return view


def _view_headers(fd, view, geometry):
    out = np.zeros(geometry.slots, BLOCK_IO)
    for _ in range(2):              # a damaged header may be a page that is being written
        data = read_at(fd, geometry.header_pages * PAGE, fmt.FIRST_HEADER_PAGE * PAGE)
        headers = np.zeros(geometry.slots * HEADER_NBYTES, np.uint8)
        nbytes = min(len(data), len(headers))
        headers[:nbytes] = data[:nbytes]
        found, damaged = _ring.scan_headers(headers, view.uuid, geometry.block_nbytes, out)
        if not damaged:
            break
    view.headers = headers.reshape(-1, HEADER_NBYTES)
    blocks = out[:found]
    if damaged:
        valid = np.zeros(geometry.slots, bool)
        valid[blocks["slot"]] = True
        view.damaged = {
            int(slot): _header_problem(view.headers[slot].tobytes(), view.uuid, int(slot))
            for slot in np.flatnonzero(view.headers.any(axis=1) & ~valid)}
    view.nbytes = os.fstat(fd).st_size
    ends = geometry.payload_offset + (blocks["slot"].astype(np.int64) + 1) * geometry.slot_stride
    view.beyond_end = blocks["slot"][ends > view.nbytes].tolist()
    view.blocks = blocks[ends <= view.nbytes]


def _header_problem(data, segment, slot):
    header = np.frombuffer(data, fmt.HEADER)[0]
    if header["magic"] != b"KVBH":
        return "not a header"
    if not fmt.is_sealed(data):
        return "fails its CRC"
    if header["version"] != fmt.VERSION:
        return f"has version {header['version']}"
    if bytes(header["segment"]) != segment:
        return "belongs to another segment"
    if header["slot"] != slot:
        return f"belongs in slot {header['slot']}"
    return "has generation 0" if header["generation"] == 0 else "has another payload length"


# ---- who lives ----

class Look:
    """A look at who still writes: a writer is known to live only by its heartbeat changing while
    somebody watches, by this process's own clock. The look begins when it is made."""

    def __init__(self, folder: str):
        self._folder, self._began = folder, time.monotonic()
        self._first = self._snapshot()

    def _snapshot(self):
        """{writer: {segment: (length, page 1)}}."""
        return {writer: {name: self._page1(name) for name in names}
                for writer, names in list_folder(self._folder).by_writer().items()}

    def _page1(self, name):
        try:
            fd = open_file(os.path.join(self._folder, name), os.O_RDONLY)[0]
        except OSError as failed:
            return failed.errno, b""
        try:
            return os.fstat(fd).st_size, bytes(read_at(fd, PAGE, PAGE))
        except OSError as failed:
            return failed.errno, b""
        finally:
            os.close(fd)

    def states(self, for_s: float, writers=None) -> dict[bytes, str]:
        """Per writer ALIVE, CLOSED (it said so), or DEAD: silent since the look began, which is
        `for_s` ago when this returns. Sooner if all `writers` (default: all) are known by then."""
        end = self._began + for_s
        while True:
            now = self._snapshot()
            found = {writer: _state(names, now.get(writer)) for writer, names
                     in self._first.items()}
            found.update((writer, ALIVE) for writer in now if writer not in self._first)
            left = end - time.monotonic()
            if left <= 0 or DEAD not in {state for writer, state in found.items()
                                         if writers is None or writer in writers}:
                return found
            time.sleep(min(left, _LOOK_EVERY_S))

    @property
    def looked_s(self) -> float:
        """Seconds since the look began."""
        return time.monotonic() - self._began


def _state(before, now):
    if now is None:                                     # all its files are gone
        return CLOSED
    if any(before.get(name) != page for name, page in now.items()):
        return ALIVE
    page = list(now.values())[-1][1]                    # of the newest segment
    closed = len(page) == PAGE and fmt.is_sealed(page) and \
        np.frombuffer(page, fmt.PAGE1)[0]["heartbeat"] == fmt.HEARTBEAT_CLOSED
    return CLOSED if closed else DEAD
