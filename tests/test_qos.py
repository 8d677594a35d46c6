"""`kvio qos`: golden set-ups, what cannot be honoured, and that `tc` understands its commands."""
import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

from kvio import qos
from kvio.errors import InvalidArgument
from kvio.layout import READ
from kvio.qos import Share
from kvio.transfer import COLLECTIVE, KV, Fabric, Nic, TrafficClass
from kvio.transfer.arbitration import Arbitration
from nics import requests


def lines(setup):
    return [text for text, _ in setup.lines]


def share(name, sl, tclass, part=50):
    return Share(TrafficClass(name, sl, tclass), part)


def kvio(*arguments):
    return subprocess.run([sys.executable, "-m", "kvio", "qos", *arguments], capture_output=True,
                          text=True, timeout=60)


# ---- golden

def test_opensm_of_the_two_classes_is_the_paper_s():
    setup = qos.opensm()
    assert lines(setup) == [
        "qos TRUE", "qos_max_vls 4", "qos_high_limit 240",
        "qos_vlarb_high 0:192,1:192,2:0,3:192", "qos_vlarb_low 0:192,1:192,2:64,3:192",
        "qos_sl2vl 0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3"]
    assert setup.warnings == () and "sl alone" in setup.note
    # (1 / 241) * 64 / 256: what the low table's one packet in 983,040 bytes leaves to KV
    assert "collective 99.9 %; kv 0.104 %" in setup.text()


def test_mlnx_of_the_two_classes():
    setup = qos.mlnx("eth0")
    assert lines(setup) == [
        "mlnx_qos -i eth0 --trust dscp",
        "mlnx_qos -i eth0 --dscp2prio set,46,5", "mlnx_qos -i eth0 --dscp2prio set,8,1",
        "mlnx_qos -i eth0 --prio_tc 0,2,0,0,0,1,0,0",
        "mlnx_qos -i eth0 --tsa ets,ets,ets,ets,ets,ets,ets,ets --tcbw 1,98,1,0,0,0,0,0",
        "mlnx_qos -i eth0 --pfc 0,1,0,0,0,1,0,0"]
    assert setup.warnings == ()


def test_tc_of_the_two_classes():
    setup = qos.tc("w0", rate="24mbit")
    add = "tc filter add dev w0 parent 10: protocol"
    assert lines(setup) == [
        "tc qdisc replace dev w0 root handle 1: tbf rate 24mbit burst 10k limit 4m",
        "tc qdisc replace dev w0 parent 1:1 handle 10: prio bands 3 priomap "
        "2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2",
        f"{add} ip prio 1 u32 match ip dsfield 0xb8 0xfc flowid 10:1",
        f"{add} ipv6 prio 2 u32 match u16 0x0b80 0x0fc0 at 0 flowid 10:1",
        f"{add} ip prio 3 u32 match ip dsfield 0x20 0xfc flowid 10:2",
        f"{add} ipv6 prio 4 u32 match u16 0x0200 0x0fc0 at 0 flowid 10:2"]
    assert setup.warnings == ()


def test_without_a_rate_the_scheduler_is_the_root_and_ets_weighs():
    first = lines(qos.tc("w0", scheduler="ets"))[0]
    assert first == ("tc qdisc replace dev w0 root handle 10: ets bands 3 quanta 445500 4500 4500 "
                     "priomap 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2")


def test_a_faster_link_has_a_larger_bucket():
    assert "rate 100gbit burst 24414k limit 1192m" in lines(qos.tc("w0", rate="100gbit"))[0]


# ---- other lists

def test_foreground_weights_follow_the_shares_and_background_yields():
    setup = qos.opensm([share("a", 0, 0, 60), share("b", 1, 0, 37), share("c", 2, 0, 1),
                        share("d", 3, 0, 2)])
    assert lines(setup)[3:5] == ["qos_vlarb_high 0:192,1:128,2:0,3:0",
                                 "qos_vlarb_low 0:192,1:128,2:64,3:128"]
    assert setup.warnings == ()


