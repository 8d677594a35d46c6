"""The stand-in for 3FS (usrbio_standin.c; not 3FS): built once a session, and its controls."""
import ctypes
import os

import cbuild

RESULT, SHORT, DELAY_US, SHUFFLE, PREP, REG, STALL, ONE, DENY, CREATE, WAIT, HOLES, \
    STRAY = range(13)
PREPS, SUBMITS, WAITS, IOS, RINGS, REGISTERED, IOVS, REFUSED = range(8)
READS, WRITES, BOTH, FOREVER = 1, 2, 3, -1
HERE = os.path.dirname(os.path.abspath(__file__))


def build(folder):
    """The path of the library, or None without a compiler."""
    if not cbuild.compiler():
        return None
    return cbuild.shared_library(os.path.join(folder, "libhf3fs_api_shared.so"),
                                 [os.path.join(HERE, "usrbio_standin.c")],
                                 "-Wno-format-nonliteral")


class StandIn:
    """Its controls, once kvio has the library open."""

    def __init__(self, path, mount):
        self.path, self.mount = path, str(mount)
        self.iovs = os.path.join(self.mount, "3fs-virt", "iovs")
        self.library = ctypes.CDLL(path)
        self.library.standin_count.restype = self.library.standin_iov_bytes.restype = ctypes.c_long

    def fault(self, kind, value=0, count=FOREVER, mask=BOTH):
        self.library.standin_fault(kind, ctypes.c_long(value), count, mask)

    def reset(self):
        self.library.standin_reset()

    def count(self, what):
        return self.library.standin_count(what)

    def iov_bytes(self, target):
        return self.library.standin_iov_bytes(os.fsencode(target))

    def links(self):
        """What is registered at the mount."""
        return sorted(os.listdir(self.iovs))


def environment(path):
    return {"KVIO_HF3FS_LIB": path, "HF3FS_USRBIO_DONT_CHECKFS_FOR_MP": "yes"}


def shm():
    """What kvio and the stand-in have in /dev/shm."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(("kvio-", "hf3fs-")))
