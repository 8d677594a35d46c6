"""The tests of the lab, in its guest: the rules for every provider over verbs, and guest/.

    python tests/lab/suite.py [--short] [ARGUMENTS OF PYTEST]

--short: some of each kind, for `make test`; the guest computes a hundred times slower than this
machine.
"""
import os
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.dirname(HERE)
if __name__ == "__main__":
    sys.path.insert(0, TESTS)

import cbuild                                                               # noqa: E402
from lab import rxe                                                         # noqa: E402
from require import PARTS                                                   # noqa: E402

CONTRACT = ["tests/transfer/test_contract.py", "tests/transfer/test_contract_faults.py"]
ALL = [*CONTRACT, "tests/lab/guest"]
# One that is not there any more is an error of pytest.
SHORT = [
    f"{CONTRACT[0]}::{name}" for name in (
        "test_a_provider_is_here[verbs-verbs:rxe0]",
        "test_read_and_write_move_exactly_those_bytes",
        "test_one_post_is_one_doorbell_and_one_signalled_completion",
        "test_scatter_gather_on_the_local_side",
        "test_both_ends_can_post",
        "test_classes_are_set_on_both_ends_and_read_back",
        "test_a_batch_larger_than_the_queue_is_fed_with_further_doorbells")
] + [
    f"{CONTRACT[1]}::{name}" for name in (
        "test_a_bad_work_request_fails_alone_and_flushes_what_follows"
        "[verbs-unknown rkey-REM_ACCESS_ERR-13-1]",
        "test_await_many_at_once")
] + [
    f"tests/lab/guest/{name}" for name in (
        "test_capture.py::test_every_packet_carries_the_dscp_of_its_class[kv]",
        "test_capture.py::test_every_packet_carries_the_dscp_of_its_class[collective]",
        "test_interop.py::test_reads_and_writes_both_ways[C-kv]")
]
# The guest's Python starts slowly: no plugins, no figures, one thread for BLAS.
ENVIRONMENT = {"KVIO_REQUIRE": "rxe,verbs", "OPENBLAS_NUM_THREADS": "1",
               "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
# The whole measures too, and would measure this machine's other work: a processor of the guest that
# another process holds up for a scheduler's slice is 4 ms late.
QUICK, WHOLE = ["--timeout", "180"], ["--timeout", "1800", "--realtime"]


def main(arguments) -> int:
    short = arguments[:1] == ["--short"]
    with tempfile.TemporaryDirectory(prefix="kvio-lab.") as folder:
        return _run(arguments[short:], short, folder)


def _run(arguments, short, folder):
    environment = ENVIRONMENT | {"PYTHONPATH": os.path.dirname(TESTS)} | {
        name: os.environ[name] for name in ("KVIO_LAB_MBIT",) if name in os.environ}
    if PARTS["compiler"]() or PARTS["ibverbs-headers"]():
        print("lab: no C compiler or no libibverbs-dev: run .ci/lab-setup", file=sys.stderr)
        return rxe.DIED
    environment["KVIO_LAB_PLAIN_VERBS"] = cbuild.compile_c(
        os.path.join(folder, "plain_verbs"), [os.path.join(HERE, "plain_verbs.c")], "-Wshadow",
        "-libverbs")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "not cuda",
               "-o", "filterwarnings=ignore:NIC .* does not honour class",    # rxe has no sl
               *(SHORT if short else ALL), *arguments]
    options = [part for pair in environment.items() for part in ("--env", "=".join(pair))]
    return rxe.main(["--cwd", os.path.dirname(TESTS), *(QUICK if short else WHOLE), "--times",
                     *options, "--", *command])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
