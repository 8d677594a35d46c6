"""Peers in other processes and on other hosts."""


def is_remote(nic, address) -> bool:
    """Does this address lie outside of the fabric in this process?"""
    return nic.fabric is None or (isinstance(address, str) and ":" in address)


def listen(nic, address, classes, secret):
    """`Nic.listen` for such an address."""
    raise NotImplementedError


def connect(nic, address, classes, secret, timeout):
    """`Nic.connect` to such an address."""
    raise NotImplementedError