def test_equal_shares_have_no_background():
    assert lines(qos.opensm([share("a", 0, 0), share("b", 1, 0)]))[3:5] == [
        "qos_vlarb_high 0:192,1:192,2:192,3:192", "qos_vlarb_low 0:192,1:192,2:192,3:192"]


def test_floors_are_what_an_arbiter_gives():
    """Against a count of bytes in one round of the tables: high until the limit, one low packet."""
    high, low = {0: 192, 1: 128, 2: 0}, {0: 192, 1: 128, 2: 64}
    floors = qos._floors(high, low, {0, 1, 2})
    assert sum(floors.values()) == pytest.approx(100)
    rounds = 384 * 5
    sent_high, sent_low = rounds * 240 * 4096, rounds * 4096
    assert floors[2] == pytest.approx(100 * sent_low * 64 / 384 / (sent_high + sent_low))
    assert floors[0] == pytest.approx(
        100 * (sent_high * 192 / 320 + sent_low * 192 / 384) / (sent_high + sent_low))


def test_soft_nics_take_the_same_tables():
    assert qos.arbitration() == Arbitration()
    shares = [share("a", 0, 0, 60), share("b", 1, 0, 37), share("c", 2, 0, 2), share("d", 9, 0)]
    rules, printed = qos.arbitration(shares), dict(
        text.split(" ") for text in lines(qos.opensm(shares)))
    assert printed["qos_sl2vl"] == ",".join(map(str, rules.sl2vl))
    assert printed["qos_vlarb_high"] == ",".join(f"{vl}:{w}" for vl, w in rules.vlarb_high)
    assert printed["qos_vlarb_low"] == ",".join(f"{vl}:{w}" for vl, w in rules.vlarb_low)


def test_a_saturated_soft_link_gives_each_class_what_the_setup_says():
    shares = [share("a", 0, 0, 60), share("b", 1, 0, 37), share("c", 2, 0, 1)]
    rate, seconds = 10**9, 0.1
    fabric = Fabric("virtual", arbitration=qos.arbitration(shares))
    with Nic.open("soft", fabric=fabric, bytes_per_s=rate, name="a") as here, \
            Nic.open("soft", fabric=fabric, bytes_per_s=rate, name="b") as there:
        memory = np.zeros(1 << 20, np.uint8)
        local, remote = here.register(memory), there.register(memory.copy())
        there.listen("b")
        peer = here.connect("b", classes=[each.traffic_class for each in shares])
        wrs = requests(READ, local, remote, np.zeros(200, int), 0, 1 << 20)
        transfers = [peer.read(wrs, each.traffic_class) for each in shares]
        fabric.advance(int(seconds * 1e9))
        here.poll()
        in_flight = [not transfer.done for transfer in transfers]
        got = {name: c["rx_bytes"] for name, c in here.stats()["by_class"].items()}
        fabric.advance(10**12)
        here.close(cancel=True)
    assert all(in_flight)                               # saturated to the end
    floors = re.search("at least: (.*?); alone", qos.opensm(shares).text())[1]
    assert set(got) == {"a", "b", "c"}
    for told in floors.split("; "):
        name, percent, _ = told.split(" ")
        expected = float(percent) / 100 * rate * seconds
        assert got[name] == pytest.approx(expected, rel=0.02, abs=4096), name   # one packet


def test_service_levels_beyond_the_lanes_get_lanes_of_their_own():
    setup = qos.opensm([share("a", 1, 0), share("b", 5, 0)])
    assert lines(setup)[1] == "qos_max_vls 4"
    lanes = lines(setup)[5].split(" ")[1].split(",")
    assert lanes[1] == "1" and lanes[5] == "0"
    assert any("b: lane 1" in each for each in setup.warnings)
    five = qos.opensm([share(f"c{sl}", sl, 0) for sl in range(5)])
    assert lines(five)[1] == "qos_max_vls 8"
    assert lines(five)[5] == "qos_sl2vl 0,1,2,3,4,5,6,7,0,1,2,3,4,5,6,7"
    assert any("VLCap" in each for each in five.warnings)


