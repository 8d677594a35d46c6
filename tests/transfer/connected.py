"""NICs of the stand-in for libibverbs, connected through the whole handshake: fixtures and helpers
of test_remote*.py, which import them."""
import time

import nics
import pytest

from kvio.layout import READ
from kvio.transfer import Nic
from nics import requests

DEVICE = "verbs:standin0"


@pytest.fixture
def open_nic(standin, monkeypatch):
    monkeypatch.delenv("KVIO_SECRET_FILE", raising=False)
    opened = []

    def open_nic(**options):
        options.pop("bytes_per_s", None)
        opened.append(Nic.open(DEVICE, **options))
        return opened[-1]
    yield open_nic
    while opened:
        opened.pop().close(cancel=True)


@pytest.fixture
def pair(open_nic):
    """Connected by the address that the listener tells."""
    made = nics.Pair(open_nic, 65536, address=":0")
    yield made
    vars(made).clear()                  # pytest keeps it, and it the devices


def until(condition, seconds=10):
    """Something another thread does soon."""
    end = time.monotonic() + seconds * nics.PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def works(pair):
    peer = pair.a.connect(pair.listener.address)
    peer.read(requests(READ, pair.local, pair.remote, 0, 0, 4096)).wait()
    peer.close()
    return True
