"""Opening NICs of GPUs ("cuda:0"), the names they listen at, and what their driver's refusals mean.

Such a NIC copies between registered memories of its GPU and this host, in this process: by the copy
engines, or by a few SMs. docs/gpu.md is the design note. KVIO_CUDA_LIBRARY is opened instead of
libcuda.so.1.
"""
import errno
import importlib.resources
import os
import threading

from kvio._ext import nic as _nic
from kvio.errors import BackendUnavailable, Closed, InvalidArgument, TransferError, checked_int
from kvio.spans import DeviceMemory, PinnedMemory, typed

ANYWHERE = "Nic.open(\"soft\") works anywhere"
MAX_SMS = 8             # that the kernel takes of the model's, unless asked for otherwise


class Board:
    """What the NICs of one GPU in this process share: the names at which they listen."""

    _boards_lock = threading.Lock()
    _boards: dict = {}

    def __init__(self, ordinal):
        self.ordinal, self._addresses, self._lock = ordinal, {}, threading.Lock()

    @classmethod
    def of(cls, ordinal: int) -> "Board":
        with cls._boards_lock:
            return cls._boards.setdefault(ordinal, cls(ordinal))

    @classmethod
    def listening_at(cls, address) -> list:
        """The GPUs whose NICs answer at this name."""
        with cls._boards_lock:
            return [f"cuda:{ordinal}" for ordinal, board in cls._boards.items()
                    if address in board._addresses]


def _forget_boards():
    Board._boards, Board._boards_lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_forget_boards)


def open_nic(cls, instance, name, queue_depth, max_sge, copy, max_sms, busy_poll):
    """`Nic.open("cuda:instance")`."""
    if instance and not (instance.isascii() and instance.isdecimal() and len(instance) < 10):
        given = f"cuda:{instance[:40]}{'...' if len(instance) > 40 else ''}"
        raise InvalidArgument(f"a GPU is \"cuda\" or \"cuda:N\", not {given!r}")
    ways = {"auto": _nic.COPY_AUTO} | {way: i for i, way in enumerate(_nic.COPY_WAYS)}
    copy = "auto" if copy is None else copy
    if not isinstance(copy, str) or copy not in ways:
        raise InvalidArgument(f"copy must be one of {', '.join(ways)}, not {copy!r}")
    max_sms = MAX_SMS if max_sms is None else checked_int("max_sms", max_sms, 1, 1024)
    queue_depth = checked_int("queue_depth", queue_depth, 1, 1 << 20)
    max_sge = checked_int("max_sge", max_sge, 1, 64)
    ordinal = int(instance or 0)
    try:
        ext = _nic.Nic("cuda", device=str(ordinal), queue_depth=queue_depth, max_sge=max_sge,
                       flags=_nic.BUSY_POLL if busy_poll else 0, copy_way=ways[copy],
                       max_sms=max_sms, ptx=_kernel())
    except OSError as failed:
        why = _nic.with_driver_hint(failed.strerror)
        if failed.errno == errno.EINVAL:
            raise InvalidArgument(f"cuda:{ordinal}: {why}") from None
        if failed.errno in (errno.ENODEV, errno.ENOSYS) and "Nic.open" not in why:
            why = f"{why}; {ANYWHERE}"
        raise BackendUnavailable(failed.errno, why) from None
    return cls(ext, None, name or f"cuda:{ordinal}", 0, 0, Board.of(ordinal))


def _kernel() -> bytes | None:
    """The copy kernel's PTX; None: this build has none, and NICs do without."""
    file = importlib.resources.files("kvio._ext").joinpath("copy_kernel.ptx")
    return file.read_bytes() if file.is_file() else None


# ---- what Nic and Peer ask

def check_process(nic) -> None:
    if nic._pid != os.getpid():
        raise Closed(f"NIC {nic.name} belongs to the process that forked this one, and CUDA does "
                     "not outlive a fork: start processes by \"spawn\" and open a NIC there")


def memory_of(nic, nbytes, is_pinned):
    """`Nic.pinned` and `Nic.device_memory`."""
    if nic.provider != "cuda":
        raise InvalidArgument(f"{nic.name} is a {nic.provider} NIC; pinned and device memory come "
                              "from one of Nic.open(\"cuda:0\")")
    nbytes = checked_int("nbytes", nbytes, 1, 1 << 62)
    with typed(f"{nic.name}: {nbytes} bytes of {'pinned' if is_pinned else 'device'} memory"):
        kind = PinnedMemory if is_pinned else DeviceMemory
        return kind(nic._network.ordinal, nbytes, is_pinned)


def check_device(nic, region) -> None:
    """A GPU's memory is copied by the NICs of that GPU."""
    if region.ordinal != nic._network.ordinal:
        raise InvalidArgument(f"{nic.name}: this memory lies on {region.device}, and the NIC is "
                              f"cuda:{nic._network.ordinal}'s; open one of "
                              f"Nic.open(\"{region.device}\")")


def not_registered(nic, region, code):
    """The error for memory that the driver does not take."""
    why = said(nic) or "the driver does not say why"
    text = f"{nic.name}: cannot register {region.nbytes} bytes at {region.addr:#x}: {why}"
    if code in (errno.EINVAL, errno.EXDEV, errno.EFAULT, errno.EACCES):
        return InvalidArgument(text)
    return TransferError(code, text)


def not_posted(peer, code):
    """The error for a batch of which nothing was posted."""
    nic, why = peer.nic, said(peer.nic)
    if code == errno.EXDEV:
        return InvalidArgument(f"{nic.name}: the stream given as after= belongs to another GPU or "
                               f"another context than cuda:{nic._network.ordinal}'s primary one; "
                               f"nothing was posted{why and f' ({why})'}")
    return TransferError(code, f"cannot post to {peer.remote_name}{why and f': {why}'}")


def said(nic) -> str:
    """What the driver said of the last call that failed, and what to try."""
    return _nic.with_driver_hint(_nic.cuda_info(nic._ext)["why"])


def check_address(nic, address) -> None:
    raise InvalidArgument(f"{nic.name}: {address!r} is an address of other processes, and a GPU's "
                          "NIC copies within its own: give a plain name, or use a verbs NIC "
                          "(\"host:port\") or a soft one (\"unix:PATH\")")


def nobody_listens(nic, address):
    """The error for a name that no NIC of this GPU listens at."""
    elsewhere = Board.listening_at(address)
    if elsewhere:
        return InvalidArgument(f"{nic.name}: {address!r} is a NIC of {elsewhere[0]}, and NICs "
                               "connect to those of their own GPU: copy by way of host memory "
                               "that is registered with both")
    return TransferError(errno.ECONNREFUSED, f"{nic.name}: nobody listens at {address!r} on "
                         f"cuda:{nic._network.ordinal} in this process; call listen first")


def dishonoured(peer) -> tuple:
    """What a copy engine does not have of the classes, in words."""
    state = peer.query()
    return tuple(f"NIC {peer.nic.name} does not honour class {c.name}: asked for sl {c.sl} and "
                 f"tclass {c.tclass}; a copy engine knows neither ({' and '.join(ignored)}), only "
                 "that sl 0 goes first" for c in peer.classes
                 if (ignored := state[c.name]["ignored"]))
