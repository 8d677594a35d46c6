"""What an administrator asks of a store: what is in it, block by block, and what may go."""
import os
import time

import numpy as np

from kvio.errors import InvalidArgument, StoreError
from kvio.storage import inspect
from kvio.storage.format import BLOCK_DURABLE

__all__ = ["chains", "gc", "info", "list_blocks"]


def info(folder: str, *, watch_s: float = 2.5) -> dict:
    """Layout, geometry, writers with their segments, totals, and what is ignored and why.

    Whether a writer lives is known only by watching its heartbeat: for `watch_s` seconds here
    (less if all are known sooner). A writer that rewrites it once a second is seen in 2.5 s.
    """
    if watch_s < 0:
        raise InvalidArgument(f"watch_s must not be negative, not {watch_s}")
    description = inspect.read_description(folder)
    look, files = inspect.Look(folder), inspect.list_folder(folder)
    ignored, writers = {}, []
    now = time.time()
    for writer, names in files.by_writer().items():
        segments = []
        for name in names:
            view = inspect.view_segment(folder, name, description)
            if view.uuid is None:
                ignored[name] = view.reason
            else:
                segments.append(_segment_info(view, description.geometry, now))
        if segments:
            writers.append({"writer": writer.hex(), "state": None, "segments": segments})
    states = look.states(watch_s)
    for one in writers:
        one["state"] = states.get(bytes.fromhex(one["writer"]), inspect.ALIVE)
    every = [segment for writer in writers for segment in writer["segments"]]
    return {
        "path": folder, "store": description.store.hex(), "layout": description.layout.to_dict(),
        "layout_fingerprint": description.layout.fingerprint.hex(),
        "segment": description.geometry.to_dict(),
        "watched_s": round(look.looked_s, 2), "writers": writers,
        "totals": {"writers": len(writers), "segments": len(every),
                   **{name: sum(segment[name] for segment in every) for name in
                      ("blocks", "durable_blocks", "used_bytes", "disk_bytes", "headers_damaged",
                       "headers_beyond_end")}},
        "ignored": ignored, "drafts": files.drafts, "touches": files.touches,
        "other_files": files.others}


def _segment_info(view, geometry, now):
    return {
        "file": view.name, "number": view.number, "blocks": len(view.blocks),
        "durable_blocks": int(np.count_nonzero(view.blocks["flags"] & BLOCK_DURABLE)),
        "used_bytes": len(view.blocks) * geometry.slot_stride, "disk_bytes": view.allocated,
        "file_bytes": view.nbytes, "age_s": round(now - view.mtime, 1),
        "headers_damaged": len(view.damaged), "headers_beyond_end": len(view.beyond_end),
        "page1": view.page1_problem(geometry.header_pages) or "ok"}


def list_blocks(folder: str):
    """Yields (writer, n, blocks) per usable segment; blocks is an array of BLOCK_IO rows (key,
    parent, tokens, slot, generation, crc, flags). Fails at once where there is no store."""
    description, files = inspect.read_description(folder), inspect.list_folder(folder)
    views = (inspect.view_segment(folder, name, description)
             for names in files.by_writer().values() for name in names)
    return ((view.writer, view.number, view.blocks) for view in views if view.uuid is not None)


def chains(folder: str) -> dict:
    """Sums over the trie of the stored blocks. A tree is what hangs on one first block."""
    keys, parents = [], []
    for _, _, blocks in list_blocks(folder):
        keys.append(np.ascontiguousarray(blocks["key"]))
        parents.append(np.ascontiguousarray(blocks["parent"]))
    if not keys:
        keys, parents = [np.zeros(0, "V16")], [np.zeros(0, "V16")]
    return sum_chains(np.concatenate(keys), np.concatenate(parents))


