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
from kvio.transfer.bodies import MAGIC, MAX_REASON, ROLES, VERSION
from kvio.transfer.frames import INITIATOR, TARGET, broken

MAX_SECRET = 65536
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
    return {"code": code, "reason": str(getattr(wrong, "strerror", wrong))[:MAX_REASON]}


def refused(body: dict) -> Exception:
    """The typed error for a REFUSE that came in. `told` marks it, lest it be sent back."""
    reason = f"the other end refuses: {body['reason']}"
    if body["code"] == "argument":
        wrong = InvalidArgument(reason)
    else:
        wrong = TransferError(_REASONS.get(body["code"], errno.ECONNREFUSED), reason)
    wrong.told = True
    return wrong


def expect(frame, kind, fds=False) -> dict:
    """The body of a frame that has to be of this kind; with descriptors only where `fds`."""
    got, body, came = frame
    if came and not (fds and got == kind):
        _close(came)
        if got == kind:
            raise broken("descriptors came with a frame that has none")
    if got == frames.REFUSE:
        raise refused(body)
    if got != kind:
        raise broken(f"frame {got} came where {kind} was due")
    return body


def _close(fds):
    for fd in fds:
        os.close(fd)


# ---- who are you

def _hello(codec, secret):
    return {"magic": MAGIC, "version": VERSION, "role": ROLES[codec.role],
            "nonce": os.urandom(32).hex(), "secret": secret is not None}


def _check_hello(codec, frame, ours):
    theirs = expect(frame, frames.HELLO)
    if theirs["role"] != ROLES[1 - codec.role] or theirs["nonce"].hex() == ours["nonce"]:
        raise broken("a role or nonce that cannot be the other end's")
    if theirs["secret"] is not ours["secret"]:
        raise TransferError(errno.EACCES, "one end has a secret and the other has none; give both "
                            "the same secret= or KVIO_SECRET_FILE")


def _check_proof(frame, expected):
    if not hmac.compare_digest(expect(frame, frames.PROOF)["proof"], expected):
        raise TransferError(errno.EACCES, "the secrets of the two ends differ")


def _authenticate_initiator(codec, secret):
    ours = _hello(codec, secret)
    _check_hello(codec, (yield codec.encode(frames.HELLO, ours), ()), ours)
    mine = _keyed(secret, ROLES[INITIATOR], codec.digest())
    proof = codec.encode(frames.PROOF, {"proof": mine.hex()})
    expected = _keyed(secret, ROLES[TARGET], codec.digest())
    _check_proof((yield proof, ()), expected)
    codec.use(_keyed(secret, "session", codec.digest()))


def _authenticate_target(codec, secret):
    """Returns our proof, yet to be sent."""
    ours = _hello(codec, secret)
    _check_hello(codec, (yield None), ours)
    hello = codec.encode(frames.HELLO, ours)
    expected = _keyed(secret, ROLES[INITIATOR], codec.digest())
    _check_proof((yield hello, ()), expected)
    mine = _keyed(secret, ROLES[TARGET], codec.digest())
    proof = codec.encode(frames.PROOF, {"proof": mine.hex()})
    codec.use(_keyed(secret, "session", codec.digest()))
    return proof


# ---- what do we agree on

def classes_as_json(classes) -> list:
    return [[c.name, c.sl, c.tclass] for c in classes]


def check_same(ours, theirs, whose: str) -> None:
    """Both ends need the same classes, in the same order."""
    if ours != theirs:
        raise InvalidArgument(f"{whose} has the traffic classes {_words(ours)}, and "
                              f"{_words(theirs)} were asked for: both ends need the same list")


def _words(classes):
    return "[" + ", ".join(f"{c.name} (sl {c.sl}, tclass {c.tclass})" for c in classes) + "]"


def endpoints_of(body: dict, names) -> dict:
    """The endpoints of CONNECT, ACCEPT or RESET: bytes by class, for these and no others."""
    return _of_classes(body["endpoints"], names)


def _of_classes(found, names):
    if found.keys() != set(names):
        raise broken("endpoints or settings of other classes than were agreed on")
    return found


def as_hex(endpoints: dict) -> dict:
    return {name: raw.hex() for name, raw in endpoints.items()}


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
    frame = yield codec.encode(frames.CONNECT, {"endpoints": as_hex(link.endpoints())}), ()
    link.connect(endpoints_of(expect(frame, frames.ACCEPT), [c.name for c in classes]))


def respond(codec, secret, link, classes):
    """The passive end; `classes`: None takes what the other end asks for. The last thing to be
    sent is its result."""
    proof = yield from _authenticate_target(codec, secret)
    frame = yield proof, ()
    theirs = _agree(frame, classes, "the listener")
    classes = theirs["classes"]
    try:
        offer, fds = _offer(link, classes)
    except BaseException:
        _close(frame[2])
        raise
    link.attach(classes, theirs, frame[2])
    frame = yield codec.encode(frames.OFFER, offer), fds
    link.connect(endpoints_of(expect(frame, frames.CONNECT), [c.name for c in classes]))
    return codec.encode(frames.ACCEPT, {"endpoints": as_hex(link.endpoints())}), ()


def _agree(frame, classes, whose):
    """The offer of the other end; closes its descriptors if it is no good."""
    theirs = expect(frame, frames.OFFER, fds=True)
    try:
        if classes is not None:
            check_same(classes, theirs["classes"], whose)
    except InvalidArgument:
        _close(frame[2])
        raise
    return theirs


def readback_of(body: dict, names) -> dict:
    """What the other end's queue pairs are set to: (sl, tclass, mtu) by class."""
    return _of_classes(body["readback"], names)
