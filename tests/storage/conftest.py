"""Both back ends for every test that takes `backend`; uring needs a kernel that allows it."""
import pytest

from kvio._ext import ring as _ring
from kvio.errors import errno_name
from require import need, skip_or_fail


@pytest.fixture(params=["uring", "threads"])
def backend(request):
    if request.param == "uring":
        need("uring")
        code = _ring.probe("uring")
        if code:
            skip_or_fail("uring", f"kvio was built without it, or {errno_name(code)}")
    return request.param
