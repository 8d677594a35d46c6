"""The cable of the lab: its packets, its rate, its faults."""
import collections
import contextlib
import os
import socket
import struct
import subprocess

SCRIPT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "wire.sh")
ROCE_V2 = 4791                          # UDP port
ETH_P_ALL, SO_RCVBUFFORCE, SOL_PACKET, PACKET_STATISTICS = 3, 33, 263, 6
READ_REQUEST, READ_RESPONSE, WRITE, ACK = "READ request", "READ response", "WRITE", "ACK"
OPCODES = {**dict.fromkeys((6, 7, 8, 10), WRITE), 12: READ_REQUEST,
           **dict.fromkeys((13, 14, 15, 16), READ_RESPONSE), 17: ACK}      # of reliable connections
A, B = "10.9.0.1", "10.9.0.2"

# nbytes: of the RDMA payload, with what pads it to four bytes. tos: the IP header's byte.
Packet = collections.namedtuple("Packet", "source kind tos nbytes qpn")


def wire(*command: str) -> None:
    """One of wire.sh's commands."""
    subprocess.run(["/bin/sh", SCRIPT, *command], check=True)


@contextlib.contextmanager
def shaped(how: str, rate: str):
    """The cable carries `rate` ("24mbit"). how: "class", by DSCP, or "plain", one queue."""
    wire(how, rate)
    try:
        yield
    finally:
        wire("free")


class Capture:
    """The RoCEv2 packets that cross the cable meanwhile, seen at w0, both ways."""

    def __enter__(self):
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        self._socket.bind(("w0", ETH_P_ALL))
        self._socket.setblocking(False)
        return self

    def __exit__(self, *wrong):
        self._socket.close()

    def packets(self) -> list:
        """What was seen since the last call. A packet that was missed is an error."""
        seen = []
        with contextlib.suppress(BlockingIOError):
            while True:
                seen.append(_parse(self._socket.recv(1 << 16)))
        _, dropped = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        assert not dropped, f"the capture missed {dropped} packets"
        return [packet for packet in seen if packet]


def _parse(frame):
    """Ethernet, IPv4, UDP, base transport header; None if it is not RoCEv2."""
    if frame[12:14] != b"\x08\x00" or frame[23] != socket.IPPROTO_UDP:
        return None
    at = 14 + 4 * (frame[14] & 15)
    if struct.unpack_from(">H", frame, at + 2)[0] != ROCE_V2:
        return None
    opcode, qpn = frame[at + 8], struct.unpack_from(">I", frame, at + 12)[0] & 0xffffff
    # More headers: RETH (16) with requests that begin, AETH (4) with answers.
    more = 16 if opcode in (6, 10, 12) else 4 if opcode in (13, 15, 16, 17) else 0
    nbytes = struct.unpack_from(">H", frame, at + 4)[0] - 8 - 12 - more - 4     # ICRC
    return Packet(socket.inet_ntoa(frame[26:30]), OPCODES.get(opcode, f"opcode {opcode}"),
                  frame[15], nbytes, qpn)
