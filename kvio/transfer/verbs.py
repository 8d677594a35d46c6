"""Opening RDMA NICs: which HCA, which GID, which classes, and what is missing.

Names in the environment follow NCCL's, and as there the environment has the last word: it is the
operator's, who knows the fabric, and the code's classes are a default.

    KVIO_IB_HCA         "HCA[:port][,HCA[:port]...]" where `Nic.open("verbs")` names none
    KVIO_IB_GID_INDEX   where `gid_index` is not given
    KVIO_IB_SL          service levels: "kv=5,collective=0"; a lone "5" is the KV class's
    KVIO_IB_TC          traffic classes (the ToS byte), likewise: "kv=32,collective=184"

The C provider reads KVIO_IB_TIMEOUT (4.096 us << n; 16), KVIO_IB_RETRY_CNT (6), KVIO_IB_WR_API (0:
post by ibv_post_send only), KVIO_IB_SLICE_BYTES (the most one registration spans),
KVIO_IB_DRAIN_MS (how long a device may take to flush; 5000) and KVIO_IBVERBS_LIBRARY (instead of
libibverbs.so.1).

NCCL gives one SL to all its traffic. kvio's classes exist to differ, so one lone value must not
make them one: it is the class KV's, which is kvio's own traffic.
"""
import dataclasses
import errno
import os

from kvio._ext import nic as _nic
from kvio.errors import BackendUnavailable, InvalidArgument
from kvio.transfer.classes import KV

ANYWHERE = "Nic.open(\"soft\") works anywhere"


def open_nic(cls, instance, name, mtu, queue_depth, max_sge, gid_index, pd, busy_poll):
    """`Nic.open("verbs:instance")`."""
    if not instance and not pd:
        instance = os.environ.get("KVIO_IB_HCA", "").strip()
    if gid_index is None:
        gid_index = _gid_index()
    try:
        ext = _nic.Nic("verbs", device=instance, mtu=mtu, queue_depth=queue_depth,
                       max_sge=max_sge, gid_index=gid_index, pd=pd,
                       flags=_nic.BUSY_POLL if busy_poll else 0)
    except (OverflowError, TypeError, UnicodeError) as wrong:
        raise InvalidArgument(f"RDMA NIC {instance!r}: {wrong}") from None
    except OSError as failed:
        if failed.errno != errno.EINVAL:
            raise BackendUnavailable(failed.errno, failed.strerror) from None
        why = failed.strerror if ANYWHERE in failed.strerror else (
            f"queue_depth={queue_depth!r} (1 to 2**20), max_sge={max_sge!r} (1 to 64)")
        raise InvalidArgument(f"RDMA NIC {instance!r}: {why}") from None
    return cls(ext, None, name or instance or ext.info()["rails"][0]["device"], 0, mtu)


def _gid_index():
    text = os.environ.get("KVIO_IB_GID_INDEX", "").strip()
    try:
        return int(text) if text else -1
    except ValueError:
        raise InvalidArgument(f"KVIO_IB_GID_INDEX={text!r} is not a number") from None


def by_operator(classes: tuple) -> tuple:
    """The classes of a connection with what KVIO_IB_SL and KVIO_IB_TC say of them."""
    levels, bytes_ = _by_name("KVIO_IB_SL"), _by_name("KVIO_IB_TC")
    return tuple(dataclasses.replace(c, sl=levels.get(c.name, c.sl),
                                     tclass=bytes_.get(c.name, c.tclass)) for c in classes)


def _by_name(variable):
    """ "kv=5,collective=0", or "5" for KV, as a dict."""
    text, values = os.environ.get(variable, "").strip(), {}
    try:
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = part.rpartition("=")
            values[name.strip() or KV.name] = int(value, 0)
    except ValueError:
        raise InvalidArgument(f"{variable}={text!r} must be a number or a list like "
                              "\"kv=2,collective=0\"") from None
    return values


_GPU_OTHER = ("it is a GPU's: neither dma-buf (CUDA 11.7, the open kernel modules, and a NIC "
              "driver that takes dma-bufs) nor nvidia-peermem (modprobe nvidia-peermem) made it "
              "a region")
_GPU_CAUSES = {
    errno.EXDEV: "it is a GPU's and consists of several physical segments (cuMemMap; PyTorch's "
                 "expandable_segments): register from where a segment begins, all of one size, or "
                 "each by itself, or allocate it without expandable_segments",
    errno.ENOMEM: "it is a GPU's and cannot be mapped for the NIC: the GPU's BAR1 window may be "
                  "full (nvidia-smi -q -d MEMORY), or the device has no more regions",
}


def why_not_registered(name, region, code) -> str:
    """What a device's refusal of memory means."""
    cause = _GPU_CAUSES.get(code, _GPU_OTHER) if region.array is None else {
        errno.ENOMEM: "the memory cannot be pinned: raise the limit (ulimit -l unlimited; memlock "
                      "in /etc/security/limits.conf), or the device has no more regions",
        errno.EFAULT: "part of it is not mapped with that access (a read-only file?)",
        errno.EOPNOTSUPP: "the device cannot register this kind of memory",
        errno.EINVAL: "the device takes neither this length nor this access",
    }.get(code, "see dmesg for what the driver says")
    return f"{name}: cannot register {region.nbytes} bytes at {region.addr:#x}: {cause}"