def sum_chains(keys: np.ndarray, parents: np.ndarray) -> dict:
    """The sums of `chains` for arrays of V16. A block is an orphan where a block between it and
    its root is not stored."""
    copies = len(keys)
    keys, first = np.unique(keys.view("S16"), return_index=True)
    parents = parents[first]
    count = len(keys)
    at_root = inspect.is_root(parents)
    up, depth = np.arange(count), np.zeros(count, np.int64)
    if count:
        found = np.searchsorted(keys, parents.view("S16")).clip(max=count - 1)
        stored = (keys[found] == parents.view("S16")) & ~at_root
        up[stored], depth[stored] = found[stored], 1
    inner = np.zeros(count, bool)
    inner[up[depth > 0]] = True
    for _ in range(count.bit_length() + 1):         # pointer doubling; a ring of parents stays
        depth, up = depth + depth[up], up[up]       # a ring, and has no root
    reached = at_root[up]
    lengths = depth[reached & ~inner] + 1
    trees = np.bincount(up[reached], minlength=count)[at_root] if count else np.zeros(0, int)
    return {
        "blocks": count, "further_copies": copies - count,
        "trees": int(np.count_nonzero(at_root)), "chains": len(lengths),
        "longest_chain": int(lengths.max(initial=0)),
        "mean_chain": round(float(lengths.mean()), 2) if len(lengths) else 0.0,
        "largest_tree": int(trees.max(initial=0)),
        "orphans": int(count - np.count_nonzero(reached))}


# ---- gc ----

def gc(folder: str, *, max_bytes: int | None = None, dead_after_s: float = 30.0,
       dry_run: bool = False) -> dict:
    """Remove what nobody needs: segments of dead writers without a block, stale touch files and
    drafts; and, where the store takes more than `max_bytes` on disk, segments of dead writers,
    oldest use first. Use is known by the file's mtime only, that is when it was last written.

    Dead is who has closed, or whose heartbeat did not change while this watched for
    `dead_after_s` seconds. What a live writer has is never touched, so `reached` may be False.
    """
    if dead_after_s < 0 or (max_bytes is not None and max_bytes < 0):
        raise InvalidArgument("dead_after_s and max_bytes must not be negative")
    description = inspect.read_description(folder)
    look, files = inspect.Look(folder), inspect.list_folder(folder)
    leftovers = files.drafts + files.touches
    before = {name: inspect.stamp(folder, name) for name in leftovers}
    views = [inspect.view_segment(folder, name, description) for name in files.segments]
    states = look.states(dead_after_s)
    if leftovers and look.looked_s < dead_after_s:      # all writers were known sooner
        time.sleep(dead_after_s - look.looked_s)
    total = sum(view.allocated for view in views)
    report = {"path": folder, "before_bytes": total, "max_bytes": max_bytes, "dry_run": dry_run,
              "watched_s": round(look.looked_s, 2), "removed": []}
    alive = {writer for writer, state in states.items() if state == inspect.ALIVE}
    for name in leftovers:
        writer = bytes.fromhex(name[-32:])
        if writer not in alive and before[name] and before[name] == inspect.stamp(folder, name):
            _remove(folder, name, "stale", before[name][0], report)
    usable = [view for view in views if view.uuid and view.writer not in alive
              and view.writer in states]
    for view in sorted(usable, key=lambda view: (len(view.blocks) > 0, view.mtime)):
        empty = not (len(view.blocks) or view.damaged or view.beyond_end)
        if empty or (max_bytes is not None and total > max_bytes):
            why = "no blocks" if empty else f"writer {states[view.writer]}"
            if _remove(folder, view.name, why, view.allocated, report):
                total -= view.allocated
    report["after_bytes"] = total
    report["reached"] = max_bytes is None or total <= max_bytes
    return report


def _remove(folder, name, why, nbytes, report):
    if not report["dry_run"]:
        try:
            os.unlink(os.path.join(folder, name))
        except FileNotFoundError:               # somebody else was faster
            return True
        except OSError as failed:
            raise StoreError(failed.errno, f"cannot remove {os.path.join(folder, name)}") \
                from failed
    report["removed"].append({"file": name, "why": why, "bytes": nbytes})
    return True
