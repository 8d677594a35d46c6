"""Opening an RDMA NIC: what is missing is said in words, and the environment has its say."""
import errno
import os
import subprocess
import sys

import ibverbs_standin
import numpy as np
import pytest

from kvio.errors import BackendUnavailable, InvalidArgument, TransferError
from kvio.transfer import COLLECTIVE, KV, Nic, TrafficClass, verbs

ANYWHERE = 'Nic.open("soft") works anywhere'
OPEN = """
from kvio.transfer import Nic
try:
    Nic.open("verbs")
except OSError as failed:
    print(failed.errno, failed)
"""


# ---- libraries: a process keeps the one that it has opened, so these have processes of their own

@pytest.mark.parametrize("library, words", [
    ("nowhere/libibverbs.so.1", "cannot be opened (nowhere/libibverbs.so.1"),
    (__file__, "invalid ELF header"),
    ("libc.so.6", "too old: it has no ibv_get_device_list"),
])
def test_a_library_that_will_not_do(library, words):
    ran = subprocess.run([sys.executable, "-c", OPEN], text=True, capture_output=True, timeout=60,
                         env={**os.environ, "KVIO_IBVERBS_LIBRARY": library})
    assert ran.stdout.startswith(str(errno.ENOSYS)), ran.stderr
    assert words in ran.stdout and ANYWHERE in ran.stdout


def test_importing_needs_no_library():
    ran = subprocess.run([sys.executable, "-c", "import kvio.transfer, kvio._ext.nic as n\n"
                          "print('ibverbs' in open('/proc/self/maps').read())"], text=True,
                         capture_output=True, timeout=60)
    assert ran.stdout == "False\n", ran.stderr


# ---- devices

def opening(device, *words, error=BackendUnavailable, **options):
    with pytest.raises(error) as failure:
        Nic.open(device, **options)
    for word in (*words, ANYWHERE):
        assert word in str(failure.value)
    return failure.value


def test_names(standin):
    there = "standin0, standin1, standin2"
    assert opening("verbs:mlx5_0", '"mlx5_0"', there).errno == errno.ENODEV
    opening("verbs:standin", '"standin"', there)
    opening("verbs:standin0,,standin1", '""', there)
    assert opening("verbs:standin1:2", "standin1 has no port 2: it has 1").errno == errno.ENODEV
    for name in "standin0:0", "standin0:", "standin0:x", "standin0:1x", "standin0:1000":
        opening(f"verbs:{name}", f'"{name}" is not HCA or HCA:port', error=InvalidArgument)
    opening("verbs:" + ",".join(["standin0"] * 9), "more than 8", error=InvalidArgument)
    assert standin.count("contexts") == 0
    with Nic.open("verbs:standin0:1,standin2", name="two") as nic:
        assert [rail["device"] for rail in nic.info()["rails"]] == ["standin0", "standin2"]


def test_ports_that_are_down(standin):
    standin.set(0, port_state=ibverbs_standin.PORT_DOWN)
    failed = opening("verbs:standin0", "standin0 port 1 is down", "bring the link")
    assert failed.errno == errno.ENETDOWN
    with Nic.open("verbs") as nic:          # the first active one
        assert nic.info()["rails"][0]["device"] == nic.name == "standin1"
    standin.set(-1, port_state=ibverbs_standin.PORT_DOWN)
    opening("verbs", "standin2 port 1 is down")


def test_devices_that_refuse(standin):
    standin.refuse("open_device", errno.EACCES)
    failed = opening("verbs:standin0", "standin0 cannot be opened", "/dev/infiniband")
    assert failed.errno == errno.EACCES
    standin.refuse("alloc_pd", errno.ENOMEM)
    assert opening("verbs:standin0", "no protection domain").errno == errno.ENOMEM


def test_arguments(standin):
    opening("verbs:standin0", "mtu 255", error=InvalidArgument, mtu=255)
    for wrong in dict(queue_depth=0), dict(max_sge=65), dict(mtu="x"), dict(mtu=-1):
        with pytest.raises(InvalidArgument):
            Nic.open("verbs:standin0", **wrong)
    opening("verbs:standin0", "no GID of index 77", gid_index=77)
    standin.set(0, max_sge=4, max_sge_rd=3, max_qp_wr=100)
    with Nic.open("verbs:standin0", max_sge=16) as nic:
        assert (nic.info()["max_sge"], nic.info()["max_sge_rd"]) == (4, 3)


