"""Checks a store to the last byte; on demand drops what is damaged.

What is damaged is a miss anyway, so a repair loses nothing: it zeroes headers and rewrites page 1,
only in segments that nobody writes any more.
"""
import errno
import mmap
import os
import time
from dataclasses import asdict, dataclass, field

import numpy as np

from kvio._ext.block import crc32c
from kvio.errors import InvalidArgument
from kvio.storage import format as fmt
from kvio.storage import inspect
from kvio.storage.admin import sum_chains
from kvio.storage.format import HEADER_NBYTES, HEADERS_PER_PAGE, PAGE
from kvio.storage.scan import open_file

__all__ = ["Finding", "Report", "fsck"]

CHUNK_BYTES = 8 << 20


@dataclass
class Finding:
    """One thing that is wrong. kind: "header", "payload", "beyond end", "generation", "page 1",
    "unusable", "unreadable" or "leftover"."""

    kind: str
    file: str
    detail: str
    slot: int | None = None
    key: str | None = None
    repair: str = ""            # what was done about it, or why nothing was


@dataclass
class Report:
    """What `fsck` found. `clean` if nothing is wrong; orphans, further copies of a key and files
    that are not the store's are no fault."""

    path: str
    segments: int = 0
    blocks: int = 0
    payload_bytes: int = 0
    findings: list[Finding] = field(default_factory=list)
    orphans: int = 0
    further_copies: int = 0
    other_files: list[str] = field(default_factory=list)
    watched_s: float | None = None      # None: nobody had to be watched

    @property
    def clean(self) -> bool:
        """Nothing is wrong."""
        return not self.findings

    def to_dict(self) -> dict:
        """Plain data."""
        return {**asdict(self), "clean": self.clean}


def fsck(folder: str, *, repair: bool = False, remove_unusable: bool = False,
         dead_after_s: float = 30.0, progress=None) -> Report:
    """Check the store in `folder`: every page 0, page 1, header and payload.

    repair: zero damaged headers and rewrite damaged pages 1 in segments whose writer has closed,
        or whose heartbeat did not change while this watched for `dead_after_s` seconds (a live
        writer's file is never written). Stale drafts of kvio.json go.
    remove_unusable: with `repair`, unlink segment files that no reader uses, too.
    progress: called with (bytes of payload checked, bytes in all).

    StoreError or FormatError where it could not run: no directory, kvio.json damaged.
    """
    if dead_after_s < 0:
        raise InvalidArgument(f"dead_after_s must not be negative, not {dead_after_s}")
    description = inspect.read_description(folder)
    look, files = inspect.Look(folder), inspect.list_folder(folder)
    drafts = {name: inspect.stamp(folder, name) for name in files.drafts}
    views = [inspect.view_segment(folder, name, description) for name in files.segments]
    report = Report(folder, other_files=files.others)
    usable = [view for view in views if view.uuid is not None]
    report.segments, report.blocks = len(usable), sum(len(view.blocks) for view in usable)
    stride = description.geometry.slot_stride
    done, total = 0, stride * report.blocks
    drops = {}                              # segment: its findings
    for view in views:
        found = _check_segment(folder, view, description, progress, done, total)
        done += stride * len(view.blocks)
        report.findings += found
        drops[view.name] = found
    report.payload_bytes = description.geometry.block_nbytes * report.blocks
    _sum_chains(report, usable)
    report.findings += [Finding("leftover", name, "a draft of kvio.json") for name in drafts]
    if repair and report.findings:
        _repair(report, look, dead_after_s, views, drops, drafts, description, remove_unusable)
    return report


def _sum_chains(report, usable):
    if usable:
        sums = sum_chains(*(np.concatenate([np.ascontiguousarray(view.blocks[name])
                                            for view in usable]) for name in ("key", "parent")))
        report.orphans, report.further_copies = sums["orphans"], sums["further_copies"]


# ---- checking ----

