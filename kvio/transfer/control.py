"""The control thread of a NIC: its listening sockets and the control connections of its peers.

One daemon thread for each NIC that has anything to do with other processes. It alone touches
sockets, codecs and the lists here; everybody else submits jobs to it and waits for answers, for a
bounded time. It holds its NIC weakly, so that one that nobody closed can still be collected.
"""
import atexit
import collections
import errno
import os
import selectors
import socket
import threading
import time
import weakref

from kvio.errors import Closed, TransferError
from kvio.transfer.connection import Connection
from kvio.transfer.frames import TARGET

HANDSHAKE_S = 5.0               # for somebody who connects to us
CROWDED_S = 1.0                 # how long the oldest is spared when there are too many
MAX_HALF_OPEN = 64
ANSWER_S = 1.0                  # how long register, deregister and close wait for peers
TICK_S, LONGEST_TICK_S = 0.001, 0.05


class Waiter:
    """What a caller waits for: a result, or answers of several connections."""

    def __init__(self):
        self._event = threading.Event()
        self._missing = set()
        self.result = self.error = None

    def finish(self, result=None, error=None) -> None:
        if not self._event.is_set():
            self.result, self.error = result, error
            self._event.set()

    def expect(self, connections) -> None:
        """Done when each of them has answered or died."""
        self._missing = set(connections)
        if not self._missing:
            self.finish()

    def answered(self, connection) -> None:
        self._missing.discard(connection)
        if not self._missing:
            self.finish()

    def wait(self, timeout: float) -> bool:
        return self._event.wait(max(timeout, 0.0))


class Acceptor:
    """A listening socket."""

    def __init__(self, control, sock, listener, secret):
        sock.setblocking(False)
        self.control, self.sock, self.secret = control, sock, secret
        self.listener = weakref.ref(listener)
        self.paused_until, self.is_watched = None, False

    def start(self):
        if self.sock.fileno() < 0:              # closed before it began
            return
        self.is_watched = True
        self.control.selector.register(self.sock, selectors.EVENT_READ, self.ready)

    def ready(self, mask):
        listener, nic = self.listener(), self.control.nic()
        if listener is None or nic is None:
            return self.close()
        if self.control.is_crowded():
            return self.pause()
        try:
            sock, _ = self.sock.accept()
        except BlockingIOError:
            return
        except OSError:                         # out of descriptors, say: not at full speed
            return self.pause()
        try:
            keep_alive(sock)
            conn = Connection(self.control, sock, TARGET, nic, self.secret,
                              time.monotonic() + HANDSHAKE_S, listener)
        except Exception as wrong:
            sock.close()
            return listener.note(wrong)
        self.control.add(conn)

    def pause(self):
        self._unwatch()
        self.paused_until = time.monotonic() + 0.05
        self.control.paused.append(self)

    def resume(self):
        self.paused_until = None
        self.start()

    def _unwatch(self):
        if self.is_watched:
            self.is_watched = False
            self.control.selector.unregister(self.sock)

    def close(self):
        if self in self.control.paused:
            self.control.paused.remove(self)
        self._unwatch()
        self.sock.close()
        self.control.acceptors.discard(self)