@pytest.mark.parametrize("make", [qos.opensm, lambda shares: qos.mlnx("eth0", shares),
                                  lambda shares: qos.tc("w0", shares)])
def test_each_class_has_a_place_of_its_own_whatever_the_list(make):
    shares = [share(f"c{i}", (3 * i + 1) % 16, 36 * (i + 1), 1 + 13 * i) for i in range(7)]
    text = make(shares).text()
    assert all(f"# {each.name}: sl {each.traffic_class.sl}, tclass" in text for each in shares)
    setup = make(shares)
    if setup.kind == "opensm":
        lanes = lines(setup)[5].split(" ")[1].split(",")
        assert len({lanes[each.traffic_class.sl] for each in shares}) == 7
    elif setup.kind == "mlnx":
        prios = [text.split(",")[-1] for text in lines(setup) if "set," in text]
        assert len(set(prios)) == len(prios) == 7 and "0" not in prios
        percents = lines(setup)[-2].split(" ")[-1].split(",")
        assert sum(map(int, percents)) == 100 and min(map(int, percents)) >= 1
        assert any("lossless" in each for each in setup.warnings)
    else:
        flows = [text.split(" ")[-1] for text in lines(setup) if "protocol ip " in text]
        assert len(set(flows)) == len(flows) == 7


# ---- what a fabric cannot honour

@pytest.mark.parametrize("make, shares, told", [
    (qos.opensm, [share("a", 2, 0), share("b", 2, 64)], "a and b have service level 2 in common"),
    (lambda s: qos.mlnx("e", s), [share("a", 0, 64), share("b", 1, 66)],
     "a and b have DSCP 16 in common"),
    (lambda s: qos.tc("e", s), [share("a", 0, 64), share("b", 1, 64)],
     "a and b have DSCP 16 in common"),
    (lambda s: qos.mlnx("e", s), [share("a", 0, 0), share("b", 1, 64)], "a: DSCP 0"),
    (lambda s: qos.mlnx("e", s), [share("a", 0, 67), share("b", 1, 160)], "ECN"),
    (lambda s: qos.tc("e", s), [share("a", 0, 64), share("b", 1, 160)], "prio cannot weigh"),
])
def test_what_a_fabric_cannot_honour_is_said(make, shares, told):
    setup = make(shares)
    assert any(told in each for each in setup.warnings)
    assert f"# WARNING: {setup.warnings[0]}" in setup.text()


@pytest.mark.parametrize("make, told", [
    (lambda: qos.opensm([share(f"c{sl}", sl, 0) for sl in range(9)]), "8 at most"),
    (lambda: qos.mlnx("e", [share(f"c{i}", 0, 4 + 4 * i) for i in range(8)]), "8, and other"),
    (lambda: qos.tc("e", [share(f"c{i}", 0, 4 * i) for i in range(16)]), "Linux has 16"),
    (lambda: qos.tc("w0", rate="fast"), "a rate is"),
    (lambda: qos.tc("w0", rate="1bit"), "a rate is"),
    (lambda: qos.tc("w0", scheduler="htb"), "prio or ets"),
    (lambda: qos.tc(None), "device is needed"),
    (lambda: qos.mlnx("eth0; reboot"), "device is needed"),
    (lambda: qos.tc("-x"), "device is needed"),
    (lambda: share("a\nqos FALSE", 0, 0), "printable characters"),
    (lambda: share("a", 0, 0, 0), "1 to 100"),
    (lambda: qos.opensm([]), "non-empty"),
    (lambda: qos.opensm([share("a", 0, 0), share("a", 1, 0)]), "distinct"),
])
def test_the_impossible_is_one_clear_error(make, told):
    with pytest.raises(InvalidArgument, match=told):
        make()


