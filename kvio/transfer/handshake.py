"""The handshake: who are you, what do we agree on. No I/O, no threads, no NIC.

    initiator                                   target
    HELLO    version, role, nonce           ->
                                            <-  HELLO
    PROOF    HMAC(secret, role, transcript) ->                  nothing worth anything until here
                                            <-  PROOF           from here on every frame has a tag
    OFFER    classes, MTU, rails, epoch     ->
                                            <-  OFFER, or REFUSE with the reason in words
    CONNECT  endpoints of the queue pairs   ->
                                            <-  ACCEPT, with its own
    REGION ..., READY                       ->
                                            <-  REGION ..., READY

`initiate` and `respond` are generators: they yield what is to be sent next (bytes, descriptors)
and are sent the frames that come in, (kind, body, descriptors). They raise TransferError, or
InvalidArgument where it is the arguments of both ends that do not fit. `link` does what needs a
NIC: see `links.Link`.
"""
import errno
import hashlib
import hmac
import os
import stat

from kvio.errors import InvalidArgument, TransferError
from kvio.transfer import frames
from kvio.transfer.classes import TrafficClass, class_list
from kvio.transfer.frames import INITIATOR, TARGET, broken

MAGIC, VERSION = "kvio", 1
MAX_SECRET = 65536
MAX_CLASSES, MAX_NAME, MAX_RAILS = 64, 200, 8
_ROLES = "initiator", "target"
_REASONS = {"version": errno.EPROTONOSUPPORT, "secret": errno.EACCES, "broken": errno.EPROTO,
            "closed": errno.ECONNREFUSED, "late": errno.ETIMEDOUT, "failed": errno.ECONNABORTED}


# ---- the secret

def load_secret(secret: bytes | str | None) -> bytes | None:
    """`secret`, or else what the file KVIO_SECRET_FILE holds; None: there is none."""
    if secret is None:
        path = os.environ.get("KVIO_SECRET_FILE")
        if not path:
            return None
        secret = _read_secret(path)
    elif isinstance(secret, str):
        try:
            secret = secret.encode(errors="surrogateescape")
        except UnicodeError:
            raise InvalidArgument("secret is a str that UTF-8 cannot say; give bytes") from None
    if not isinstance(secret, (bytes, bytearray)) or not 0 < len(secret) <= MAX_SECRET:
        raise InvalidArgument("secret must be bytes or str, not empty (16 random bytes are good) "
                              f"and of at most {MAX_SECRET} bytes")
    return bytes(secret)


def _read_secret(path):
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise InvalidArgument(f"KVIO_SECRET_FILE={path} is not a regular file")
            if info.st_mode & 0o077 or info.st_uid not in (os.geteuid(), 0):
                raise InvalidArgument(f"KVIO_SECRET_FILE={path} can be read by others or belongs "
                                      "to somebody else; chown it and chmod it to 600")
            secret = file.read(MAX_SECRET + 1).rstrip(b"\r\n")
    except OSError as failed:
        raise InvalidArgument(f"KVIO_SECRET_FILE={path} cannot be read: {failed.strerror}"
                              ) from None
    if not 0 < len(secret) <= MAX_SECRET:
        raise InvalidArgument(f"KVIO_SECRET_FILE={path} is empty or longer than {MAX_SECRET} bytes")
    return secret


def _keyed(secret, purpose, digest):
    return hmac.new(secret or b"", b"kvio %d %s\0" % (VERSION, purpose.encode()) + digest,
                    hashlib.sha256).digest()


# ---- refusals

def refusal(wrong: Exception) -> dict:
    """The body of REFUSE that tells the other end why."""
    if isinstance(wrong, InvalidArgument):
        code = "argument"
    else:
        code = {number: name for name, number in _REASONS.items()}.get(
            getattr(wrong, "errno", 0), "failed")
    return {"code": code, "reason": str(getattr(wrong, "strerror", wrong))[:1000]}


