"""The verbs provider on the stand-in for libibverbs: what it hands to a device, counted there."""
import ibverbs_standin as s
import numpy as np
import pytest

from kvio.errors import BackendUnavailable, InvalidArgument
from kvio.layout import READ, SGE_DTYPE, WR_DTYPE, WRITE, BlockLayout, LayerDescriptors, Side
from kvio.transfer import COLLECTIVE, KV, Nic
from nics import pattern, requests

POSTED = "post_calls", "work_requests", "signalled", "cqes"


@pytest.fixture(params=[1, 0], ids=["wr_start", "post_send"])
def wr_api(request, standin):
    """Both ways to post."""
    standin.set(wr_api=request.param)
    return request.param


# ---- doorbells

@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_layer_of_511_blocks_is_one_post_and_one_completion(standin, wr_api, connect, opcode):
    pair = connect(queue_depth=1024)
    assert pair.a.info()["rails"][0]["uses_wr_api"] == bool(wr_api)
    there = 1024 * np.random.default_rng(3).permutation(511)
    here = 1024 * np.arange(511)
    expected = pair.theirs[there[:, None] + np.arange(1024)] if opcode == READ else \
        pair.mine[:511 * 1024].copy().reshape(511, 1024)
    pair.peer.post(requests(opcode, pair.local, pair.remote, here, there, 1024)).wait()
    assert standin.counts(*POSTED) == (1, 511, 1, 1)
    assert standin.counts("wr_starts", "sges", "reads") == (wr_api, 511, 511 * (opcode == READ))
    moved = pair.mine[:511 * 1024].reshape(511, 1024) if opcode == READ else \
        pair.theirs[there[:, None] + np.arange(1024)]
    assert (moved == expected).all()
    stats = pair.a.stats()
    assert (stats["doorbells"], stats["work_requests"], stats["signalled_completions"]) == \
        (1, 511, 1)


