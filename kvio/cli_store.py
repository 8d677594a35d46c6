"""The command `kvio store`: what the administrator's tools find, in print."""
import argparse
import json
import sys
import time

from kvio.storage import admin
from kvio.storage.format import BLOCK_DURABLE
from kvio.storage.fsck import fsck

MIB = 1 << 20


def add_commands(commands) -> None:
    """`kvio store info|ls|fsck|gc` below `commands`."""
    store = commands.add_parser("store", help="look into a block store, check it, tidy it up")
    verbs = store.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name, run, text):
        command = verbs.add_parser(name, help=text[0].lower() + text[1:].split(".")[0],
                                   description=text)
        command.add_argument("dir", help="the store's directory")
        command.add_argument("--json", action="store_true", help="for programs")
        command.set_defaults(run=run)
        return command

    command = add("info", _info, "Layout, writers and whether they live, segments, totals, and "
                  "what is ignored and why. The store is not opened, no file is written.")
    command.add_argument("--watch", type=_seconds, default=2.5, metavar="SECONDS", help="for how "
                         "long heartbeats are watched to tell who lives (default: 2.5)")
    command = add("ls", _ls, "One line a block: key, parent, tokens, writer, n of its segment, "
                  "slot, generation, durability. In JSON one object a line.")
    command.add_argument("--chains", action="store_true", help="sums over the chains instead")
    command = add("fsck", _fsck, "Read and check every byte. Exits 0 if clean, 1 if something was "
                  "found (repaired or not), 2 if it could not run.")
    command.add_argument("--repair", action="store_true", help="drop what is damaged, but never in "
                         "a segment whose writer lives")
    command.add_argument("--remove-unusable", action="store_true", help="with --repair: remove "
                         "segment files that no reader uses")
    command.add_argument("--quiet", action="store_true", help="no progress on stderr")
    _dead_after(command)
    command = add("gc", _gc, "Remove segments of dead writers, oldest use first, until the store "
                  "is below --max-bytes, and stale leftovers in any case. Oldest use is the "
                  "segment file's mtime: nothing else is known of it. Exits 1 if the store is "
                  "larger still.")
    command.add_argument("--max-bytes", type=_nbytes, metavar="BYTES", help="on disk; K, M, G, T "
                         "are powers of 1024 (default: no limit)")
    command.add_argument("--dry-run", action="store_true", help="say what would go")
    _dead_after(command)


def _dead_after(command):
    command.add_argument("--dead-after", type=_seconds, default=30.0, metavar="SECONDS",
                         help="a writer is dead whose heartbeat does not change for so long, while "
                         "this command watches (default: 30); at once if it has closed")


def _seconds(text):
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 <= seconds < 1e9:
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text!r}")
    return seconds


def _nbytes(text):
    power = "KMGT".find(text[-1:].upper()) + 1 if text else 0
    try:
        nbytes = int(float(text[:-1] if power else text) * 1024**power)
    except (ValueError, OverflowError):
        nbytes = -1
    if nbytes < 0:
        raise argparse.ArgumentTypeError(f"not a number of bytes: {text!r}")
    return nbytes


def _print_json(data):
    json.dump(data, sys.stdout, indent=2)
    print()