class Control:
    """The thread, and what others ask of it."""

    def __init__(self, nic):
        self.nic = weakref.ref(nic, lambda _: self._wake())
        self.epoch = int.from_bytes(os.urandom(8), "little")    # of this life of the NIC
        self.selector = selectors.EpollSelector()
        self.connections, self.acceptors, self.paused = set(), set(), []
        self.half_open = collections.OrderedDict()      # connection -> when it came
        self.live = set()
        self.restless = set()           # call their `tick` soon: (something with tick() -> bool)
        self._tick_s = TICK_S
        self._jobs, self._stopping, self.ended = collections.deque(), None, False
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.selector.register(self._event_fd, selectors.EVENT_READ, self._woken)
        self._thread = threading.Thread(target=self._run, name=f"kvio {nic.name}", daemon=True)
        _controls.add(self)
        self._thread.start()

    # ---- called by anybody

    def submit(self, job) -> None:
        """Let the thread call job() soon. Closed if there is no thread any more."""
        if self.ended:
            raise Closed("the NIC's connections are closed")
        self._jobs.append(job)
        self._wake()
        if self.ended:                          # meanwhile: maybe nobody is left to do it
            try:
                self._jobs.remove(job)
            except ValueError:
                return                          # it was done
            raise Closed("the NIC's connections are closed")

    def ask(self, job, timeout) -> "Waiter | None":
        """Let it call job(waiter), and wait until the waiter is finished; None: time is up."""
        waiter = Waiter()

        def run():
            try:
                job(waiter)
            except Exception as wrong:
                waiter.finish(error=wrong)
        self.submit(run)
        done = waiter.wait(timeout)
        if waiter.error is not None:
            raise waiter.error
        return waiter if done else None

    def is_late(self, since: float) -> bool:
        """Has somebody waited for an answer that long?"""
        return time.monotonic() - since > ANSWER_S

    def announce(self, key: int) -> None:
        """A region is new: tell the peers; return when those that are alive know it."""
        if self.live:
            self.ask(lambda waiter: self._tell("announce", key, waiter), ANSWER_S)

    def retract(self, key: int) -> None:
        """A region is about to go: return when the peers that are alive have let go of it."""
        if self.live:
            self.ask(lambda waiter: self._tell("retract", key, waiter), ANSWER_S)

    def stop(self) -> None:
        """Say goodbye to all, wait for them a little, end the thread."""
        if self.ended:
            return

        def begin():
            self._stopping = time.monotonic() + ANSWER_S
            for acceptor in list(self.acceptors):
                acceptor.close()
            for conn in list(self.connections):
                conn.part("the NIC was closed")
        try:
            self.submit(begin)
        except Closed:
            return
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * ANSWER_S)

    # ---- the thread

    def _wake(self):
        if not self.ended:
            try:
                os.eventfd_write(self._event_fd, 1)
            except OSError:
                pass                            # it ended meanwhile

    def _woken(self, mask):
        try:
            os.eventfd_read(self._event_fd)
        except BlockingIOError:
            pass

    def _run(self):
        try:
            while not self._over():
                for key, mask in self.selector.select(self._timeout()):
                    key.data(mask)
                while self._jobs:
                    self._jobs.popleft()()
                self._tick()
        finally:
            self._end()

    def _over(self):
        if self.nic() is None:
            return True
        if self._stopping is None:
            return False
        return not self.connections or time.monotonic() >= self._stopping

    def _end(self):
        self.ended = True
        for acceptor in list(self.acceptors):
            acceptor.close()
        for conn in list(self.connections):
            conn.die(Closed("the NIC is closed"))
        while self._jobs:                       # whoever came too late must not wait
            self._jobs.popleft()()
        _controls.discard(self)                 # first: a fork in between closes nothing twice
        self.selector.close()
        os.close(self._event_fd)

    def _timeout(self):
        """Until something is due by itself."""
        due = [conn.deadline for conn in self.connections if conn.deadline is not None]
        due += [acceptor.paused_until for acceptor in self.paused]
        if self._stopping is not None:
            due.append(self._stopping)
        if self.restless:
            due.append(time.monotonic() + self._tick_s)
        return max(min(due) - time.monotonic(), 0.0) if due else None

    def _tick(self):
        now = time.monotonic()
        for conn in [c for c in self.connections if c.deadline is not None and c.deadline <= now]:
            conn.late()
        for acceptor in [a for a in self.paused if a.paused_until <= now]:
            self.paused.remove(acceptor)
            acceptor.resume()
        if not self.restless:
            self._tick_s = TICK_S
            return
        nic = self.nic()
        try:
            if nic is not None:
                nic._ext.drive()                # nobody else may be doing it
        except ValueError:
            pass                                # it is closed
        done = {each for each in list(self.restless) if each.tick()}     # more may come
        self.restless -= done
        self._tick_s = TICK_S if done else min(2 * self._tick_s, LONGEST_TICK_S)

    def is_crowded(self) -> bool:
        """Are there too many handshakes under way? The oldest has to go if it is slow."""
        if len(self.half_open) < MAX_HALF_OPEN:
            return False
        oldest, came = next(iter(self.half_open.items()))
        if time.monotonic() - came < CROWDED_S:
            return True
        oldest.fail(TransferError(errno.ETIMEDOUT, "too many handshakes at once, and this one "
                                  "was the oldest"))
        return False

    def listen(self, sock, listener, secret) -> Acceptor:
        """Called by anybody: serve a listening socket."""
        acceptor = Acceptor(self, sock, listener, secret)
        self.acceptors.add(acceptor)
        self.submit(acceptor.start)
        return acceptor

    def add(self, conn) -> None:
        self.connections.add(conn)
        if conn.role == TARGET:
            self.half_open[conn] = time.monotonic()
        self.selector.register(conn.stream.sock, selectors.EVENT_READ, conn.ready)
        conn.begin()

    def watch(self, conn) -> None:
        """It has something to send, or no more."""
        self.selector.modify(conn.stream.sock, selectors.EVENT_READ | (
            selectors.EVENT_WRITE if conn.stream.sending else 0), conn.ready)

    def remove(self, conn) -> None:
        if conn in self.connections:
            self.connections.discard(conn)
            self.half_open.pop(conn, None)
            self.live.discard(conn)
            self.selector.unregister(conn.stream.sock)

    def _tell(self, what, key, waiter):
        asked = [conn for conn in list(self.live) if conn.tell(what, key, waiter)]
        waiter.expect(conn for conn in asked if conn in self.live)


def keep_alive(sock: socket.socket) -> None:
    """A host that is dead is noticed within some 15 s; a process that is dead, at once."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3),
                          ("TCP_USER_TIMEOUT", 15000)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# ---- the end of the process, and forks

_controls: "weakref.WeakSet[Control]" = weakref.WeakSet()
_of_parents = []                # what a child must never free: the devices are its parent's


class _ParentsNic:
    """In a child, what stands where the parent's NIC was."""

    closed, in_flight = True, 0

    def __init__(self, provider):
        self.provider = provider

    def __getattr__(self, name):
        raise Closed("this NIC belongs to the process that forked this one; open one here")


def _in_child():
    """The connections are the parent's. Our copies of their sockets are closed, so that a peer
    notices when the parent ends; no thread of ours is running, and nothing is driven or freed."""
    for control in list(_controls):
        control.ended = True
        nic = control.nic()
        for conn in control.connections:
            conn.stream.sock.close()
        for acceptor in control.acceptors:
            acceptor.sock.close()
            listener = acceptor.listener()
            if listener is not None:
                listener._acceptor = None       # its name in the file system stays
        control.selector.close()
        os.close(control._event_fd)
        _of_parents.append((control, list(control.connections), list(control.restless)))
        if nic is not None:
            _of_parents.append((nic._ext, [peer._disown() for peer in nic._peers]))
            nic._ext = _ParentsNic(nic.provider)
    _controls.clear()


def _at_exit():
    """Peers learn at once, and no thread is left that would wake up in a dying interpreter."""
    for control in list(_controls):
        control.stop()


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
