"""Where peers of other processes are: "host:port", ":port", "[v6]:port", "eth0:port", "unix:PATH",
and plain names for NICs of this process that have no fabric."""
import errno
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import threading
import time

from kvio.errors import InvalidArgument, TransferError

SIOCGIFADDR = 0x8915
LOOPBACK = "127.0.0.1"
RESOLVE_S = 10.0                # how long a name may take where nobody has set a timeout


def parse(address) -> tuple[str, int | str]:
    """(host, port), or ("unix", path). InvalidArgument."""
    if not isinstance(address, str):
        raise InvalidArgument(f"an address is a str, not {address!r}")
    if address.startswith("unix:"):
        path = address[5:]
        if not path or "\0" in path or len(os.fsencode(path)) > 107:
            raise InvalidArgument(f"{address!r}: the path must have 1 to 107 bytes")
        return "unix", path
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InvalidArgument(f"{address!r}: put the IPv6 address into brackets, [::1]:7000")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InvalidArgument(f"{address!r}: an address is host:port, :port, [v6]:port, "
                              "interface:port or unix:PATH")
    return host or LOOPBACK, int(port)


def resolve(host: str, port: int, timeout: float | None = None) -> tuple:
    """(family, sockaddr) of a host or of one of our network interfaces. TransferError; ETIMEDOUT
    if whoever knows names has said nothing after `timeout` seconds (None: RESOLVE_S)."""
    name = host.removesuffix("%")
    if name in (each for _, each in socket.if_nameindex()):
        host = _address_of(name)
    try:
        found = _look_up(host, port, RESOLVE_S if timeout is None else timeout)
    except (OSError, UnicodeError) as failed:
        if isinstance(failed, TransferError):
            raise
        raise TransferError(errno.EHOSTUNREACH, f"no address is known for {host!r}: {failed}"
                            ) from None
    return found[0][0], found[0][4]


def _look_up(host, port, timeout):
    """getaddrinfo has no timeout of its own, and may wait for name servers for minutes. A thread
    that it holds up is left to itself."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass                                    # it is a name
    made = []

    def look():
        try:
            made.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as failed:
            made.append(failed)
    thread = threading.Thread(target=look, name=f"kvio resolves {host}", daemon=True)
    thread.start()
    thread.join(timeout)
    if not made:
        raise TransferError(errno.ETIMEDOUT, f"no address is known for {host!r}: no name server "
                            f"has answered within {timeout:.3g} s; see /etc/resolv.conf, or give "
                            "the address in numbers")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def _address_of(interface):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            raw = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(raw[20:24])
        except OSError:
            pass
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [row.split() for row in table]
    except OSError:
        rows = []
    for digits, _, _, scope, _, name in rows:
        if name == interface:
            text = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            return f"{text}%{name}" if scope == "20" else text
    raise TransferError(errno.EADDRNOTAVAIL, f"the network interface {interface} has no address")


def is_loopback(sockaddr) -> bool:
    address = ipaddress.ip_address(sockaddr[0].partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def spell(sock) -> str:
    """The address of a bound socket, as `parse` takes it."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _need_secret(address, sockaddr, secret):
    if secret is None and not is_loopback(sockaddr):
        raise InvalidArgument(f"{address!r} is {sockaddr[0]}, which other hosts can reach: give "
                              "secret= or KVIO_SECRET_FILE; without one only loopback is served")


def listen(address, secret) -> socket.socket:
    """A listening socket. InvalidArgument: in use already, or not allowed without a secret."""
    host, port = parse(address)
    if host == "unix":
        return _listen_unix(port)
    family, sockaddr = resolve(host, port)
    _need_secret(address, sockaddr, secret)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(sockaddr)
        sock.listen(128)
    except OSError as failed:
        sock.close()
        raise _cannot_listen(address, failed) from None
    return sock


def _cannot_listen(address, failed):
    if failed.errno == errno.EADDRINUSE:
        return InvalidArgument(f"somebody listens at {address!r} already")
    return TransferError(failed.errno, f"cannot listen at {address!r}")


def _listen_unix(path):
    """Mode 0600 before anybody can connect. What a listener that died has left is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError as failed:
            if failed.errno != errno.EADDRINUSE or not _is_abandoned(path):
                raise
            os.unlink(path)
            sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(128)
    except OSError as failed:
        sock.close()
        if failed.errno == errno.EADDRINUSE and not _is_socket(path):
            raise InvalidArgument(f"{path!r} is there already and no socket; listen at a path "
                                  "that is free") from None
        raise _cannot_listen(f"unix:{path}", failed) from None
    return sock


def _is_socket(path):
    return os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode)


def _is_abandoned(path):
    if not _is_socket(path):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def connect(address, secret, timeout) -> socket.socket:
    """A connected socket, within `timeout` seconds, names looked up. TransferError says why not."""
    deadline = time.monotonic() + timeout
    host, port = parse(address)
    if host == "unix":
        family, sockaddr = socket.AF_UNIX, port
    else:
        family, sockaddr = resolve(host, port, timeout)
        _need_secret(address, sockaddr, secret)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        sock.connect(sockaddr)
    except OSError as failed:
        sock.close()
        if host == "unix":
            raise _no_socket(port, failed) from None
        if failed.errno == errno.ECONNREFUSED:
            raise TransferError(failed.errno, f"nobody listens at {address!r}; call listen first"
                                ) from None
        raise TransferError(failed.errno or errno.ETIMEDOUT, f"cannot connect to {address!r}"
                            ) from None
    return sock


def _no_socket(path, failed):
    """Why nobody answers at a path."""
    if failed.errno in (errno.ENOENT, errno.ECONNREFUSED):
        if failed.errno == errno.ENOENT:
            why = "there is no such socket; call listen first, in a process that sees this path"
        elif _is_socket(path):
            why = "the listener that has made it is no more; listen there again"
        else:
            why = "it is no socket; connect to the path that is listened at"
        return TransferError(errno.ECONNREFUSED, f"nobody listens at \"unix:{path}\": {why}")
    if failed.errno in (errno.EACCES, errno.EPERM):
        return TransferError(failed.errno, f"this user may not open the socket {path!r}: it is "
                             f"{_owner_of(path)}, and both ends must be the same user, who may "
                             "enter its directory")
    return TransferError(failed.errno or errno.ETIMEDOUT, f"cannot connect to \"unix:{path}\"")


def _owner_of(path):
    try:
        return f"that of user {os.lstat(path).st_uid} and we are {os.geteuid()}"
    except OSError:
        return f"in a directory that user {os.geteuid()} may not enter"


class Names:
    """Plain names of listeners of this process."""

    def __init__(self):
        self._lock, self._known = threading.Lock(), {}

    def put(self, name: str, address: str) -> None:
        with self._lock:
            if name in self._known:
                raise InvalidArgument(f"somebody listens at {name!r} already")
            self._known[name] = address

    def drop(self, name: str) -> None:
        with self._lock:
            self._known.pop(name, None)

    def look(self, name: str) -> str | None:
        with self._lock:
            return self._known.get(name)


NAMES = Names()
os.register_at_fork(after_in_child=NAMES.__init__)
