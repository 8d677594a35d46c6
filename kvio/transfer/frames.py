"""Frames of a control connection: their length, type, tag, and descriptors of open files.

    u32 length | u8 kind | body, a JSON object | 32-byte tag        (length: of all that follows)

Until both ends have a session key there is no tag; each of those frames goes into the transcript
instead, over which the key is proven and derived. Afterwards the tag is HMAC-SHA256 over sender,
sequence number, kind and body, so that a frame that was altered, repeated, left out, reordered or
sent back is not one of the other end's. What bodies may say stands in bodies.py.

`Codec` is bytes in, frames out, no I/O; `Stream` is a socket that never blocks.
"""
import array
import collections
import errno
import hashlib
import hmac
import json
import os
import socket
import struct

from kvio.errors import TransferError
from kvio.transfer.bodies import (ACCEPT, ACK, ANSWER, BYE, CONNECT, GONE, HELLO,  # noqa: F401
                                  MAX_FDS, OFFER, PROOF, READY, REFUSE, REGION, RESET, broken,
                                  checked)

INITIATOR, TARGET = 0, 1
MAX_FRAME = 1 << 20
MAX_FIRST_FRAME = 2048              # before a peer has proven anything
MAX_QUEUED = 16 << 20               # bytes for a peer that does not read
TAG_NBYTES = 32
_HEAD = struct.Struct("!IB")
_READ_NBYTES = 65536


class Codec:
    """One end's frames, both ways. `role`: INITIATOR or TARGET."""

    def __init__(self, role: int):
        self.role, self.key = role, None
        self._transcript = hashlib.sha256()
        self._sequence = [0, 0]             # of the frames each role has sent
        self._input = bytearray()

    def digest(self) -> bytes:
        """SHA-256 of all frames so far, both ways, until there is a key."""
        return self._transcript.digest()

    def use(self, key: bytes) -> None:
        """From now on every frame has a tag."""
        self.key = key

    def _tag(self, sender, head, body):
        sequence = self._sequence[sender]
        self._sequence[sender] += 1
        mac = hmac.new(self.key, struct.pack("!BQ", sender, sequence), hashlib.sha256)
        mac.update(head)
        mac.update(body)
        return mac.digest()

    def encode(self, kind: int, body: dict) -> bytes:
        """The next frame that we send."""
        text = json.dumps(body, separators=(",", ":")).encode()
        length = 1 + len(text) + (TAG_NBYTES if self.key else 0)
        if length > MAX_FRAME:
            raise TransferError(errno.EMSGSIZE, f"a frame of {length} bytes is too long")
        head = _HEAD.pack(length, kind)
        if self.key:
            return head + text + self._tag(self.role, head, text)
        self._transcript.update(head + text)
        return head + text

    def feed(self, data: bytes) -> None:
        """Bytes came in; then call `next` until it gives None, which bounds what is kept."""
        self._input += data

    def next(self) -> tuple[int, dict] | None:
        """The next frame of the other end: kind, and body as `bodies.checked` gives it.
        TransferError EPROTO: not one."""
        if len(self._input) < _HEAD.size:
            return None
        length, kind = _HEAD.unpack_from(self._input)
        tag_nbytes = TAG_NBYTES if self.key else 0
        if not 1 + tag_nbytes <= length <= (MAX_FRAME if self.key else MAX_FIRST_FRAME):
            raise broken(f"a frame of {length} bytes")
        if len(self._input) < 4 + length:
            return None
        head, frame = bytes(self._input[:_HEAD.size]), bytes(self._input[_HEAD.size:4 + length])
        del self._input[:4 + length]
        if self.key:
            frame, tag = frame[:-TAG_NBYTES], frame[-TAG_NBYTES:]
            if not hmac.compare_digest(tag, self._tag(1 - self.role, head, frame)):
                raise broken("a frame was altered, repeated, reordered or lost on its way")
        else:
            self._transcript.update(head + frame)
        return kind, checked(kind, _parse(frame))


def _parse(text):
    try:
        body = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise broken("a frame's body is no JSON object")
    return body


class Stream:
    """A connected socket that never blocks: what it cannot send yet, it keeps."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self.takes_fds = sock.family == socket.AF_UNIX
        self._fds = collections.deque()     # received, not claimed
        self._out = collections.deque()     # (bytes left, duplicates of descriptors)
        self._queued = 0

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def sending(self) -> bool:
        """Is something left to send? Then call `flush` when the socket is writable."""
        return bool(self._out)

    def read(self) -> bytes | None:
        """What has come in; None: nothing for now; b"": the other end has closed. OSError."""
        try:
            if not self.takes_fds:
                return self.sock.recv(_READ_NBYTES)
            data, ancillary, flags, _ = self.sock.recvmsg(
                _READ_NBYTES, socket.CMSG_SPACE(4 * MAX_FDS), socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return None
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[:len(payload) // fds.itemsize * fds.itemsize])
                self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_FDS:
            raise broken("more descriptors than were announced")
        return data

    def claim(self, count: int) -> list:
        """The descriptors of the frame that is being handled, now the caller's."""
        if not 0 <= count <= len(self._fds):
            raise broken(f"a frame names {count} descriptors, {len(self._fds)} came with it")
        return [self._fds.popleft() for _ in range(count)]

    def write(self, data: bytes, fds=()) -> None:
        """Send, now or later; the descriptors stay the caller's. OSError."""
        if fds and not self.takes_fds:
            raise TransferError(errno.EOPNOTSUPP, "descriptors travel over Unix sockets only; "
                                "listen at unix:PATH")
        self._queued += len(data)
        if self._queued > MAX_QUEUED:
            raise TransferError(errno.ENOBUFS, "the other end does not read what it is told")
        self._out.append((memoryview(data), [os.dup(fd) for fd in fds]))
        self.flush()

    def flush(self) -> None:
        while self._out:
            data, fds = self._out[0]
            try:
                if fds:
                    sent = self.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS,
                                                       array.array("i", fds))],
                                             socket.MSG_NOSIGNAL)
                else:
                    sent = self.sock.send(data, socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            for fd in fds:
                os.close(fd)
            self._queued -= sent
            if sent < len(data):
                self._out[0] = data[sent:], []
            else:
                self._out.popleft()

    def close(self) -> None:
        """Also of descriptors that nobody has claimed or that were not sent."""
        self.sock.close()
        for fds in [self._fds, *(fds for _, fds in self._out)]:
            for fd in fds:
                os.close(fd)
        self._fds.clear()
        self._out.clear()