# ---- the command

def test_the_command_prints_the_setup_or_json():
    done = kvio("opensm")
    assert done.returncode == 0 and done.stdout == qos.opensm().text() + "\n"
    data = json.loads(kvio("tc", "--device", "w0", "--json", "--class", "x:0:0xb8:3",
                           "--class", "y:1:64:3").stdout)
    assert [each["name"] for each in data["classes"]] == ["x", "y"] and data["warnings"]
    assert all(set(line) == {"text", "meaning"} for line in data["lines"])
    assert data == qos.tc("w0", [share("x", 0, 184, 3), share("y", 1, 64, 3)]).to_dict()


@pytest.mark.parametrize("arguments", [
    ["opensm", "--class", "x:99:0:1"], ["opensm", "--class", "x:1:0"], ["tc"], ["mlnx"],
    ["opensm", "--class", "x:1:0:1", "--class", "x:2:0:1"], ["opensm", "--device", "eth0"],
    ["opensm", "--rate", "1gbit"], ["tc", "--device", "w0", "--rate", "much"],
    ["mlnx", "--device", "a b"], ["switch"]])
def test_nonsense_is_refused_with_status_2(arguments):
    done = kvio(*arguments)
    assert done.returncode == 2 and not done.stdout and "Traceback" not in done.stderr


# ---- real commands

def in_a_namespace(script):
    """Run a shell script with a device w0 of its own, in network and user namespaces of its own."""
    made = "ip link add w0 type veth peer name w1 && ip link set w0 up || exit 99\n"
    return subprocess.run(["unshare", "-rn", "sh", "-c", made + script], capture_output=True,
                          text=True, timeout=60)


@pytest.fixture(scope="module")
def namespace():
    if not all(map(shutil.which, ("tc", "ip", "unshare"))):
        pytest.skip("no tc, ip or unshare here")
    if in_a_namespace("true").returncode:
        pytest.skip("no network namespaces for this user")
    return in_a_namespace


def is_understood(ran):
    """tc has parsed the command: it succeeded, or it was the kernel that said no."""
    return ran.returncode == 0 or ran.returncode == 2 and (
        "Error: " in ran.stderr or "RTNETLINK answers" in ran.stderr)


@pytest.mark.parametrize("scheduler", ["prio", "ets"])
def test_tc_understands_every_command(namespace, scheduler):
    setup = qos.tc("w0", [*qos.DEFAULT_SHARES, share("x", 1, 96, 20)], "24mbit", scheduler)
    for text in lines(setup):
        ran = namespace(text)
        assert is_understood(ran), (text, ran.stderr)
    for text in ("tc qdisc replace dev w0 root handle 10: prio lanes 3",
                 "tc filter add dev w0 parent 10: protocol ip prio 1 u32 match ip dsfield 0x1b8 "
                 "0xfc flowid 10:1"):
        assert not is_understood(namespace(text))       # the check can fail


@pytest.mark.parametrize("scheduler", ["prio", "ets"])
def test_the_whole_setup_takes_effect_and_can_be_run_twice(namespace, scheduler):
    if namespace(f"tc qdisc add dev w0 root {scheduler} bands 3").returncode:
        pytest.skip(f"this kernel has no scheduler {scheduler}")
    text = qos.tc("w0", rate="24mbit", scheduler=scheduler).text()
    ran = namespace(f"set -e\n{text}\n{text}\ntc qdisc show dev w0; tc filter show dev w0 parent "
                    "10:")
    assert ran.returncode == 0, ran.stderr
    assert f"{scheduler} 10: parent 1:1" in ran.stdout and "rate 24Mbit" in ran.stdout
    assert "00b80000/00fc0000" in ran.stdout and shlex.split(ran.stdout)


def test_the_default_classes_are_those_of_the_transfer_engine():
    assert [s.traffic_class for s in qos.DEFAULT_SHARES] == [COLLECTIVE, KV]
