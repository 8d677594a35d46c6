"""Runs in the guest of soak_power: checks the store on the disk, then writes until the power goes.

On the host, `power_guest.py FOLDER` rehearses all of that and prints the files it took, so that
the guest gets exactly those.
"""
import errno
import fcntl
import json
import os
import random
import struct
import subprocess
import sys
import termios
import traceback
import tty

from blocks import chain, open_store, readable
from kvio._ext import ring as _ring
from kvio.storage import admin
from kvio.storage.format import BLOCK_DURABLE
from kvio.storage.fsck import fsck
from soak_kill import writer

STORE_BYTES = 2 << 20           # checking it takes an emulated processor seconds
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207


def check(path, order, say):
    """Every durable block is there and right; whatever else is there is right, too."""
    required, known = order["required"], order["known"]
    if not os.path.exists(os.path.join(path, "kvio.json")):
        assert not required, "kvio.json is gone, and durable blocks with it"
        return
    options = {"durability": "durable", "verify": "never"} if order["trusting"] else {}
    with open_store(path, order["backend"], **options) as store:
        for number, count in required.items():
            keys = chain(count, int(number))
            assert store.match(keys) == count, f"{number}: {store.match(keys)} of {count} there"
            assert readable(store, keys).all(), f"{number} cannot be read"
        found = {bytes(key) for _, blocks in _segments(path) for key in blocks["key"]}
        for number, count in known.items():
            keys = chain(count, int(number))
            if found.isdisjoint(key["key"].tobytes() for key in keys):
                say("absent", number)                       # and so it will stay
            elif number not in required:
                readable(store, keys)                       # right, or not there
        assert store.stats()["headers_damaged"] == 0, "a header was torn"
    durable = {(segment, int(block["slot"])) for segment, blocks in _segments(path)
               for block in blocks if block["flags"] & BLOCK_DURABLE}
    report = fsck(path, repair=True, remove_unusable=True, dead_after_s=0)
    odd = [finding for finding in report.findings if (finding.file, finding.slot) in durable
           or finding.kind in ("header", "generation", "unreadable")]
    assert not odd, odd
    say("checked", report.blocks, len(durable), len(report.findings))


def _segments(path):
    from kvio.storage.format import segment_name
    return [(segment_name(writer, number), blocks)
            for writer, number, blocks in admin.list_blocks(path)]


def tidy(path, order, say):
    """Keep the store small. Of what was durable, what is left is asked for in later rounds, too."""
    limits = {"max_bytes": STORE_BYTES, "dead_after_s": 0}
    going = {one["file"] for one in admin.gc(path, dry_run=True, **limits)["removed"]
             if one["why"].startswith("writer")}
    if going:
        say("gone")
        left = {bytes(key) for name, blocks in _segments(path) if name not in going
                for key in blocks["key"]}
        for number, count in order["required"].items():
            if left.issuperset(key["key"].tobytes() for key in chain(count, int(number))):
                say("stored", number, count)
        admin.gc(path, **limits)


def one_round(path, order, say):
    check(path, order, say)
    if os.path.exists(os.path.join(path, "kvio.json")):
        tidy(path, order, say)
    say("writing")
    writer(path, order["plan"], say)


def mix_in(entropy):
    """A guest that was restored from a snapshot must not draw the same uuids again."""
    with open("/dev/urandom", "wb") as device:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", 8 * len(entropy), len(entropy))
                    + entropy)
        fcntl.ioctl(device, RNDRESEEDCRNG)


def main():
    line = os.open("/dev/ttyS1", os.O_RDWR | os.O_NOCTTY)
    tty.setraw(line)

    def say(*words):
        os.write(line, (" ".join(map(str, words)) + "\n").encode())
        termios.tcdrain(line)           # what we have said has been heard, whatever comes next
    say("ready", _ring.probe("uring"))
    with open(line, "rb", buffering=0, closefd=False) as lines:
        order = json.loads(lines.readline())
    try:
        mix_in(bytes.fromhex(order["entropy"]))
        done = subprocess.run(["/bin/busybox", "mount", "-t", "ext4", "/dev/vda", "/data"],
                              capture_output=True, text=True)
        assert done.returncode == 0, f"mount: {done.stderr}"
        say("mounted")
        one_round("/data/store", order, say)
        say("ended")
    except OSError as failed:           # the disk is gone: the cut is under way
        say("error" if failed.errno == errno.EIO else "failed", repr(failed))
    except BaseException:
        say("failed", repr(traceback.format_exc()))


def rehearse(folder):
    """The files that a round takes, as JSON."""
    plan = {"seed": 1, "die_at_call": False, "leave_after_s": 0.5, "sync": True,
            "durability": "durable"}
    order = {"required": {}, "known": {}, "trusting": True, "backend": "threads", "plan": plan}
    for number, plan["backend"] in enumerate(("threads", "uring")):
        plan["short_writes"] = number == 0
        heard = []
        one_round(os.path.join(folder, "store"), order, lambda *words: heard.append(words))
        order["known"].update((words[1], words[2]) for words in heard if words[0] == "begin")
    random.getrandbits(8), traceback.format_exc()
    files = set()
    for module in list(sys.modules.values()):
        files |= {getattr(module, "__file__", None), getattr(module, "__cached__", None)}
    with open("/proc/self/maps") as maps:
        files |= {line.split(maxsplit=5)[5].strip() for line in maps
                  if len(line.split(maxsplit=5)) == 6}
    json.dump(sorted(path for path in files if path and os.path.isfile(path)), sys.stdout)


if __name__ == "__main__":
    rehearse(sys.argv[1]) if len(sys.argv) > 1 else main()