def refused(body: dict) -> Exception:
    """The typed error for a REFUSE that came in. Its text may be anybody's: kept short and
    printable. `told` marks it, lest it be sent back."""
    reason = body.get("reason")
    reason = "".join(c if c.isprintable() else "?" for c in str(reason)[:1000])
    if body.get("code") == "argument":
        wrong = InvalidArgument(f"the other end refuses: {reason}")
    else:
        number = _REASONS.get(str(body.get("code")), errno.ECONNREFUSED)
        wrong = TransferError(number, f"the other end refuses: {reason}")
    wrong.told = True
    return wrong


def expect(frame, kind, fds=False) -> dict:
    """The body of a frame that has to be of this kind; with descriptors only where `fds`."""
    got, body, came = frame
    if came and not (fds and got == kind):
        for fd in came:
            os.close(fd)
        came = []
        if got == kind:
            raise broken("descriptors came with a frame that has none")
    if got == frames.REFUSE:
        raise refused(body)
    if got != kind:
        raise broken(f"frame {got} came where {kind} was due")
    return body


# ---- who are you

def _hello(codec, secret):
    return {"magic": MAGIC, "version": VERSION, "role": _ROLES[codec.role],
            "nonce": os.urandom(32).hex(), "secret": secret is not None}


def _check_hello(codec, frame, ours):
    theirs = expect(frame, frames.HELLO)
    if theirs.get("magic") != MAGIC:
        raise broken("whoever is there does not speak kvio")
    if theirs.get("version") != VERSION:
        raise TransferError(errno.EPROTONOSUPPORT, f"versions differ: {str(theirs['version'])[:20]}"
                            f" and {VERSION}; install the same kvio on both ends"
                            if "version" in theirs else "no version was named")
    nonce = theirs.get("nonce")
    if theirs.get("role") != _ROLES[1 - codec.role] or not isinstance(nonce, str) or \
            len(nonce) != 64 or nonce == ours["nonce"]:
        raise broken("a role or nonce that cannot be the other end's")
    if theirs.get("secret") is not ours["secret"]:
        raise TransferError(errno.EACCES, "one end has a secret and the other has none; give both "
                            "the same secret= or KVIO_SECRET_FILE")


def _check_proof(frame, expected):
    proof = expect(frame, frames.PROOF).get("proof")
    if not isinstance(proof, str) or not hmac.compare_digest(proof.encode(),
                                                             expected.hex().encode()):
        raise TransferError(errno.EACCES, "the secrets of the two ends differ")


def _authenticate_initiator(codec, secret):
    ours = _hello(codec, secret)
    _check_hello(codec, (yield codec.encode(frames.HELLO, ours), ()), ours)
    mine = _keyed(secret, _ROLES[INITIATOR], codec.digest())
    proof = codec.encode(frames.PROOF, {"proof": mine.hex()})
    expected = _keyed(secret, _ROLES[TARGET], codec.digest())
    _check_proof((yield proof, ()), expected)
    codec.use(_keyed(secret, "session", codec.digest()))


def _authenticate_target(codec, secret):
    """Returns our proof, yet to be sent."""
    ours = _hello(codec, secret)
    _check_hello(codec, (yield None), ours)
    hello = codec.encode(frames.HELLO, ours)
    expected = _keyed(secret, _ROLES[INITIATOR], codec.digest())
    _check_proof((yield hello, ()), expected)
    mine = _keyed(secret, _ROLES[TARGET], codec.digest())
    proof = codec.encode(frames.PROOF, {"proof": mine.hex()})
    codec.use(_keyed(secret, "session", codec.digest()))
    return proof


# ---- what do we agree on

def _is_int(value, most):
    return type(value) is int and 0 <= value <= most


def classes_as_json(classes) -> list:
    return [[c.name, c.sl, c.tclass] for c in classes]


