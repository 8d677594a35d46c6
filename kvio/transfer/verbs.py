"""Opening RDMA NICs: which HCA, which GID, and what is missing."""
from kvio._ext import nic as _nic
from kvio.errors import BackendUnavailable


def open_nic(cls, instance, name, mtu, queue_depth, max_sge, gid_index, pd, busy_poll):
    """`Nic.open("verbs:instance")`."""
    try:
        ext = _nic.Nic("verbs", device=instance, mtu=mtu, queue_depth=queue_depth,
                       max_sge=max_sge, gid_index=-1 if gid_index is None else gid_index, pd=pd,
                       flags=_nic.BUSY_POLL if busy_poll else 0)
    except OSError as failed:
        raise BackendUnavailable(failed.errno, failed.strerror) from None
    return cls(ext, None, name or instance, 0, mtu)
