"""The stand-in for libibverbs (ibverbs_standin.h; not libibverbs): built once, and its controls.

kvio opens one libibverbs in a process and keeps it, so a session of tests has either this one or
the machine's own: the latter where KVIO_REQUIRE names verbs, as inside the lab.
"""
import ctypes
import os
from pathlib import Path

import cbuild
from require import PARTS, required

HERE = Path(__file__).parent
SOURCES = [HERE / f"ibverbs_standin{part}.c" for part in ("", "_run", "_objects", "_qp")]
CHECK = HERE / "ibverbs_standin_check.c"
HEADER = HERE / "ibverbs_standin.h"
FOLDER = HERE.parents[1] / "build" / "standin"
VARIABLE = "KVIO_IBVERBS_LIBRARY"
NUM_DEVICES = 3

# enum ibv_wc_status, ibv_port_state, ibv_event_type, ibv_qp_state: what the tests need of them.
STATUS = {name: value for value, name in enumerate((
    "SUCCESS", "LOC_LEN_ERR", "LOC_QP_OP_ERR", "LOC_EEC_OP_ERR", "LOC_PROT_ERR", "WR_FLUSH_ERR",
    "MW_BIND_ERR", "BAD_RESP_ERR", "LOC_ACCESS_ERR", "REM_INV_REQ_ERR", "REM_ACCESS_ERR",
    "REM_OP_ERR", "RETRY_EXC_ERR", "RNR_RETRY_EXC_ERR"))} | {
    "REM_ABORT_ERR": 16, "FATAL_ERR": 19, "RESP_TIMEOUT_ERR": 20, "GENERAL_ERR": 21}
PORT_DOWN, PORT_ACTIVE = 1, 4
INFINIBAND, ETHERNET = 1, 2
DEVICE_FATAL, PORT_ACTIVE_EVENT, PORT_ERR_EVENT = 8, 9, 10
QP_STATES = "reset", "init", "rtr", "rts", "sqd", "sqe", "error"


def why_not():
    """Why it cannot be built or used here, or None."""
    if required("verbs"):
        return "this session uses the machine's own libibverbs"
    return PARTS["compiler"]() or PARTS["ibverbs-headers"]()


def build():
    """The path of the stand-in; built anew if a source is newer."""
    kind = "".join(flag.partition("=")[2][:1] for flag in cbuild.sanitizer())
    path = FOLDER / f"libibverbs_standin{kind}.so"
    newest = max(file.stat().st_mtime for file in [*SOURCES, HEADER])
    if not path.exists() or path.stat().st_mtime < newest:
        FOLDER.mkdir(parents=True, exist_ok=True)
        made = path.with_suffix(f".{os.getpid()}")
        cbuild.shared_library(made, SOURCES, "-Wshadow", "-O2")
        os.replace(made, path)          # another session may be at it as well
    return str(path)


def choose():
    """Make it the libibverbs of this process, before kvio opens one."""
    if why_not() is None:
        os.environ[VARIABLE] = build()
        os.environ["KVIO_STANDIN"] = f"devices={NUM_DEVICES}"


class StandIn:
    """Its controls. `device` is an index, or -1 for all of them."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.standin_count.restype = ctypes.c_uint64

    def reset(self):
        """Settings as at the start, nothing injected, counters at 0."""
        self.library.standin_reset()

    def set(self, device=-1, **settings):
        for name, value in settings.items():
            assert self.library.standin_set(device, name.encode(), ctypes.c_uint64(value)) == 0, \
                f"no setting {name}"

    def count(self, name, device=-1):
        value = self.library.standin_count(device, name.encode())
        assert value != 2**64 - 1, f"no counter {name}"
        return value

    def counts(self, *names, device=-1):
        return tuple(self.count(name, device) for name in names)

    def objects(self):
        """How many of each kind there are now."""
        return {name: self.count(name)
                for name in ("contexts", "pds", "mrs", "channels", "cqs", "qps")}

    def refuse(self, call, error, times=1, after=0):
        """`after` calls of ibv_`call` from now, `times` of them fail with this errno."""
        self.library.standin_refuse(call.encode(), error, after, times)

    def fail(self, status, nth=1, device=0):
        """The nth work request carried out from now on ends with this status."""
        self.library.standin_fail(device, ctypes.c_uint64(nth), STATUS[status])

    def drop_qp(self, qpn):
        """That queue pair does not answer any more."""
        assert self.library.standin_drop_qp(qpn) == 0

    def qp_state(self, qpn):
        """The state that the device has a queue pair in; None: it is gone."""
        state = self.library.standin_qp_state(qpn)
        return None if state < 0 else QP_STATES[state]

    def event(self, kind, device=0):
        """An asynchronous event of the port or device."""
        self.library.standin_event(device, kind)
