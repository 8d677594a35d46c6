"""Where the parts of the store meet each other and what others leave in its directory."""
import errno
import os
import signal
import threading
import uuid

import pytest

from blocks import LAYOUT, chain, open_store, put, readable
from kvio.errors import StoreError


@pytest.fixture
def alarm():
    """What would block for ever fails instead."""
    def late(*_):
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("prefix, suffix", [("segment-", "-0"), ("touch-", "")])
def test_what_is_no_file_is_ignored(tmp_path, alarm, make, prefix, suffix):
    with open_store(tmp_path, poll_s=0) as store:
        put(store, chain(2))
        make(tmp_path / f"{prefix}{uuid.uuid4().hex}{suffix}")
        store.refresh()
        with open_store(tmp_path, poll_s=0) as other:
            assert readable(other, chain(2)).all()
            if suffix:
                assert list(other.stats()["segments_ignored"].values()) == ["not a regular file"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_description_that_is_no_file_is_refused(tmp_path, alarm, make):
    make(tmp_path / "kvio.json")
    with pytest.raises(StoreError, match="not a regular file"):
        open_store(tmp_path)
