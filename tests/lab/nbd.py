"""A disk with a volatile write cache, as an NBD server, whose power can be cut.

A write that was answered is in the cache; only FLUSH (or FUA, for one write) moves it to the
medium. `cut` loses the cache, but for what the disk happened to have written already: any subset
of the unflushed writes, in any order, whole or in pieces. Protocol: fixed newstyle, one
connection at a time, https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md
"""
import os
import socket
import struct
import threading

SECTOR, BLOCK = 512, 4096
_OPTION_MAGIC, _OPTION_REPLY = 0x49484156454F5054, 0x3E889045565A9
_REQUEST, _REPLY = 0x25609513, 0x67446698
_EXPORT_NAME, _ABORT, _INFO, _GO = 1, 2, 6, 7
_ACK, _REP_INFO, _UNSUPPORTED = 1, 3, 0x80000001
_READ, _WRITE, _DISCONNECT, _FLUSH = 0, 1, 2, 3
_FUA = 1
_FLAGS = 1 | 4 | 8              # has flags, takes FLUSH, takes FUA


class Disk:
    """The disk. `medium` is what survives a cut; `cache` what its user sees. torn(data) tells which
    blocks of 4096 bytes a cut may tear into sectors (default: all)."""

    def __init__(self, medium: bytearray, torn=None):
        self._torn = torn
        self.medium, self.cache = medium, bytearray(medium)
        self.unflushed: list[tuple[int, bytes]] = []        # (offset, data), oldest first
        self.counts = {"reads": 0, "writes": 0, "flushes": 0}
        self._lock, self._left = threading.Lock(), None
        self.stopped = threading.Event()        # power is off: nothing is answered any more

    def stop_after(self, count: int) -> None:
        """The power goes off with the count-th write or flush from now on."""
        with self._lock:
            self._left = count

    def _goes_on(self):
        if self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.stopped.set()
        return not self.stopped.is_set()

    def read(self, offset: int, nbytes: int) -> bytes:
        with self._lock:
            self.counts["reads"] += 1
            return bytes(self.cache[offset:offset + nbytes])

    def write(self, offset: int, data: bytes, fua: bool) -> bool:
        """False if the power went off meanwhile; the data may be on the medium all the same."""
        with self._lock:
            self.counts["writes"] += 1
            self.cache[offset:offset + len(data)] = data
            goes_on = self._goes_on()
            if fua and goes_on:
                self.medium[offset:offset + len(data)] = data
                self.unflushed = [piece for write in self.unflushed
                                  for piece in _without(write, offset, offset + len(data))]
            else:
                self.unflushed.append((offset, data))
            return goes_on

    def flush(self) -> bool:
        """False if the power went off before it was done."""
        with self._lock:
            self.counts["flushes"] += 1
            goes_on = self._goes_on()
            if goes_on:
                for offset, data in self.unflushed:
                    self.medium[offset:offset + len(data)] = data
                self.unflushed = []
            return goes_on

    def cut(self, rng, how: str) -> int:
        """Power has been lost; how: "none" of the unflushed writes had reached the medium, "all",
        some "writes", or some "pieces" of them. Returns how many writes were unflushed."""
        with self._lock:
            self.stopped.set()
            count, keep = len(self.unflushed), rng.random()
            writes = [] if how == "none" else list(self.unflushed)
            if how != "all":
                rng.shuffle(writes)
            for offset, data in writes:
                if how == "writes" and rng.random() >= keep:
                    continue
                for at, piece in self._pieces(offset, data):
                    if how != "pieces" or rng.random() < keep:
                        self.medium[at:at + len(piece)] = piece
            self.unflushed, self.cache = [], bytearray(self.medium)
            return count


    def _pieces(self, offset, data):
        """A write as what may be on the medium independently: (offset, data)."""
        at = 0
        while at < len(data):
            block = data[at:at + BLOCK - (offset + at) % BLOCK]
            size = SECTOR if self._torn is None or self._torn(block) else BLOCK
            for piece in range(0, len(block), size):
                yield offset + at + piece, block[piece:piece + size]
            at += len(block)


def _without(write, start, end):
    """The parts of an older write that [start, end) does not cover."""
    offset, data = write
    if offset < start:
        yield offset, data[:start - offset]
    if offset + len(data) > end:
        yield max(offset, end), data[max(0, end - offset):]
    # A write that lies wholly before or after gives one part, and itself.


class Server:
    """Serves one disk on a Unix socket, in a thread of its own."""

    def __init__(self, path: str, disk: Disk):
        self.path, self.disk, self.problem = path, disk, None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(1)
        self._connection = None
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the connection and removes the socket."""
        for end in (self._connection, self._socket):
            if end is not None:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
        self._thread.join()
        self._socket.close()
        os.unlink(self.path)

    def _main(self):
        try:
            while True:
                self._connection, _ = self._socket.accept()
                try:
                    if self._negotiate():
                        self._serve()
                except (EOFError, ConnectionError):
                    pass
                finally:
                    self._connection.close()
        except OSError:
            pass                                # closed
        except Exception as problem:            # a bug here must not look like a dead guest
            self.problem = problem
            raise

    def _take(self, nbytes):
        data = bytearray()
        while len(data) < nbytes:
            piece = self._connection.recv(nbytes - len(data))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)

    def _negotiate(self):
        self._connection.sendall(struct.pack(">8sQH", b"NBDMAGIC", _OPTION_MAGIC, 1))
        self._take(4)
        about = struct.pack(">QH", len(self.disk.cache), _FLAGS)
        while True:
            _, option, nbytes = struct.unpack(">QII", self._take(16))
            self._take(nbytes)

            def answer(kind, data=b"", option=option):
                self._connection.sendall(
                    struct.pack(">QIII", _OPTION_REPLY, option, kind, len(data)) + data)
            if option == _EXPORT_NAME:
                self._connection.sendall(about + bytes(124))
                return True
            if option in (_INFO, _GO):
                answer(_REP_INFO, struct.pack(">H", 0) + about)
                answer(_REP_INFO, struct.pack(">HIII", 3, SECTOR, 4096, 32 << 20))
                answer(_ACK)
                if option == _GO:
                    return True
            elif option == _ABORT:
                answer(_ACK)
                return False
            else:
                answer(_UNSUPPORTED)

    def _serve(self):
        while True:
            _, flags, command, handle, offset, nbytes = struct.unpack(
                ">IHHQQI", self._take(28))
            answer, goes_on = struct.pack(">IIQ", _REPLY, 0, handle), True
            if command == _READ:
                answer += self.disk.read(offset, nbytes)
            elif command == _WRITE:
                goes_on = self.disk.write(offset, self._take(nbytes), bool(flags & _FUA))
            elif command == _FLUSH:
                goes_on = self.disk.flush()
            elif command == _DISCONNECT:
                return
            else:
                answer = struct.pack(">IIQ", _REPLY, 22, handle)
            if goes_on and not self.disk.stopped.is_set():
                self._connection.sendall(answer)
