"""Every error kvio raises on purpose. Each says what failed, where, and what to try.

All derive from `KvioError` and from the builtin that Python code would catch anyway, so
`except OSError` and `except ValueError` keep their meaning. Nothing is imported here: any layer
may raise these.
"""
import errno as _errno
import operator as _operator
import os as _os

__all__ = [
    "BackendUnavailable", "BlocksMissing", "Busy", "Closed", "EngineLost", "FormatError",
    "InvalidArgument", "KvioError", "LayoutMismatch", "MappingFailed", "ModelMissing",
    "OutOfBlocks", "PlotMissing", "ReadStalled", "RequestTooLong", "StoreError", "TransferError",
    "TransferTimeout", "checked_int", "errno_name",
]


def errno_name(code: int) -> str:
    """`-errno` or `errno` in words: `"EBADMSG (Bad message)"`; 0 is `"OK"`."""
    code = abs(int(code))
    if code == 0:
        return "OK"
    return f"{_errno.errorcode.get(code, code)} ({_os.strerror(code)})"


class KvioError(Exception):
    """Base of all errors of kvio."""


class InvalidArgument(KvioError, ValueError):
    """The caller passed something of a wrong shape, dtype, range or state. Nothing was changed."""


class RequestTooLong(InvalidArgument):
    """A request needs more HBM than any decode engine has: it could only wait for ever."""


class LayoutMismatch(KvioError, ValueError):
    """A store, pool or region was made for another `BlockLayout`."""


class Closed(KvioError, ValueError):
    """The store, ring, NIC, peer or pool was closed before this call."""


class OutOfBlocks(KvioError, MemoryError):
    """A pool has fewer free blocks than were asked for. Nothing was handed out."""


class ModelMissing(KvioError, ImportError):
    """The package that carries the language model's weights is not installed."""


class PlotMissing(KvioError, ImportError):
    """The package that draws is not installed; the message says its name."""


class _OsError(KvioError, OSError):
    """An error with an `errno`."""

    def __init__(self, code: int, message: str):
        super().__init__(abs(int(code)), message)

    def __str__(self) -> str:
        return f"{self.strerror} [{errno_name(self.errno)}]"


class Busy(_OsError):
    """EBUSY: something is still in flight (deregister, close). Wait for it or cancel it first."""

    def __init__(self, message: str):
        super().__init__(_errno.EBUSY, message)


class BackendUnavailable(_OsError):
    """A provider or a storage back end cannot run on this machine; the message says the remedy."""


class MappingFailed(_OsError):
    """The kernel, or a GPU's driver, has no such memory; the message says how much was asked
    for."""


class StoreError(_OsError):
    """The store's directory or one of its files cannot be used."""


class FormatError(StoreError):
    """A file of the store is not what docs/format.md says."""


class TransferError(_OsError):
    """A transfer has drained and at least one element failed; `transfer.status` tells which."""

    def __init__(self, code: int, message: str, status=None):
        super().__init__(code, message)
        self.status = status


class TransferTimeout(KvioError, TimeoutError):
    """`wait` gave up. The transfer goes on and keeps its memory; wait again or cancel it."""


class BlocksMissing(KvioError, LookupError):
    """Blocks that were matched could not be read (evicted, damaged): plan the request again with
    `num_usable_blocks` hits; the rest is recomputed."""

    def __init__(self, message: str, num_usable_blocks: int):
        super().__init__(message)
        self.num_usable_blocks = num_usable_blocks


class ReadStalled(KvioError, TimeoutError):
    """A storage NIC has read nothing for too long. The read keeps its memory until it has drained;
    `nic` is the name of the storage NIC: read through another one, or compute again."""

    def __init__(self, message: str, nic: str):
        super().__init__(message)
        self.nic = nic


class EngineLost(KvioError, RuntimeError):
    """An engine has died with a request on it. `engine` is its name. Requests are routed again by
    themselves; who sees this has no engine of that side left: start one, submit again."""

    def __init__(self, message: str, engine: str):
        super().__init__(message)
        self.engine = engine


def checked_int(name: str, value, least: int, most: int | None = None) -> int:
    """`value` as an int within [least, most]; InvalidArgument that names it otherwise.

    Takes what Python takes as an index (numpy's integers too), but no bool.
    """
    if type(value) is int and value >= least and (most is None or value <= most):
        return value                                # nearly always, and callers count microseconds
    try:
        number = _operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least or \
            (most is not None and number > most):
        span = f"at least {least}" if most is None else f"{least} to {most}"
        raise InvalidArgument(f"{name} must be an int, {span}, not {value!r}")
    return number