def _info(arguments) -> int:
    found = admin.info(arguments.dir, watch_s=arguments.watch)
    if arguments.json:
        _print_json(found)
        return 0
    layout, totals = found["layout"], found["totals"]
    print(f"store {found['store']} at {found['path']}")
    print(f"  layout   {layout['num_layers']} layers, {layout['block_tokens']} tokens a block, "
          f"{layout['bytes_per_token']} bytes per token and layer")
    print("  segment  {slots} slots of {slot_stride} bytes, {segment_nbytes} bytes".format(
        **found["segment"]))
    print(f"  total    {totals['blocks']} blocks ({totals['durable_blocks']} durable) in "
          f"{totals['segments']} segments of {totals['writers']} writers: "
          f"{totals['used_bytes'] / MIB:.1f} MiB used, {totals['disk_bytes'] / MIB:.1f} on disk")
    for writer in found["writers"]:
        print(f"  writer {writer['writer']}: {writer['state']} "
              f"(watched for {found['watched_s']} s)")
        for segment in writer["segments"]:
            damage = "".join(f", {segment[name]} {name.replace('_', ' ')}" for name in
                             ("headers_damaged", "headers_beyond_end") if segment[name])
            if segment["page1"] != "ok":
                damage += f", page 1: {segment['page1']}"
            print(f"    {segment['number']:>5}  {segment['blocks']} blocks, "
                  f"{segment['used_bytes'] / MIB:.1f} MiB used, "
                  f"{segment['disk_bytes'] / MIB:.1f} on disk, written {segment['age_s']} s ago"
                  + damage)
    for name, reason in found["ignored"].items():
        print(f"  ignored  {name}: {reason}")
    for name in found["drafts"] + found["touches"] + found["other_files"]:
        print(f"  beside   {name}")
    return 0


def _ls(arguments) -> int:
    if arguments.chains:
        found = admin.chains(arguments.dir)
        if arguments.json:
            _print_json(found)
        else:
            print("\n".join(f"{name.replace('_', ' '):<16}{value}"
                            for name, value in found.items()))
        return 0
    line = "{} {} {} {} {} {} {} {}\n"
    if arguments.json:
        line = ('{{"key": "{}", "parent": "{}", "tokens": {}, "writer": "{}", "n": {}, "slot": {}, '
                '"generation": {}, "durable": {}}}\n')
    words = ("false", "true") if arguments.json else ("visible", "durable")
    found = admin.list_blocks(arguments.dir)
    if not arguments.json:
        print("# key parent tokens writer n slot generation durability")
    for writer, number, blocks in found:
        name = writer.hex()
        columns = (blocks[field].tolist() for field in
                   ("key", "parent", "tokens", "slot", "generation", "flags"))
        sys.stdout.writelines(
            line.format(key.hex(), parent.hex(), tokens, name, number, slot, generation,
                        words[flags & BLOCK_DURABLE != 0])
            for key, parent, tokens, slot, generation, flags in zip(*columns))
    return 0


def _progress():
    """Prints at most once a second."""
    said = time.monotonic()

    def progress(done, total):
        nonlocal said
        if time.monotonic() - said >= 1:
            said = time.monotonic()
            print(f"{done / MIB:.0f} of {total / MIB:.0f} MiB checked", file=sys.stderr)
    return progress


def _fsck(arguments) -> int:
    report = fsck(arguments.dir, repair=arguments.repair, dead_after_s=arguments.dead_after,
                  remove_unusable=arguments.remove_unusable,
                  progress=None if arguments.quiet else _progress())
    if arguments.json:
        _print_json(report.to_dict())
        return 0 if report.clean else 1
    for finding in report.findings:
        where = finding.file + ("" if finding.slot is None else f" slot {finding.slot}")
        done = f" -> {finding.repair}" if finding.repair else ""
        print(f"{finding.kind}: {where}: {finding.detail}{done}")
    print(f"{report.blocks} blocks in {report.segments} segments, "
          f"{report.payload_bytes / MIB:.1f} MiB of payload; {report.orphans} orphans, "
          f"{report.further_copies} further copies, {len(report.other_files)} files that are not "
          f"the store's; {len(report.findings) or 'nothing'} wrong")
    return 0 if report.clean else 1


def _gc(arguments) -> int:
    report = admin.gc(arguments.dir, max_bytes=arguments.max_bytes,
                      dead_after_s=arguments.dead_after, dry_run=arguments.dry_run)
    if arguments.json:
        _print_json(report)
        return 0 if report["reached"] else 1
    for one in report["removed"]:
        print(f"{'would remove' if report['dry_run'] else 'removed'} {one['file']} "
              f"({one['why']}, {one['bytes'] / MIB:.1f} MiB)")
    print(f"{report['before_bytes'] / MIB:.1f} MiB on disk before, "
          f"{report['after_bytes'] / MIB:.1f} after"
          + ("" if report["reached"] else ": what is left belongs to writers that live"))
    return 0 if report["reached"] else 1
