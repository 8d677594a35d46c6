"""The transfer engine: registered memory to registered memory, one doorbell for a whole batch.

    nic = Nic.open("soft")
    region = nic.register(pool)
    listener = nic.listen("de0")                        # on the other side
    peer = nic.connect("de0", classes=[COLLECTIVE, KV])
    peer.read(descriptors.layer(l), traffic_class=KV).wait()

A queue pair belongs to one traffic class, so a peer has one per class. Descriptors are numpy
arrays of `WR_DTYPE`; posting copies them. `wait`, `await`, `poll` and `done` of any transfer
drive its NIC, or the whole soft fabric: only one with peers in other processes has a thread.
"""
from kvio.transfer.arbitration import Arbitration
from kvio.transfer.classes import COLLECTIVE, KV, TrafficClass
from kvio.transfer.fabric import Fabric
from kvio.transfer.nic import Access, Nic, Region
from kvio.transfer.peer import Listener, Peer

__all__ = ["Access", "Arbitration", "COLLECTIVE", "Fabric", "KV", "Listener", "Nic", "Peer",
           "Region", "TrafficClass"]
