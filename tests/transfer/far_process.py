"""Another process with a soft NIC, for test_shared.py: it does what it is told by a pipe."""
import contextlib
import multiprocessing
import os
import signal
import traceback

import numpy as np

from kvio.layout import READ, WRITE
from kvio.transfer import Access, Fabric, Nic
from nics import PATIENCE, pattern, requests
from processes import send_signal

LONG_S = 60 * PATIENCE


def in_order(nic):
    """What was done before something went into the pipe has happened when it comes out. A
    sanitizer of threads, which sees one process, learns it from the lock that guards all copying:
    whoever sends or receives takes it for a moment."""
    return nic._ext.in_flight


class There:
    """What runs in the other process: `mine` is its memory, `peer` its end of the connection."""

    def __init__(self, path, nbytes, bytes_per_s):
        self.nic = Nic.open("soft", name="there", fabric=Fabric(), bytes_per_s=bytes_per_s)
        self.mine, self.private = pattern(nbytes, 2), np.full(nbytes, 7, np.uint8)
        self.region = self.nic.register(self.mine)
        self.private_region = self.nic.register(self.private)
        self.listener = self.nic.listen(f"unix:{path}")
        self.peer, self.transfers = None, []

    def regions(self):
        return [(each.addr, each.key, each.nbytes) for each in (self.region, self.private_region)]

    def bytes(self, start, stop, private=False):
        return bytes((self.private if private else self.mine)[start:stop])

    def post(self, opcode, far, local_at, remote_at, length):
        """Between our memory and the region `far` of the other end; does not wait."""
        self.peer = self.peer or self.listener.accept()
        self.transfers.append(self.peer.post(requests(
            opcode, self.region, Handle(*far), local_at, remote_at, length)))

    def wait(self):
        for transfer in self.transfers:
            transfer.wait(LONG_S)
        self.transfers.clear()

    def write_for_ever(self, far):
        self.peer = self.peer or self.listener.accept()
        wrs = requests(WRITE, self.region, Handle(*far), 4096 * np.arange(64),
                       4096 * np.arange(64), 4096)
        self.peer.write(wrs).wait(LONG_S)
        yield
        while True:
            self.peer.write(wrs).wait(LONG_S)

    def reuse(self, value):
        """Take the memory back at once and fill it."""
        self.nic.deregister(self.region)
        self.mine[:] = value

    def close(self):
        self.nic.close(cancel=True)


class Handle:
    """A region of the other end, as work requests name it."""

    def __init__(self, addr, key, nbytes):
        self.addr, self.key, self.nbytes = addr, key, nbytes


def serve(pipe, *args):
    there = There(*args)
    pipe.send(there.regions())
    with contextlib.suppress(EOFError):
        while True:
            name, rest = pipe.recv()
            in_order(there.nic)
            try:
                answer = getattr(there, name)(*rest)
                in_order(there.nic)
                if hasattr(answer, "__next__"):         # it goes on after the answer
                    next(answer)
                    pipe.send(None)
                    next(answer, None)
                    continue
                pipe.send(answer)
            except Exception as failed:
                traceback.print_exc()
                pipe.send(failed)
    there.close()


class Here:
    """Our end: a NIC, memory, and the connection to the other process."""

    def __init__(self, folder, nbytes=1 << 20, bytes_per_s=0, far_bytes_per_s=0):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        path, self.nic = str(folder / "there"), None
        self.process = context.Process(target=serve, args=(theirs, path, nbytes, far_bytes_per_s))
        self.process.start()
        theirs.close()
        self.remote, self.private = (Handle(*each) for each in self._answer())
        self.nic = Nic.open("soft", name="here", fabric=Fabric(), bytes_per_s=bytes_per_s)
        self.mine, self.theirs = pattern(nbytes, 1), pattern(nbytes, 2)
        self.local = self.nic.register(self.mine)
        self.peer = self.nic.connect(f"unix:{path}")

    @property
    def far(self):
        """Our region, as the other process names it."""
        return self.local.addr, self.local.key, self.local.nbytes

    def _answer(self):
        if not self.pipe.poll(LONG_S):
            raise TimeoutError("the other process does not answer")
        answer = self.pipe.recv()
        if self.nic is not None:
            in_order(self.nic)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def tell(self, name, *args):
        in_order(self.nic)
        self.pipe.send((name, args))
        return self._answer()

    def kill(self, number=signal.SIGKILL):
        send_signal(self.process.pid, number)
        if number == signal.SIGKILL:
            self.process.join(LONG_S)

    def read(self, local_at, remote_at, length):
        return requests(READ, self.local, self.remote, local_at, remote_at, length)

    def write(self, local_at, remote_at, length):
        return requests(WRITE, self.local, self.remote, local_at, remote_at, length)

    def close(self):
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGCONT)
        self.pipe.close()
        self.nic.close(cancel=True)
        self.process.join(LONG_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


__all__ = ["Access", "Here", "serve"]
