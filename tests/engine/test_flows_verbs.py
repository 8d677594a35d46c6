"""Split, lent and pushed parts through the verbs provider: the tokens of soft NICs."""
import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.needs("compiler", "ibverbs-headers")
HERE = os.path.dirname(__file__)
RUN = """
import json, sys, tempfile
from flows import ATTENTION, POLICIES, config, run
with tempfile.TemporaryDirectory() as path:
    posted = []
    served = run("dualpath", path, config(
        policy=POLICIES[sys.argv[2]], nic=sys.argv[1], quota_s=2e-5, attention_time=ATTENTION),
        look=lambda cluster, _: posted.extend(
            sum(e.nic.stats()[key] for e in cluster.engines)
            for key in ("tx_bytes", "rx_bytes", "work_requests", "doorbells")))
print(json.dumps({"served": {name: [(r.generated, r.margins, r.num_hit_tokens) for r in rs]
                             for name, rs in served.items()}, "posted": posted}))
"""


def outcome(nic, policy, **environment):
    path = os.pathsep.join([os.path.dirname(os.path.dirname(HERE)), os.path.dirname(HERE), HERE])
    done = subprocess.run([sys.executable, "-c", RUN, nic, policy], text=True, timeout=120,
                          capture_output=True, env={**os.environ, "PYTHONPATH": path,
                                                    **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def library():
    sys.path.insert(0, os.path.join(HERE, "..", "transfer"))
    try:
        import ibverbs_standin
        return ibverbs_standin.build()
    finally:
        sys.path.pop(0)


@pytest.mark.parametrize("policy", ["split", "any", "push_any"])
def test_every_flow_is_the_same_over_verbs(library, policy):
    soft = outcome("soft", policy)
    verbs = outcome("verbs", policy, KVIO_IBVERBS_LIBRARY=library)
    assert verbs["served"] == soft["served"]
    assert all(count > 0 for count in verbs["posted"])