def classes_of(body: dict) -> tuple:
    """The checked class list of an OFFER."""
    raw = body.get("classes")
    if not isinstance(raw, list) or len(raw) > MAX_CLASSES:
        raise broken("the class list is malformed")
    try:
        classes = class_list(TrafficClass(*each) for each in raw)
    except (InvalidArgument, TypeError):
        raise broken("the class list is malformed") from None
    if not all(isinstance(c.name, str) and 0 < len(c.name) <= MAX_NAME for c in classes):
        raise broken("the class list is malformed")
    return classes


def _check_offer(body):
    name = body.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise broken("the name of the NIC is malformed")
    if not _is_int(body.get("mtu"), 1 << 20) or not body["mtu"] or \
            not _is_int(body.get("rails"), MAX_RAILS) or \
            not _is_int(body.get("epoch"), 2**64 - 1) or not isinstance(body.get("carrier"), dict):
        raise broken("MTU, rails, epoch or carrier of an offer are malformed")
    return body


def check_same(ours, theirs, whose: str) -> None:
    """Both ends need the same classes, in the same order."""
    if ours != theirs:
        raise InvalidArgument(f"{whose} has the traffic classes {_words(ours)}, and "
                              f"{_words(theirs)} were asked for: both ends need the same list")


def _words(classes):
    return "[" + ", ".join(f"{c.name} (sl {c.sl}, tclass {c.tclass})" for c in classes) + "]"


def endpoints_of(body: dict, names) -> dict:
    """The checked endpoints of CONNECT, ACCEPT or RESET: bytes by class."""
    raw = body.get("endpoints")
    try:
        made = {name: bytes.fromhex(text) for name, text in raw.items()}
    except (AttributeError, TypeError, ValueError):
        raise broken("malformed endpoints") from None
    if set(made) != set(names):
        raise broken("endpoints of other classes than were agreed on")
    return made


def as_hex(endpoints: dict) -> dict:
    return {"endpoints": {name: raw.hex() for name, raw in endpoints.items()}}


def _offer(link, classes):
    made, fds = link.offer()
    return made | {"classes": classes_as_json(classes), "fds": len(fds)}, fds


def initiate(codec, secret, link, classes):
    """The active end. Afterwards REGION and READY are due."""
    yield from _authenticate_initiator(codec, secret)
    offer, fds = _offer(link, classes)
    frame = yield codec.encode(frames.OFFER, offer), fds
    theirs = _agree(frame, classes, "the other end")
    link.attach(classes, theirs, frame[2])
    frame = yield codec.encode(frames.CONNECT, as_hex(link.endpoints())), ()
    link.connect(endpoints_of(expect(frame, frames.ACCEPT), [c.name for c in classes]))


def respond(codec, secret, link, classes):
    """The passive end; `classes`: None takes what the other end asks for. The last thing to be
    sent is its result."""
    proof = yield from _authenticate_target(codec, secret)
    frame = yield proof, ()
    theirs = _agree(frame, classes, "the listener")
    classes = classes_of(theirs)
    offer, fds = _offer(link, classes)
    link.attach(classes, theirs, frame[2])
    frame = yield codec.encode(frames.OFFER, offer), fds
    link.connect(endpoints_of(expect(frame, frames.CONNECT), [c.name for c in classes]))
    return codec.encode(frames.ACCEPT, as_hex(link.endpoints())), ()


def _agree(frame, classes, whose):
    """The checked offer of the other end; closes its descriptors if it is no good."""
    body = expect(frame, frames.OFFER, fds=True)
    try:
        theirs = _check_offer(body)
        asked = classes_of(theirs)
        if classes is not None:
            check_same(classes, asked, whose)
    except Exception:
        for fd in frame[2]:
            os.close(fd)
        raise
    return theirs


def readback_of(body: dict, names) -> dict:
    """What the other end's queue pairs are set to: (sl, tclass, mtu) by class."""
    raw = body.get("readback")
    if not isinstance(raw, dict) or set(raw) != set(names) or not all(
            isinstance(each, list) and len(each) == 3 and all(_is_int(n, 1 << 20) for n in each)
            for each in raw.values()):
        raise broken("malformed settings of queue pairs")
    return {name: tuple(each) for name, each in raw.items()}
