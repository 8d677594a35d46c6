"""Tests on real packets. They run inside the lab (`make lab`); elsewhere they are not collected."""
import os
import uuid

import pytest

from kvio.transfer import Nic
from nics import Pair
from require import need

if not os.environ.get("KVIO_LAB"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def inside():
    need("rxe")


@pytest.fixture
def nics():
    """(a, b): on rxe0 and on rxe1, the two ends of the cable."""
    with Nic.open("verbs:rxe0", name="a") as a, Nic.open("verbs:rxe1", name="b") as b:
        yield a, b


@pytest.fixture
def pair(nics):
    """They are connected, with a megabyte each."""
    a, b = nics
    return Pair(lambda name, **_: {"a": a, "b": b}[name], address=uuid.uuid4().hex)