def _check_segment(folder, view, description, progress, done, total):
    geometry, name = description.geometry, view.name
    if view.uuid is None:
        gone = not os.path.lexists(os.path.join(folder, name))      # reclaimed meanwhile
        return [] if gone else [Finding("unusable", name, view.reason)]
    found = [Finding("header", name, why, slot) for slot, why in view.damaged.items()]
    found += [Finding("beyond end", name, "the file ends before its payload does", slot)
              for slot in view.beyond_end]
    problem = view.page1_problem(geometry.header_pages)
    try:
        fd = open_file(os.path.join(folder, name), os.O_RDONLY)[0]
    except FileNotFoundError:
        return []
    except OSError as failed:
        return [Finding("unreadable", name, failed.strerror)]
    try:
        if problem:                                 # it may have been in the middle of a rewrite
            view.page1 = bytes(inspect.read_at(fd, PAGE, PAGE))
            problem = view.page1_problem(geometry.header_pages)
        if problem:
            found.append(Finding("page 1", name, problem))
        found += _check_payloads(fd, view, geometry, lambda more:
                                 progress and progress(done + more, total))
    finally:
        os.close(fd)
    bad = {finding.slot for finding in found}
    left = view.blocks[~np.isin(view.blocks["slot"], [slot for slot in bad if slot is not None])]
    _, first, count = np.unique(left["generation"], return_index=True, return_counts=True)
    kept = set(first.tolist())
    if (count > 1).any():
        found += [Finding("generation", name, f"generation {block['generation']} stands in an "
                          "earlier slot, too", int(block["slot"]), bytes(block["key"]).hex())
                  for i, block in enumerate(left) if i not in kept]
    return found