def test_the_gid_is_the_routable_one_unless_another_is_asked_for(standin, monkeypatch):
    with Nic.open("verbs:standin0") as nic:
        rail = nic.info()["rails"][0]
        assert rail["gid_type"] == "RoCEv2" and rail["gid"][10:12] == b"\xff\xff"
        chosen = rail["gid_index"]
    other = 1 - chosen if chosen < 2 else 0
    with Nic.open("verbs:standin0", gid_index=other) as nic:
        assert nic.info()["rails"][0]["gid_index"] == other
    monkeypatch.setenv("KVIO_IB_GID_INDEX", str(other))
    with Nic.open("verbs:standin0") as nic:
        assert nic.info()["rails"][0]["gid_index"] == other
    monkeypatch.setenv("KVIO_IB_GID_INDEX", "one")
    with pytest.raises(InvalidArgument, match="KVIO_IB_GID_INDEX='one'"):
        Nic.open("verbs:standin0")


def test_another_librarys_protection_domain(standin):
    with Nic.open("verbs:standin1") as owner:
        pd, context = owner.info()["pd"], owner.info()["context"]
        before = standin.counts("pds", "contexts")
        with Nic.open("verbs", pd=pd) as nic:
            assert (nic.info()["pd"], nic.info()["context"]) == (pd, context)
            nic.deregister(nic.register(np.zeros(4096, np.uint8)))
        opening("verbs:standin0", "belongs to standin1", error=InvalidArgument, pd=pd)
        assert standin.counts("pds", "contexts") == before


def test_a_closed_nic_has_given_its_device_back(standin):
    """Not only when it is collected: who lent a domain may close the device right after us."""
    nothing = standin.objects()
    owner = Nic.open("verbs:standin1")
    own = standin.objects()
    nic = Nic.open("verbs", pd=owner.info()["pd"])
    assert standin.objects() != own
    nic.close()
    assert standin.objects() == own
    owner.close()
    assert standin.objects() == nothing
    del nic, owner                              # they lived until here


def test_memory_that_is_refused_says_why(standin):
    with Nic.open("verbs:standin0", name="nic") as nic:
        for code, words in (errno.ENOMEM, "ulimit -l"), (errno.EFAULT, "not mapped"):
            standin.refuse("reg_mr", code)
            with pytest.raises(TransferError, match=f"nic: cannot register 64 bytes.*{words}") \
                    as failure:
                nic.register(bytearray(64))
            assert failure.value.errno == code
        nic.register(bytearray(64))
    assert standin.count("mrs") == 0


# ---- the environment

def test_which_device(standin, monkeypatch):
    monkeypatch.setenv("KVIO_IB_HCA", "standin2")
    with Nic.open("verbs") as nic:
        assert nic.name == "standin2"
    with Nic.open("verbs:standin1") as nic:     # the code names one
        assert nic.name == "standin1"
    monkeypatch.setenv("KVIO_IB_HCA", "elsewhere")
    opening("verbs", '"elsewhere"')


def test_the_operator_has_the_last_word_on_classes(monkeypatch):
    bulk = TrafficClass("bulk", 1, 8)
    classes = COLLECTIVE, KV, bulk
    assert verbs.by_operator(classes) == classes
    monkeypatch.setenv("KVIO_IB_SL", "5")
    monkeypatch.setenv("KVIO_IB_TC", " bulk = 0x10 , collective=104")
    assert verbs.by_operator(classes) == (
        TrafficClass("collective", 0, 104), TrafficClass("kv", 5, 32),
        TrafficClass("bulk", 1, 16))
    for wrong in "x", "kv=", "kv=16", "kv=5,collective":
        monkeypatch.setenv("KVIO_IB_SL", wrong)
        with pytest.raises(InvalidArgument):
            verbs.by_operator(classes)
