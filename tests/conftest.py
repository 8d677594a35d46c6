"""What all tests share: required parts (see require.py), and single-threaded BLAS."""
import os
import sys

# With a busy second core, two BLAS threads stall each other. Before anyone imports numpy.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest                                                               # noqa: E402

from require import need, parts_required, parts_used, required, skip_or_fail    # noqa: E402, F401


@pytest.fixture(autouse=True)
def drained_transfers_are_let_go():
    """Transfers that a test dropped do not count as in flight in the next one."""
    yield
    if "kvio.completion" in sys.modules:
        sys.modules["kvio.completion"].reap()


def pytest_configure(config):
    parts_required()                    # a typing error in KVIO_REQUIRE stops here


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            need(name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A skip about a required part ("uring: ...") is a failure, whoever called pytest.skip."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        marks = {name for mark in item.iter_markers("needs") for name in mark.args}
        reason = str(call.excinfo.value).removeprefix("Skipped: ")
        for name in parts_required():
            if name in marks or reason.startswith(f"{name}:"):
                report.outcome = "failed"
                report.longrepr = f"skipped, but KVIO_REQUIRE names {name}: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """The same for a module that skips itself while it is being collected."""
    report = yield
    if report.outcome == "skipped":
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if any(reason.startswith(f"{name}:") for name in parts_required()):
            report.outcome, report.longrepr = "failed", reason
    return report


def pytest_sessionfinish(session, exitstatus):
    """A run of everything in which no test asked for a required part proves nothing about it."""
    whole = session.config.args == session.config.getini("testpaths")
    chosen = session.config.option.keyword or session.config.option.markexpr
    if whole and not chosen and not session.config.option.collectonly and exitstatus == 0:
        session.config.parts_unused = [name for name in parts_required() if not parts_used[name]]
        if session.config.parts_unused:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for name in getattr(config, "parts_unused", ()):
        terminalreporter.write_line(f"KVIO_REQUIRE names {name}, but no test needs it", red=True)