@pytest.mark.parametrize("max_sge, max_sge_rd", [(16, 16), (16, 4), (30, 30), (3, 2)])
@pytest.mark.parametrize("opcode", [READ, WRITE])
def test_a_scattered_side_takes_as_few_work_requests_as_lists_allow(standin, connect, opcode,
                                                                  max_sge, max_sge_rd):
    """Loop-back: blocks of a pool to a contiguous workspace of the same host (push), and back."""
    standin.set(max_sge=max_sge, max_sge_rd=max_sge_rd)
    pair = connect(far=None, queue_depth=2048, max_sge=64, nbytes=2 << 20)
    takes = {WRITE: max_sge, READ: max_sge_rd}[opcode]
    info = pair.a.info()
    assert (info["max_sge"], info["max_sge_rd"]) == (max_sge, max_sge_rd)
    layout = BlockLayout(2, 4, 256)
    ids = np.random.default_rng(5).permutation(900)[:511].astype(np.int64)
    pool = Side(pair.local.addr, layout.full_block_nbytes, layout.layer_offsets[:2],
                pair.local.key)
    work = Side(pair.remote.addr, 1024, (0, 1 << 20), pair.remote.key)
    made = LayerDescriptors(opcode, layout, pool, ids, work, None, 511 * 4,
                            max_sge=info["max_sge"])
    for layer in 0, 1:
        move = {READ: pair.peer.read, WRITE: pair.peer.write}[opcode]
        move(made.layer(layer)).wait()
    assert standin.counts("post_calls", "signalled") == (2, 2)
    assert standin.count("sges") == 2 * 511
    assert standin.count("work_requests") == 2 * -(-511 // takes) if max_sge % takes == 0 else \
        standin.count("work_requests") >= 2 * -(-511 // takes)
    blocks = pair.mine[:900 * 2048].reshape(900, 2, 1024)
    for layer in 0, 1:
        at = layer << 20
        assert (blocks[ids, layer] == pair.theirs[at:at + 511 * 1024].reshape(511, 1024)).all()


@pytest.mark.parametrize("busy_poll", [False, True])
def test_waiting_sleeps_and_spins_only_if_asked_to(standin, connect, busy_poll):
    """Who spins never asks for an event, and who sleeps was woken by one."""
    pair = connect(busy_poll=busy_poll)
    standin.set(delay_ns=20_000_000)
    pair.peer.read(pair.read(0, 0, 5000)).wait()
    assert (pair.mine[:5000] == pair.theirs[:5000]).all()
    notifies, events = standin.counts("notifies", "events")
    assert (notifies, events) == (0, 0) if busy_poll else min(notifies, events) >= 1


def test_signalling_all_is_not_the_default(standin, connect):
    pair = connect(queue_depth=8)
    pair.peer.read(pair.read(0, 0, [64] * 20)).wait()
    assert standin.counts("post_calls", "work_requests", "signalled") == (5, 20, 5)
    assert standin.count("cqes") == 5


# ---- splitting

def test_work_requests_longer_than_a_message_are_split(standin, wr_api, connect):
    standin.set(max_msg_sz=4096)
    pair = connect()
    assert pair.a.info()["max_msg_nbytes"] == 4096
    pair.peer.read(pair.read([0, 30000], [1, 60001], [10000, 4096])).wait()
    assert standin.counts(*POSTED) == (1, 3 + 1, 1, 1)
    assert (pair.mine[:10000] == pair.theirs[1:10001]).all()
    assert (pair.mine[30000:34096] == pair.theirs[60001:64097]).all()


def test_a_region_is_registered_in_slices(standin, connect, monkeypatch):
    monkeypatch.setenv("KVIO_IB_SLICE_BYTES", "65536")
    pair = connect()
    assert standin.count("mrs") == 2 * 16
    pair.peer.write(pair.write(65536 - 100, 3 * 65536 - 40, 200)).wait()
    # 40 | 60 | 100: by remote slices and by local ones; without lists none is made for that.
    assert standin.counts("work_requests", "sges", "signalled") == (3, 3, 1)
    at = 65536 - 100
    assert (pair.theirs[3 * 65536 - 40:][:200] == pair.mine[at:at + 200]).all()
    pair.peer.write(pair.write(0, 0, 1 << 20)).wait()
    assert (pair.mine == pair.theirs).all()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_the_limits_the_bytes_are_the_same(standin, connect, monkeypatch, seed):
    rng = np.random.default_rng(seed)
    monkeypatch.setenv("KVIO_IB_SLICE_BYTES", str(int(rng.integers(4096, 50000))))
    standin.set(max_msg_sz=int(rng.integers(100, 9000)), max_sge=int(rng.integers(1, 6)),
                max_sge_rd=int(rng.integers(1, 4)), wr_api=seed % 2)
    pair = connect(near="standin0,standin1", far="standin2,standin1", queue_depth=64)
    most = pair.a.info()["max_sge"]
    for opcode in READ, WRITE, READ:
        wrs, sges, expected = scattered(rng, pair, opcode, most)
        pair.peer.post(wrs, sges).wait()
        assert (pair.mine == expected[0]).all() and (pair.theirs == expected[1]).all()
    assert pair.a.stats()["errors"] == 0


def scattered(rng, pair, opcode, max_sge, count=60, room=16384):
    """Work requests with lists of any lengths, each in a place of its own, and what they do."""
    wrs, entries = np.zeros(count, WR_DTYPE), []
    mine, theirs = pair.mine.copy(), pair.theirs.copy()
    wrs["opcode"], wrs["rkey"], wrs["lkey"] = opcode, pair.remote.key, pair.local.key
    for i in range(count):
        num = int(rng.integers(0, max_sge + 1))
        lengths = rng.integers(0, room // max(num, 1), max(num, 1))
        near, far = i * room, int(i * room + rng.integers(0, room - lengths.sum() + 1))
        wrs[i]["remote_addr"], wrs[i]["length"] = pair.remote.addr + far, lengths.sum()
        wrs[i]["local_addr"], wrs[i]["sge_first"] = pair.local.addr + near, len(entries)
        wrs[i]["num_sge"] = num
        for length in map(int, lengths):
            if num:
                entries.append((pair.local.addr + near, pair.local.key, length, 0))
            if opcode == READ:
                mine[near:near + length] = theirs[far:far + length]
            else:
                theirs[far:far + length] = mine[near:near + length]
            near, far = near + length, far + length
    return wrs, np.array(entries, SGE_DTYPE), (mine, theirs)


# ---- several rails

ALL = "standin0,standin1,standin2"


@pytest.mark.parametrize("near, far, rails", [
    ("standin0,standin1", "standin0,standin1", 2), (ALL, ALL, 3), (ALL, "standin2,standin0", 2),
    ("standin1", ALL, 1)])
def test_large_batches_are_striped(standin, wr_api, connect, near, far, rails):
    pair = connect(near=near, far=far, queue_depth=1024)
    assert len(pair.peer.query()["kv"]["rails"]) == rails
    at = 2048 * np.arange(511)
    pair.peer.read(pair.read(at, at, 2048)).wait()
    assert standin.counts(*POSTED) == (rails, 511, rails, rails)
    assert (pair.mine[:511 * 2048] == pair.theirs[:511 * 2048]).all()
    shares = [standin.count("work_requests", device) for device in range(s.NUM_DEVICES)]
    assert sorted(shares)[-rails:] == sorted(x for x in shares if x)
    assert max(shares) - min(x for x in shares if x) <= 3


def test_small_batches_are_not_striped_but_take_turns(standin, connect):
    pair = connect(near=ALL, far=ALL)
    for _ in range(6):
        pair.peer.read(pair.read(0, 0, [4096] * 4)).wait()
    assert standin.count("post_calls") == 6
    assert [standin.count("post_calls", device) for device in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_completions_are_put_back_into_posting_order(standin, connect, slow):
    pair = connect(near=ALL, far=ALL, queue_depth=1024)
    standin.set(slow, frozen=1)
    at = 2048 * np.arange(300)
    first = pair.peer.read(pair.read(at, at, 2048))
    while standin.count("cqes") < 2:        # the other two rails are done
        assert not first.done
    second = pair.peer.read(pair.read(at, at, 2048))
    assert not first.done and not second.done
    standin.set(slow, frozen=0)
    second.wait()
    assert first.done and not first.status.any()
    assert (pair.mine[:300 * 2048] == pair.theirs[:300 * 2048]).all()


# ---- devices, ports, GIDs

def test_the_routable_gid_is_chosen_and_reported(standin):
    with Nic.open("verbs:standin1", name="a") as nic:
        rail = nic.info()["rails"][0]
        assert (rail["device"], rail["port"], rail["gid_type"], rail["gid_index"]) == \
            ("standin1", 1, "RoCEv2", 3)
        assert rail["gid"] == bytes(10) + bytes([255, 255, 10, 0, 0, 2])
        assert (rail["link_layer"], rail["netdev"], rail["mtu"]) == ("Ethernet", "lo", 4096)
    with Nic.open("verbs:standin1", gid_index=1) as nic:
        assert nic.info()["rails"][0]["gid"][:2] == b"\xfe\x80"
    with pytest.raises(BackendUnavailable, match="GID of index 77"):
        Nic.open("verbs:standin1", gid_index=77)


def test_an_infiniband_port_is_addressed_by_its_lid(standin, connect):
    standin.set(link_layer=s.INFINIBAND)
    with pytest.warns(RuntimeWarning, match="does not honour class kv.* 2 and 0"):  # no GRH
        pair = connect(classes=[KV])
    rail = pair.a.info()["rails"][0]
    assert (rail["link_layer"], rail["lid"], rail["gid_type"]) == ("InfiniBand", 1, "IB")
    assert pair.peer.query()["kv"]["sl"] == KV.sl
    pair.peer.read(pair.read(0, 0, 5000)).wait()
    assert (pair.mine[:5000] == pair.theirs[:5000]).all()


@pytest.mark.parametrize("bytes_, mtu", [(4096, 4096), (1500, 1024), (256, 256)])
def test_the_path_mtu_is_what_was_asked_for_and_the_port_allows(standin, connect, bytes_, mtu):
    pair = connect(mtu=bytes_)
    assert pair.peer.query()["kv"]["mtu"] == mtu
    pair.peer.read(pair.read(0, 0, 5000)).wait()


def test_a_port_that_is_down_cannot_be_opened(standin):
    standin.set(0, port_state=s.PORT_DOWN)
    with pytest.raises(BackendUnavailable, match="standin0 port 1 is down.*link"):
        Nic.open("verbs:standin0")
    with Nic.open("verbs") as nic:                  # the first one with an active port
        assert nic.info()["rails"][0]["device"] == "standin1"


@pytest.mark.parametrize("device, wrong", [
    ("verbs:nothing0", "no RDMA device \"nothing0\".*standin0, standin1, standin2"),
    ("verbs:standin0:2", "no port 2"), ("verbs:standin0,standin9", "standin9")])
def test_devices_that_are_not_there(standin, device, wrong):
    with pytest.raises(BackendUnavailable, match=wrong):
        Nic.open(device)


@pytest.mark.parametrize("device", ["verbs:standin0:x", "verbs:standin0:0",
                                    "verbs:" + ",".join(["standin0"] * 9)])
def test_malformed_lists_of_devices(standin, device):
    with pytest.raises(InvalidArgument):
        Nic.open(device)


def test_a_domain_of_another_library(standin, connect):
    pair = connect()
    before = standin.objects()
    guest = Nic.open("verbs", name="guest", pd=pair.a.info()["pd"])
    assert (standin.count("pds"), standin.count("contexts")) == (before["pds"], before["contexts"])
    assert guest.info()["pd"] == pair.a.info()["pd"] and guest.info()["context"]
    memory = pattern(4096, 9)
    region = guest.register(memory)
    peer = guest.connect(pair.listener.address)
    peer.write(requests(WRITE, region, pair.remote, 0, 100, 4096)).wait()
    assert (pair.theirs[100:4196] == memory).all()
    with pytest.raises(InvalidArgument, match="belongs to standin0"):
        Nic.open("verbs:standin1", pd=pair.a.info()["pd"])
    guest.close()
    pair.peer.read(pair.read(0, 0, 64)).wait()      # the domain is its owner's still


# ---- limits of the device

def test_completion_queues_are_never_overrun(standin, connect):
    """The stand-in ends the process if one is. Failed work requests complete, signalled or not."""
    standin.set(max_cqe=300)
    pair = connect(queue_depth=128)
    peers = [pair.peer] + [pair.a.connect(pair.listener.address) for _ in range(5)]
    assert standin.count("cqs") > 2
    standin.set(frozen=1)
    transfers = [peer.read(pair.read(0, 0, [64] * 128), traffic_class)
                 for peer in peers for traffic_class in (KV, COLLECTIVE)]
    for peer in peers:
        for qp in peer._qps.values():
            qp.fail()
    for transfer in transfers:
        with pytest.raises(OSError, match="WR_FLUSH_ERR"):
            transfer.wait()
    assert standin.count("cqes") == 12 * 128


def test_the_queue_is_no_deeper_than_the_device_allows(standin, connect):
    standin.set(max_qp_wr=100)
    pair = connect(queue_depth=2048)
    assert pair.peer.query()["kv"]["depth"] == 100
    pair.peer.read(pair.read(0, 0, [64] * 1000)).wait()
    assert pair.a.stats()["errors"] == 0


def test_reads_in_flight_are_bounded_by_both_devices(standin, connect):
    standin.set(1, max_rd_atomic=2)
    pair = connect()
    pair.peer.read(pair.read(0, 0, [64] * 20)).wait()       # else REM_INV_REQ_ERR
    pair.back.read(requests(READ, pair.remote, pair.local, 0, 0, 64)).wait()


def test_a_thousand_registrations_leave_nothing(standin, connect):
    pair = connect(near=ALL)
    before = standin.count("mrs")
    for _ in range(1000):
        pair.a.deregister(pair.a.register(bytearray(4096)))
    assert standin.count("mrs") == before
