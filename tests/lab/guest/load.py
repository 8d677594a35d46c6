"""A process of its own that keeps the cable full of KV. Its input is lines: "go", "stop" (to which
it answers, when the cable is empty, with a line of JSON: bytes and seconds since "go"), and the
end of it.

    load.py read|write PEERS DEPTH NBYTES

On each of PEERS connections DEPTH transfers of NBYTES are outstanding.
"""
import collections
import functools
import json
import select
import sys
import time

import numpy as np

from kvio.layout import READ, WRITE
from kvio.transfer import KV, Nic
from nics import requests


def run(posts) -> int:
    """Until a line comes in. Then what is under way comes to its end. How many transfers."""
    under_way = collections.deque((post(), post) for post in posts)
    print("going", flush=True)
    done = len(posts)
    while not select.select([sys.stdin], [], [], 0)[0]:
        transfer, post = under_way.popleft()
        transfer.wait()
        under_way.append((post(), post))
        done += 1
    for transfer, _ in under_way:
        transfer.wait()
    return done


def main(how, peers, depth, nbytes):
    with Nic.open("verbs:rxe0", name="a") as a, Nic.open("verbs:rxe1", name="b") as b:
        near, far = (nic.register(np.zeros(peers * depth * nbytes, np.uint8)) for nic in (a, b))
        b.listen("load")
        opcode = READ if how == "read" else WRITE
        connected = [a.connect("load", classes=[KV]) for _ in range(peers)]
        posts = [functools.partial(connected[at % peers].post,
                                   requests(opcode, near, far, at * nbytes, at * nbytes, nbytes))
                 for at in range(peers * depth)]
        while sys.stdin.readline() == "go\n":
            started = time.monotonic()
            done = run(posts)
            seconds = time.monotonic() - started
            assert sys.stdin.readline() == "stop\n"
            print(json.dumps({"nbytes": done * nbytes, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
