"""What a frame may say: the fields of each kind, their types and ranges.

Whatever comes from a peer goes through `checked` before anything else looks at it, so nobody
behind it asks for types again. What fits together (names of classes, an answer and its question)
is for those who know the other half.
"""
import errno
import re

from kvio._ext import nic as _nic
from kvio.errors import TransferError
from kvio.transfer.classes import MAX_CLASSES, MAX_NAME, TrafficClass, class_list

(HELLO, PROOF, REFUSE, OFFER, CONNECT, ACCEPT, READY,
 REGION, GONE, ACK, RESET, ANSWER, BYE) = range(1, 14)
KINDS = ("", "HELLO", "PROOF", "REFUSE", "OFFER", "CONNECT", "ACCEPT", "READY",
         "REGION", "GONE", "ACK", "RESET", "ANSWER", "BYE")

MAGIC, VERSION = "kvio", 1
ROLES = "initiator", "target"
MAX_FDS = 32                        # received and not claimed by a frame yet
MAX_REASON = 1000
AD_PART_NBYTES = 256 << 10          # of a region's description, in one frame
MAX_MTU, MAX_RATE = 1 << 20, 1 << 50


def broken(why: str) -> TransferError:
    """What the other end sent is no frame, or none that belongs here."""
    return TransferError(errno.EPROTO, f"the control connection is broken: {why}")


def checked(kind: int, body: dict) -> dict:
    """The fields of a frame of this kind, in the types that kvio uses: hex digits are bytes by now.
    Others are dropped, optional ones that are missing stay so. TransferError: EPROTO, or
    EPROTONOSUPPORT for another version's HELLO."""
    fields = _FIELDS.get(kind)
    if fields is None:
        raise broken(f"there is no frame {kind}")
    found = {}
    for name, check in fields.items():
        if name in body or not isinstance(check, _Maybe):
            try:
                found[name] = check(body.get(name))
            except ValueError:                  # InvalidArgument of class_list is one as well
                raise broken(f"{KINDS[kind]} with a malformed {name}") from None
    if kind in (RESET, ANSWER) and len(found) != 2:
        raise broken(f"{KINDS[kind]} says {len(found) - 1} things at once, not one")
    return found


# ---- types: each returns the value, or raises ValueError

class _Maybe:
    """A field that may be missing."""

    def __init__(self, check):
        self.check = check

    def __call__(self, value):
        return self.check(value)


def _need(is_so):
    if not is_so:
        raise ValueError


def _int(least, most):
    def check(value):
        _need(type(value) is int and least <= value <= most)
        return value
    return check


def _one_of(*choices):
    def check(value):
        _need(any(type(value) is type(each) and value == each for each in choices))
        return value
    return check


def _text(value):
    _need(isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable())
    return value


def _hex(least, most, unit=1):
    """Bytes: so many, a multiple of unit."""
    def check(value):
        _need(isinstance(value, str) and 2 * least <= len(value) <= 2 * most
              and len(value) % (2 * unit) == 0 and re.fullmatch("[0-9a-f]*", value, re.ASCII))
        return bytes.fromhex(value)
    return check


def _said(most):
    """Anything, as text that can be printed: what it says is for people."""
    def check(value):
        text = value if isinstance(value, str) else ""
        return "".join(c if c.isprintable() else "?" for c in text[:most])
    return check


def _names(value):
    _need(isinstance(value, list) and len(value) <= MAX_CLASSES)
    return tuple(_text(each) for each in value)


def _by_class(check):
    def check_all(value):
        _need(isinstance(value, dict) and 0 < len(value) <= MAX_CLASSES)
        return {_text(name): check(each) for name, each in value.items()}
    return check_all


def _classes(value):
    _need(isinstance(value, list) and len(value) <= MAX_CLASSES)
    return class_list(TrafficClass(*_row(each, _text, _int(0, 15), _int(0, 255)))
                      for each in value)


def _row(value, *checks):
    _need(isinstance(value, list) and len(value) == len(checks))
    return tuple(check(each) for check, each in zip(checks, value))


def _setting(value):
    """What a queue pair is set to: sl, tclass, MTU."""
    return _row(value, _int(0, 15), _int(0, 255), _int(0, MAX_MTU))


def _carrier(value):
    """What SharedCarrier offers; nothing for others."""
    _need(isinstance(value, dict))
    return {"bytes_per_s": _int(0, MAX_RATE)(value["bytes_per_s"])} \
        if "bytes_per_s" in value else {}


def _magic(value):
    if value != MAGIC or not isinstance(value, str):
        raise broken("whoever is there does not speak kvio")
    return value


def _version(value):
    """Before the other fields, which may be anything in another version."""
    if type(value) is not int or value != VERSION:
        named = "no version was named" if value is None else \
            f"versions differ: {_said(20)(str(value)[:20])} and {VERSION}; install the same " \
            "kvio on both ends"
        raise TransferError(errno.EPROTONOSUPPORT, named)
    return value


_KEY, _ID, _YES = _int(1, 2**64 - 1), _int(1, 2**63), _one_of(True)
_ENDPOINTS = _by_class(_hex(_nic.ENDPOINT_NBYTES, _nic.MAX_RAILS * _nic.ENDPOINT_NBYTES,
                            _nic.ENDPOINT_NBYTES))
_FIELDS = {
    HELLO: {"magic": _magic, "version": _version, "role": _one_of(*ROLES), "nonce": _hex(32, 32),
            "secret": _one_of(False, True)},
    PROOF: {"proof": _hex(32, 32)},
    REFUSE: {"code": _said(20), "reason": _said(MAX_REASON)},
    OFFER: {"name": _text, "mtu": _int(1, MAX_MTU), "rails": _int(0, _nic.MAX_RAILS),
            "epoch": _int(0, 2**64 - 1), "classes": _classes, "carrier": _carrier,
            "fds": _int(0, MAX_FDS)},
    CONNECT: {"endpoints": _ENDPOINTS},
    ACCEPT: {"endpoints": _ENDPOINTS},
    READY: {"readback": _by_class(_setting)},
    REGION: {"ad": _hex(1, AD_PART_NBYTES), "more": _Maybe(_YES), "fds": _int(0, 1)},
    GONE: {"key": _KEY},
    ACK: {"of": _one_of(REGION, GONE), "key": _KEY},
    RESET: {"id": _ID, "look": _Maybe(_names), "join": _Maybe(_ENDPOINTS)},
    ANSWER: {"id": _ID, "failed": _Maybe(_names), "endpoints": _Maybe(_ENDPOINTS),
             "busy": _Maybe(_YES), "collision": _Maybe(_YES), "closed": _Maybe(_YES)},
    BYE: {},
}
