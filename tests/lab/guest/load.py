"""A process of its own that keeps the cable full of KV. Its input is lines: "go", "stop" (to which
it answers with a line of JSON: bytes and seconds in between), and the end of it.

    load.py read|write DEPTH NBYTES     DEPTH transfers of NBYTES outstanding
"""
import collections
import json
import select
import sys
import time

import numpy as np

from kvio.layout import READ, WRITE
from kvio.transfer import KV, Nic
from nics import requests


def run(peer, wrs) -> dict:
    """Until a line comes in."""
    under_way = collections.deque(peer.post(one) for one in wrs)
    print("going", flush=True)
    started, done = time.monotonic(), 0
    while not select.select([sys.stdin], [], [], 0)[0]:
        under_way.popleft().wait()
        under_way.append(peer.post(wrs[done % len(wrs)]))
        done += 1
    seconds = time.monotonic() - started
    for transfer in under_way:
        transfer.wait()
    return {"nbytes": done * int(wrs[0]["length"][0]), "seconds": seconds}


def main(how, depth, nbytes):
    with Nic.open("verbs:rxe0", name="a") as a, Nic.open("verbs:rxe1", name="b") as b:
        near, far = (nic.register(np.zeros(depth * nbytes, np.uint8)) for nic in (a, b))
        b.listen("load")
        peer = a.connect("load", classes=[KV])
        opcode = READ if how == "read" else WRITE
        wrs = [requests(opcode, near, far, at, at, nbytes)
               for at in range(0, depth * nbytes, nbytes)]
        while sys.stdin.readline() == "go\n":
            found = run(peer, wrs)
            assert sys.stdin.readline() == "stop\n"
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
