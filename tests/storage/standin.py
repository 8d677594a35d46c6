"""The stand-in for 3FS (usrbio_standin.c; not 3FS): built once a session, and its controls."""
import ctypes
import os
import shutil
import subprocess

RESULT, SHORT, DELAY_US, SHUFFLE, PREP, REG, STALL, ONE, DENY, CREATE, WAIT, HOLES, \
    STRAY = range(13)
PREPS, SUBMITS, WAITS, IOS, RINGS, REGISTERED, IOVS, REFUSED = range(8)
READS, WRITES, BOTH, FOREVER = 1, 2, 3, -1
HERE = os.path.dirname(os.path.abspath(__file__))


def build(folder):
    """The path of the library, with the sanitizer this process runs under."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if not compiler:
        return None
    preloaded, flags = os.environ.get("LD_PRELOAD", ""), []
    for name, flag in (("libasan", "-fsanitize=address,undefined"),
                       ("libtsan", "-fsanitize=thread")):
        flags += [flag] if name in preloaded else []
    path = os.path.join(folder, "libhf3fs_api_shared.so")
    subprocess.run([compiler, "-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror",
                    "-Wno-unused-parameter", "-Wno-format-nonliteral", "-fvisibility=hidden",
                    "-shared", "-fPIC", "-pthread",
                    *flags, os.path.join(HERE, "usrbio_standin.c"), "-o", path],
                   check=True, env={**os.environ, "LD_PRELOAD": ""})
    return path


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
