"""A process of its own that keeps the cable full of KV until its standard input ends; then it
prints a line of JSON: bytes and seconds.

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


def main(how, depth, nbytes):
    with Nic.open("verbs:rxe0", name="a") as a, Nic.open("verbs:rxe1", name="b") as b:
        near, far = (nic.register(np.zeros(depth * nbytes, np.uint8)) for nic in (a, b))
        b.listen("load")
        peer = a.connect("load", classes=[KV])
        opcode = READ if how == "read" else WRITE
        wrs = [requests(opcode, near, far, at, at, nbytes)
               for at in range(0, depth * nbytes, nbytes)]
        under_way = collections.deque(peer.post(one) for one in wrs)
        print("started", flush=True)
        started, done = time.monotonic(), 0
        while not select.select([sys.stdin], [], [], 0)[0]:
            under_way.popleft().wait()
            under_way.append(peer.post(wrs[done % depth]))
            done += 1
        print(json.dumps({"nbytes": done * nbytes, "seconds": time.monotonic() - started}),
              flush=True)
        for transfer in under_way:
            transfer.wait()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