def _check_payloads(fd, view, geometry, progress):
    """Findings for the payloads of a segment, read in slot order in large pieces."""
    stride, per_chunk = geometry.slot_stride, max(1, CHUNK_BYTES // geometry.slot_stride)
    memory, found, at = mmap.mmap(-1, per_chunk * stride), [], 0
    blocks = view.blocks                            # in slot order, as the headers are
    slots = blocks["slot"].tolist()
    while at < len(slots):
        end = at + 1
        while end < len(slots) and end - at < per_chunk and slots[end] == slots[end - 1] + 1:
            end += 1
        try:
            data = inspect.read_at(fd, (end - at) * stride, geometry.payload_offset
                                   + slots[at] * stride, memory)
        except OSError:
            data = memory[:0]                       # each block by itself
        for i in range(at, end):
            payload = data[(i - at) * stride:(i - at) * stride + geometry.block_nbytes]
            if len(payload) < geometry.block_nbytes or crc32c(payload) != blocks["crc"][i]:
                why = _suspect(fd, view, blocks[i], geometry)
                if why:
                    found.append(Finding(why[0], view.name, why[1], slots[i],
                                         bytes(blocks["key"][i]).hex()))
        at = end
        progress(at * stride)
    return found


def _suspect(fd, view, block, geometry):
    """(kind, what is wrong) with a block whose payload did not fit, or None: its slot may have
    been given to another block meanwhile."""
    slot = int(block["slot"])
    try:
        if _header_bytes(fd, slot) != view.headers[slot].tobytes():
            return None
        data = inspect.read_at(fd, geometry.slot_stride, geometry.payload_offset
                               + slot * geometry.slot_stride)[:geometry.block_nbytes]
        if len(data) < geometry.block_nbytes:
            why = "payload", "the file was cut short"
        elif crc32c(data) == block["crc"]:
            return None
        else:
            why = "payload", "fails its CRC"
        return None if _header_bytes(fd, slot) != view.headers[slot].tobytes() else why
    except OSError as failed:
        return "unreadable", failed.strerror


def _header_bytes(fd, slot):
    page = inspect.read_at(fd, PAGE, (fmt.FIRST_HEADER_PAGE + slot // HEADERS_PER_PAGE) * PAGE)
    at = slot % HEADERS_PER_PAGE * HEADER_NBYTES
    return bytes(page[at:at + HEADER_NBYTES]).ljust(HEADER_NBYTES, b"\0")


# ---- repairing ----

def _repair(report, look, dead_after_s, views, drops, drafts, description, remove_unusable):
    wanted = {view.writer for view in views if drops[view.name]}
    states = look.states(dead_after_s, wanted)
    if drafts and look.looked_s < dead_after_s:
        time.sleep(dead_after_s - look.looked_s)
    report.watched_s = round(look.looked_s, 2)
    for view in views:
        found = drops[view.name]
        if not found:
            continue
        state = states.get(view.writer, inspect.ALIVE)
        if state == inspect.ALIVE:
            done = "refused: its writer is alive"
        else:
            try:
                done = _repair_segment(report, view, found, description, remove_unusable,
                                       state == inspect.CLOSED)
            except OSError as failed:
                done = f"failed: {failed.strerror}"
        for finding in found:
            finding.repair = finding.repair or done
    for finding in report.findings:
        if finding.kind == "leftover":
            finding.repair = _remove_draft(report.path, finding.file, drafts[finding.file])


def _repair_segment(report, view, found, description, remove_unusable, closed):
    path = os.path.join(report.path, view.name)
    if view.uuid is None:
        if not remove_unusable:
            return "left: readers ignore it; --remove-unusable removes it"
        if not report.segments:
            return "left: no segment fits kvio.json, so it may be kvio.json that is damaged"
        os.unlink(path)
        return "removed"
    for finding in found:
        if finding.kind == "unreadable":
            finding.repair = "left: the device may yet give it back"
    slots = sorted(finding.slot for finding in found
                   if finding.slot is not None and not finding.repair)
    fd = open_file(path, os.O_RDWR)[0]
    try:
        kept = set(_zero_headers(fd, view, slots))
        if any(finding.kind == "page 1" for finding in found):
            _write_page1(fd, view, description.geometry, closed)
        os.fsync(fd)
    finally:
        os.close(fd)
    for finding in found:
        if finding.slot in kept:
            finding.repair = "left: the header has changed meanwhile"
        elif finding.kind == "page 1":
            finding.repair = "rewritten, marked as closed" if closed else "rewritten"
    return "dropped: header zeroed"


def _zero_headers(fd, view, slots):
    """Zero these headers, one page after the other; yields those that are not as they were."""
    memory = mmap.mmap(-1, PAGE)
    for page in sorted({slot // HEADERS_PER_PAGE for slot in slots}):
        where = (fmt.FIRST_HEADER_PAGE + page) * PAGE
        nbytes = len(inspect.read_at(fd, PAGE, where, memory))
        memory[nbytes:] = bytes(PAGE - nbytes)
        for slot in (slot for slot in slots if slot // HEADERS_PER_PAGE == page):
            at = slot % HEADERS_PER_PAGE * HEADER_NBYTES
            if memory[at:at + HEADER_NBYTES] == view.headers[slot].tobytes():
                memory[at:at + HEADER_NBYTES] = bytes(HEADER_NBYTES)
            else:
                yield slot
        _write(fd, memory, where)


def _write_page1(fd, view, geometry, closed):
    """A whole page 1. The mark of a closed writer only where it has said so elsewhere: a silent
    one may be stopped and go on, and readers check nothing in segments that are closed."""
    memory = mmap.mmap(-1, PAGE)
    beat = fmt.HEARTBEAT_CLOSED if closed else int.from_bytes(os.urandom(7), "little")
    memory[:] = fmt.encode_page1(view.uuid, geometry.header_pages, beat)
    _write(fd, memory, PAGE)


def _write(fd, memory, where):
    if os.pwrite(fd, memory, where) != PAGE:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _remove_draft(folder, name, before):
    try:
        if before is None or inspect.stamp(folder, name) != before:
            return "left: it changed while it was watched"
        os.unlink(os.path.join(folder, name))
    except OSError as failed:
        return f"failed: {failed.strerror}"
    return "removed"
