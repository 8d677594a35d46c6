"""A control connection: the handshake, then what the two ends tell each other while they live.

All of it runs in the control thread of its NIC (control.py), and never blocks.
"""
import collections
import errno
import os
import selectors
import socket
import struct
import time
import weakref

from kvio._ext import nic as ext
from kvio.errors import Closed, InvalidArgument, KvioError, TransferError
from kvio.transfer import frames, handshake, links
from kvio.transfer.bodies import AD_PART_NBYTES
from kvio.transfer.frames import INITIATOR, broken

PART_S = 1.0                    # how long a peer has to answer BYE
MAX_DEFERRED = 65536            # regions that wait for a transfer to let go of an older one,
MAX_DEFERRED_NBYTES = 64 << 20  # and their descriptions
MAX_AD_NBYTES = 4 << 20         # of a region's description, in all its frames


class Connection:
    """`peer` is the RemotePeer once the handshake is through (held weakly)."""

    def __init__(self, control, sock, role, nic, secret, deadline, listener=None, classes=None,
                 waiter=None):
        check_same_user(sock)
        self.control, self.role, self.deadline, self.waiter = control, role, deadline, waiter
        self.stream, self.codec = frames.Stream(sock), frames.Codec(role)
        self.listener = listener
        self.link = links.Link(nic, control.epoch)
        steps = handshake.initiate if role == INITIATOR else handshake.respond
        if role != INITIATOR:
            classes = listener.classes
        self.steps = steps(self.codec, secret, self.link, classes)
        self.peer, self.is_live, self.parting = None, False, False
        self.told, self._unheard = set(), {}            # keys; (kind, key) -> waiters
        self._unknown = {}                              # keys it has not acknowledged -> since
        self._requests, self._next_request = {}, 0      # id -> (waiter, what is an answer)
        self._ad = bytearray()                          # of a region that has not all come yet
        self._deferred, self._deferred_nbytes = collections.deque(), 0
        self._parted = []                               # waiters for the end

    # ---- events

    def begin(self):
        self._guard(self._step, None)

    def ready(self, mask):
        self._guard(self._ready, mask)

    def _guard(self, call, *args):
        try:
            call(*args)
        except Exception as wrong:              # one connection ends, not the thread
            self.fail(wrong)

    def _ready(self, mask):
        if mask & selectors.EVENT_WRITE:
            self.stream.flush()
            self.control.watch(self)
        if not mask & selectors.EVENT_READ:
            return
        data = self.stream.read()
        if data is None:
            return
        if not data:
            raise TransferError(errno.ECONNRESET, "the other end has closed the connection")
        self.codec.feed(data)
        while self in self.control.connections:
            frame = self.codec.next()
            if frame is None:
                return
            kind, body = frame
            count = body.get("fds", 0) if self.codec.key else 0
            self._frame(kind, body, self.stream.claim(count))

    def late(self):
        if self.parting:
            self.die(Closed("the other end does not answer"))
        else:
            self.fail(TransferError(errno.ETIMEDOUT, "the handshake took too long"))

    def send(self, kind, body, fds=()):
        self._write(self.codec.encode(kind, body), fds)

    def _write(self, data, fds=()):
        idle = not self.stream.sending
        try:
            self.stream.write(data, fds)
        except (BrokenPipeError, ConnectionResetError):
            return                              # reading will tell, and maybe why
        if idle and self.stream.sending:
            self.control.watch(self)

    # ---- the handshake

    def _step(self, frame):
        try:
            out = self.steps.send(frame)
        except StopIteration as end:
            self._agreed(end.value)
        else:
            if out is not None:
                self._write(*out)
            elif self.role == INITIATOR:
                raise RuntimeError("the initiator speaks first")

    def _agreed(self, last):
        """The queue pairs are connected. The initiator tells its regions first."""
        self.steps = None
        if last is not None:
            self._write(*last)
        if self.role == INITIATOR:
            self._go_live()

    def _go_live(self):
        self.is_live = True
        self.control.live.add(self)             # before the look: whoever registers now tells us
        for key in list(self.link.nic._ext.owners):
            self.announce(key)
        self.send(frames.READY, {"readback": self.link.readback()})

    def _on_ready(self, body):
        if self.peer is not None:
            raise broken("READY came twice")
        link = self.link
        link.check_readback(handshake.readback_of(body, link.qps))
        peer = links.RemotePeer(link, self)
        self.peer = weakref.ref(peer)
        self.deadline = None
        self.control.half_open.pop(self, None)
        link.nic._peers.add(peer)
        link.nic._classes.update((c.name, c) for c in peer.classes)
        if self.role == INITIATOR:
            self.waiter.finish(peer)
        else:
            peer.listener = self.listener
            self.listener._accepted.append(peer)        # before the other end knows
            self._go_live()
        self.link = self.listener = self.waiter = None

    # ---- frames of peers

    def _frame(self, kind, body, fds):
        if self.steps is not None:
            return self._step((kind, body, fds))
        if kind == frames.REGION:
            body = self._gather(body, fds)
            if "more" in body:
                return
        elif self._ad:
            raise broken("a region's description has no end")
        frame = kind, body, fds
        if kind == frames.REGION or kind == frames.GONE:
            if self._deferred:
                self._defer(frame)
            elif not self._region(frame):
                self._defer(frame)
                self.control.restless.add(self)
            return
        body = handshake.expect(frame, kind)
        if kind == frames.READY:
            self._on_ready(body)
        elif kind == frames.ACK:
            if body["of"] == frames.REGION:
                self._unknown.pop(body["key"], None)
            for waiter in self._unheard.pop((body["of"], body["key"]), ()):
                waiter.answered(self)
        elif kind == frames.RESET and self.peer is not None:
            peer = self.peer()
            answer = peer.on_reset(body) if peer is not None else {"closed": True}
            self.send(frames.ANSWER, answer | {"id": body["id"]})
        elif kind == frames.ANSWER:
            self._on_answer(body)
        elif kind == frames.BYE:
            self.die(Closed("the other end has closed the connection"))
        elif kind == frames.REFUSE:
            raise handshake.refused(body)
        else:
            raise broken(f"frame {kind} has no place here")

    def _on_answer(self, body):
        waiter, fits = self._requests.get(body["id"], (None, None))
        if waiter is None or not (body.keys() & {"busy", "closed", "collision"} or fits(body)):
            raise broken("an answer to nothing that was asked")
        del self._requests[body["id"]]
        waiter.finish(body)

    def _gather(self, body, fds):
        """A description that is too long for one frame comes in several, the last one without
        "more" and with the descriptor."""
        self._ad += body["ad"]
        if len(self._ad) > MAX_AD_NBYTES or "more" in body and fds:
            for fd in fds:
                os.close(fd)
            raise broken("a region is described at too great a length")
        if "more" not in body:
            body, self._ad = {"ad": bytes(self._ad)}, bytearray()
        return body

    def _defer(self, frame):
        _, body, fds = frame
        self._deferred_nbytes += len(body.get("ad", b""))
        if len(self._deferred) >= MAX_DEFERRED or self._deferred_nbytes > MAX_DEFERRED_NBYTES:
            for fd in fds:
                os.close(fd)
            raise broken("too many regions come and go while a transfer uses one of them")
        self._deferred.append(frame)

    def tick(self) -> bool:
        """Regions that could not go yet. True: nothing is left to do."""
        try:
            while self._deferred and self in self.control.connections:
                if not self._region(self._deferred[0]):
                    return False
                self._deferred_nbytes -= len(self._deferred.popleft()[1].get("ad", b""))
        except Exception as wrong:
            self._deferred.popleft()            # its descriptors have been taken care of
            self.fail(wrong)
        return True

    def _far(self):
        holder = self.link if self.peer is None else self.peer()
        if holder is None or holder.far is None:
            raise Closed("the peer is closed")
        return holder.carrier, holder.far

    def _region(self, frame) -> bool:
        """REGION or GONE. False: a transfer in flight names the region, try again."""
        kind, body, fds = frame
        if kind == frames.GONE:
            key = handshake.expect(frame, kind)["key"]
            carrier, far = self._far()
            try:
                carrier.remove(far, key)
            except OSError as failed:
                if failed.errno == errno.EBUSY:
                    return False
                raise broken("a region that was not there is gone") from None
        else:
            key = self._add(body["ad"], fds)
        self.send(frames.ACK, {"of": kind, "key": key})
        return True

    def _add(self, ad, fds):
        try:
            carrier, far = self._far()
            if len(ad) < ext.AD_NBYTES:
                raise broken("the description of a region is cut short")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        try:
            carrier.add(far, ad, fds[0] if fds else None)       # the descriptor is its own now
        except (OSError, ValueError) as failed:
            raise broken(f"a region is malformed or known ({failed})") from None
        return struct.unpack_from("<Q", ad)[0]

    # ---- what our own side wants; True: an answer will come

    def tell(self, what, key, waiter) -> bool:
        """`announce` or `retract`, of which nothing is raised."""
        try:
            return (self.announce if what == "announce" else self.retract)(key, waiter)
        except Exception as wrong:
            self.fail(wrong)
            return False

    def announce(self, key, waiter=None) -> bool:
        """Tell of a region, once. Nothing is told of one without remote access."""
        if key in self.told:
            return self._wait_too(frames.REGION, key, waiter)
        holder = self.link if self.peer is None else self.peer()
        region = holder and holder.nic._ext.owners.get(key)
        if getattr(region, "key", None) != key or key in holder.nic._going:
            return False                        # gone, or so new that it comes by itself
        try:
            ad, fd = holder.carrier.describe(region)
        except OSError as failed:
            if failed.errno in (errno.EACCES, errno.ENOENT):
                return False
            raise
        self.told.add(key)
        self._unknown[key] = time.monotonic()
        self._unheard[frames.REGION, key] = []
        fds = () if fd is None else (fd,)
        for at in range(0, len(ad) - AD_PART_NBYTES, AD_PART_NBYTES):
            self.send(frames.REGION, {"ad": ad[at:at + AD_PART_NBYTES].hex(), "more": True,
                                      "fds": 0})
        last = (len(ad) - 1) % AD_PART_NBYTES + 1
        self.send(frames.REGION, {"ad": ad[-last:].hex(), "fds": len(fds)}, fds)
        return self._wait_too(frames.REGION, key, waiter)

    def retract(self, key, waiter) -> bool:
        if key not in self.told:
            return False
        self.told.discard(key)
        self._unheard[frames.GONE, key] = []
        self.send(frames.GONE, {"key": key})
        return self._wait_too(frames.GONE, key, waiter)

    def _wait_too(self, kind, key, waiter):
        waiters = self._unheard.get((kind, key))
        if waiters is None or waiter is None:
            return False
        if kind == frames.REGION and self.control.is_late(next(iter(self._unknown.values()))):
            return False            # it is stopped: nobody waits twice for that
        waiters.append(waiter)
        return True

    def request(self, body, fits, waiter) -> None:
        """A question to the other end's control thread. `fits`: is this body an answer to it, if
        it is no refusal?"""
        if self not in self.control.connections:
            return waiter.finish(error=Closed("the connection is over"))
        self._next_request += 1
        self._requests[self._next_request] = waiter, fits
        self._guard(self.send, frames.RESET, body | {"id": self._next_request})

    # ---- the end

    def part(self, why="", waiter=None) -> None:
        """Say goodbye and wait for the other end to close."""
        if self not in self.control.connections:
            return waiter and waiter.finish()
        if waiter is not None:
            self._parted.append(waiter)
        if not self.is_live:
            return self.fail(TransferError(errno.ECONNREFUSED, why))
        if not self.parting:
            self.parting, self.deadline = True, time.monotonic() + PART_S
            self._guard(self.send, frames.BYE, {})

    def fail(self, wrong) -> None:
        """The connection ends because of `wrong`; the other end is told, if it can be."""
        if not isinstance(wrong, (TransferError, InvalidArgument, Closed)):
            wrong = TransferError(getattr(wrong, "errno", None) or errno.EPROTO, str(
                getattr(wrong, "strerror", None) or wrong))
        is_known = self.codec.key is not None or getattr(wrong, "errno", 0) in (
            errno.EACCES, errno.EPROTONOSUPPORT)
        if is_known and not getattr(wrong, "told", False) and self in self.control.connections:
            try:
                self.send(frames.REFUSE, handshake.refusal(wrong))
            except (KvioError, OSError):
                pass
        self.die(wrong)

    def die(self, wrong) -> None:
        """No more of this connection. Its peer is lost; whoever waits for it is told."""
        if self not in self.control.connections:
            return
        self.control.remove(self)
        peer = self.peer() if self.peer is not None else None
        if peer is not None:
            peer.lose(wrong)
        elif self.link is not None:
            self.link.abandon()
            if self.listener is not None and not isinstance(wrong, Closed):
                self.listener.note(wrong)
        if self.steps is not None:
            self.steps.close()
        for _, _, fds in self._deferred:
            for fd in fds:
                os.close(fd)
        self._deferred.clear()
        self.stream.close()
        if self.waiter is not None:
            self.waiter.finish(error=wrong)
        for waiters in self._unheard.values():
            for waiter in waiters:
                waiter.answered(self)
        for waiter, _ in self._requests.values():
            waiter.finish(error=Closed("the connection is over"))
        for waiter in self._parted:
            waiter.finish()
        self.link = self.listener = self.waiter = None


def check_same_user(sock) -> None:
    """Only the same user is at the other end of a Unix socket."""
    if sock.family != socket.AF_UNIX:
        return
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise TransferError(errno.EACCES, f"user {uid} is at the other end of the Unix socket, "
                            f"not {os.geteuid()}: memory is shared with the same user only")
