"""The disk of the power cuts is itself to be trusted: what it may lose, and what it may not."""
import random

import pytest

from lab.nbd import SECTOR, Disk


def sector(letter):
    return letter * SECTOR


@pytest.mark.parametrize("how", ["none", "all", "writes", "pieces"])
def test_flushed_data_survive_and_reads_see_the_cache(how):
    for seed in range(50):
        rng, disk = random.Random(seed), Disk(bytearray(16 * SECTOR))
        disk.write(0, sector(b"a") * 4, False)
        assert disk.flush()
        disk.write(8 * SECTOR, sector(b"b") * 2, False)
        disk.write(2 * SECTOR, sector(b"c") * 4, False)
        assert disk.read(2 * SECTOR, SECTOR) == sector(b"c")
        assert disk.cut(rng, how) == 2
        assert disk.medium[:2 * SECTOR] == sector(b"a") * 2
        for at in range(2, 16):
            now = bytes(disk.medium[at * SECTOR:(at + 1) * SECTOR])
            old = sector(b"a") if at < 4 else sector(b"\0")
            new = sector(b"c") if at < 6 else sector(b"b") if at in (8, 9) else old
            assert now in {"none": {old}, "all": {new}}.get(how, {old, new})


def test_unflushed_writes_are_lost_reordered_and_torn():
    outcomes = set()
    for seed in range(200):
        disk = Disk(bytearray(2 * SECTOR))
        disk.write(0, sector(b"1") * 2, False)
        disk.write(0, sector(b"2") * 2, False)
        disk.cut(random.Random(seed), random.Random(seed).choice(["writes", "pieces"]))
        outcomes.add((disk.medium[0], disk.medium[SECTOR]))
    assert outcomes == {(a, b) for a in b"\x0012" for b in b"\x0012"}


def test_fua_survives_what_was_written_there_before():
    for seed in range(50):
        disk = Disk(bytearray(8 * SECTOR))
        disk.write(0, sector(b"x") * 8, False)
        disk.write(2 * SECTOR, sector(b"y") * 2, True)
        disk.cut(random.Random(seed), "pieces")
        assert disk.medium[2 * SECTOR:4 * SECTOR] == sector(b"y") * 2
        disk = Disk(bytearray(8 * SECTOR))
        disk.write(0, sector(b"x") * 8, False)
        disk.write(2 * SECTOR, sector(b"y") * 2, True)
        disk.cut(random.Random(seed), "all")
        assert bytes(disk.medium) == sector(b"x") * 2 + sector(b"y") * 2 + sector(b"x") * 4


def test_some_blocks_are_never_torn():
    whole, torn = b"w" * 4096, b"t" * 4096
    outcomes = set()
    for seed in range(100):
        disk = Disk(bytearray(4 * 4096), lambda block: block[:1] == b"t")
        disk.write(1024, whole[:3072] + torn + whole, False)
        disk.cut(random.Random(seed), "pieces")
        for at, nbytes in ((1024, 3072), (8192, 4096)):
            assert len(set(disk.medium[at:at + nbytes])) == 1
        outcomes.add(len(set(disk.medium[4096:8192])))
    assert outcomes == {1, 2}


def test_the_power_goes_off_at_a_request():
    disk = Disk(bytearray(4 * SECTOR))
    disk.stop_after(3)
    assert disk.write(0, sector(b"a"), False) and disk.flush()
    assert not disk.write(0, sector(b"b"), True)        # not answered: it may be lost, FUA or not
    assert not disk.flush()
    disk.cut(random.Random(0), "none")
    assert disk.medium[:1] == b"a"
