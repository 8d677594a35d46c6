"""Both back ends of the store for every test that takes `backend`, and a connector."""
import warnings

import pytest

from kvio._ext import ring as _ring
from kvio.errors import errno_name
from kvio.integrations.lmcache import KvioConnector
from require import need, skip_or_fail


@pytest.fixture(params=["uring", "threads"])
def backend(request):
    if request.param == "uring":
        need("uring")
        code = _ring.probe("uring")
        if code:
            skip_or_fail("uring", f"kvio was built without it, or {errno_name(code)}")
    return request.param


@pytest.fixture
def connector(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")              # no fall-back here
        with KvioConnector(tmp_path / "kv", backend="threads") as one:
            yield one
