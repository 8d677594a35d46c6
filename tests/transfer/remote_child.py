"""The other process of test_remote.py: a NIC that listens, and does what standard input says.

    python remote_child.py DEVICE ADDRESS           prints the address it listens at
"""
import sys

from kvio.transfer import Nic
from nics import pattern


def main(device, address):
    nic = Nic.open(device, name="child")
    listener = nic.listen(address)
    peers, regions = [], [nic.register(pattern(4096, 7))]
    print(listener.address, flush=True)
    for line in sys.stdin:
        match line.split():
            case ["accept"]:
                while (peer := listener.accept()) is not None:
                    peers.append(peer)
                print(len(peers), flush=True)
            case ["peers"]:
                print(len(nic._peers), flush=True)
            case ["known"]:
                print(*sorted(peers[-1].far.owners), flush=True)
            case ["memory"]:
                print(regions[0].key, regions[0].addr, flush=True)
            case ["register"]:
                regions.append(nic.register(pattern(4096, 8)))
                print(regions[-1].key, flush=True)
            case ["deregister"]:
                nic.deregister(regions.pop())
                print("done", flush=True)
            case ["fail", name]:
                peers[-1]._qps[name].fail()
                print("done", flush=True)
            case ["state"]:
                print(*[each["state"] for each in peers[-1].query().values()], flush=True)
            case ["exit"]:
                return                          # the connections are still open
            case ["close"]:
                nic.close(cancel=True)
                print("done", flush=True)


main(*sys.argv[1:])
