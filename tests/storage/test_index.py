"""What include/kvio/index.h promises, sentence by sentence."""
import errno
import threading
import time

import numpy as np
import pytest

from blocks import chain
from kvio._ext.index import is_root
from kvio.layout import KEY_DTYPE, BlockLayout, root_key
from kvio.storage.format import BLOCK_DURABLE, BLOCK_IO
from kvio.storage.index import Index, keys_of

OURS, THEIRS, OTHERS = 0, 1, 2


def make(slots=10_000):
    index = Index()
    for number in (OURS, THEIRS, OTHERS):
        index.add_segment(number, slots, number == OURS)
    return index


def places(keys, segment=OURS, first_slot=0, generation=1):
    out = np.zeros(len(keys), BLOCK_IO)
    for name in ("key", "parent"):
        out[name] = np.ascontiguousarray(keys[name]).view("V16").ravel()
    out["segment"], out["slot"] = segment, first_slot + np.arange(len(keys))
    out["generation"] = generation
    return out


def remove(index, place):
    return index.remove(*(int(place[name]) for name in ("segment", "slot", "generation")))


def bare(count, start=0):
    """Keys that somebody counted up, without parents."""
    keys = np.zeros(count, KEY_DTYPE)
    keys["key"][:, 8:] = (start + np.arange(count)).astype(">u8").view(np.uint8).reshape(-1, 8)
    return keys


def evicted(index, count):
    return [row.tobytes() for row in keys_of(index.evict(count))["key"]]


def names(keys):
    return [key.tobytes() for key in keys["key"]]


# ---- finding ----

def test_match_walks_from_the_root():
    keys, index = chain(10), make()
    assert index.match(keys) == 0
    assert index.insert(places(keys)) == 10 and index.match(keys) == 10
    assert index.match(keys[:4]) == 4 and index.match(chain(10, seed=1)) == 0
    assert index.match(keys[:0]) == 0


def test_match_ends_at_the_first_gap_wherever_it_is():
    keys = chain(300)
    for gap in (0, 1, 63, 64, 65, 127, 128, 299):
        index = make()
        index.insert(np.delete(places(keys), gap))
        assert index.match(keys) == gap and len(index) == 299


def test_a_block_without_its_ancestor_is_invisible_until_that_returns():
    keys, index = chain(10), make()
    index.insert(places(keys))
    assert remove(index, places(keys)[3])
    assert index.match(keys) == 3 and len(index) == 9
    assert keys["key"][5].tobytes() in index and keys["key"][3].tobytes() not in index
    assert index.stats()["orphans"] == 1 and index.stats()["ghosts"] == 2
    index.insert(places(keys)[3:4])
    assert index.match(keys) == 10
    assert index.stats()["orphans"] == 0 and index.stats()["ghosts"] == 1       # the root


def test_find_gives_a_place_for_each_key():
    keys, index = chain(5), make()
    stored = places(keys, THEIRS, first_slot=70, generation=9)
    stored["crc"], stored["tokens"], stored["flags"] = 0xCAFE, 64, BLOCK_DURABLE | 1
    index.insert(stored[[0, 2, 3]])
    found = index.find(keys)
    assert found["status"].tolist() == [-errno.EINPROGRESS if i in (0, 2, 3) else -errno.ENOENT
                                        for i in range(5)]
    assert (keys_of(found) == keys).all() and not found["addr"].any()
    assert found["slot"].tolist() == [70, 0, 72, 73, 0]
    assert found["flags"].tolist() == [BLOCK_DURABLE, 0] + [BLOCK_DURABLE] * 2 + [0]
    assert (found["crc"][[0, 2, 3]] == 0xCAFE).all() and (found["generation"][[0, 2]] == 9).all()
    assert (found["tokens"][[0, 2, 3]] == 64).all() and (found["segment"][[0, 2]] == THEIRS).all()


def test_an_own_place_is_preferred():
    keys = chain(1)
    for order in ([OURS, THEIRS, OTHERS], [THEIRS, OTHERS, OURS], [THEIRS, OURS, OTHERS]):
        index = make()
        for segment in order:
            index.insert(places(keys, segment))
        assert index.find(keys)["segment"][0] == OURS
        remove(index, places(keys, OURS)[0])
        assert index.find(keys)["segment"][0] != OURS and index.match(keys) == 1


def test_another_copy_takes_over():
    keys, index = chain(2), make()
    for segment in range(3):
        assert index.insert(places(keys, segment)) == (2 if segment == 0 else 0)
    assert index.stats()["places"] == 6 and len(index) == 2
    for segment in (1, 0, 2):
        assert index.match(keys) == 2
        assert remove(index, places(keys, segment)[0])
    assert index.match(keys) == 0 and len(index) == 1
    assert index.find(keys[1:])["segment"].tolist() == [0]
    assert index.stats()["orphans"] == 1


# ---- what a slot holds ----

def test_only_the_very_place_is_removed():
    keys, index = chain(2), make()
    index.insert(places(keys, THEIRS, generation=5))
    for segment, slot, generation in ((OTHERS, 0, 5), (THEIRS, 9, 5), (THEIRS, 0, 6), (7, 0, 5),
                                      (THEIRS, 10_000, 5), (0xFFFFFFFF, 0xFFFFFFFF, 5)):
        assert not index.remove(segment, slot, generation)
    assert index.match(keys) == 2 and index.remove(THEIRS, 0, 5) and index.match(keys) == 0


def test_a_slot_holds_the_block_that_came_last():
    old, new, index = chain(3), chain(3, seed=1), make()
    index.insert(places(old))
    assert index.insert(places(new, generation=2)) == 3
    assert index.match(old) == 0 and index.match(new) == 3 and len(index) == 3
    both = np.concatenate([places(old, generation=3)[:1], places(old, generation=4)[1:2]])
    both["slot"] = 2
    assert index.insert(both) == 2 and index.find(old)["slot"][1] == 2 and len(index) == 3


def test_a_place_that_is_known_changes_nothing():
    keys, index = chain(2), make()
    index.insert(places(keys))
    before = index.stats()
    assert index.insert(places(keys)) == 0 and index.stats() == before
    index.insert(places(chain(1, 1), first_slot=5))
    assert index.insert(places(keys)) == 0
    assert evicted(index, 1) == [names(keys)[1]]            # it is no use of it either


def test_replace_says_what_slots_hold():
    keys, index = chain(6), make()
    index.insert(places(keys, THEIRS))
    assert index.replace(THEIRS, 0, 6, places(keys, THEIRS)) == 0
    assert index.replace(THEIRS, 2, 3, places(keys, THEIRS)[[3]]) == 2      # slots 2 and 4 gone
    assert [slot for slot, found in enumerate(index.find(keys)["status"] != -errno.ENOENT)
            if found] == [0, 1, 3, 5]
    anew = places(keys, THEIRS, generation=8)
    assert index.replace(THEIRS, 0, 6, anew) == 10                          # 4 removed, 6 added
    assert (index.find(keys)["generation"] == 8).all()
    anew["segment"] = 99                                                    # not looked at
    assert index.replace(THEIRS, 0, 10_000, anew) == 0
    assert index.replace(THEIRS, 0, 10_000, anew[:0]) == 6 and len(index) == 0
    assert index.replace(OTHERS, 0, 10_000, anew[:0]) == 0


def test_what_makes_no_sense_is_refused():
    index, rows = make(slots=4), places(chain(4), THEIRS)
    for wrong in ("segment", "slot"):
        bad = rows.copy()
        bad[wrong][3] = 4
        with pytest.raises(OSError) as failed:
            index.insert(bad)
        assert failed.value.errno == errno.EINVAL and len(index) == 0
    for arguments in ((THEIRS, 0, 5, rows), (THEIRS, 0, 3, rows), (THEIRS, 1, 3, rows),
                      (THEIRS, 0, 4, rows[::-1].copy()), (THEIRS, 0, 4, rows[[0, 0]]),
                      (9, 0, 1, rows[:0]), (THEIRS, 0xFFFFFFFF, 2, rows[:0])):
        with pytest.raises(OSError):
            index.replace(*arguments)
    for arguments in ((THEIRS, 4, False), (5, 0, False), (0xFFFFFFFF, 4, False)):
        with pytest.raises(OSError):
            index.add_segment(*arguments)
    for call in (index.drop_segment, index.segment_use):
        with pytest.raises(OSError):
            call(9)
    for wrong in (lambda: index.match(np.zeros(33, np.uint8)), lambda: index.insert(bytes(71)),
                  lambda: index.find_into(chain(2), 0, np.zeros(1, BLOCK_IO))):
        with pytest.raises(ValueError):
            wrong()
    assert index.insert(rows[:0]) == 0 and len(index) == 0


def test_a_dropped_segment_is_forgotten_and_stays_so():
    keys, index = chain(10), make()
    index.insert(places(keys, THEIRS)), index.insert(places(keys[:5], OTHERS))
    assert index.drop_segment(THEIRS) == 10 and index.match(keys) == 5
    assert index.segment_use(THEIRS) == (0, 0) and index.drop_segment(THEIRS) == 0
    assert index.insert(places(keys, THEIRS)) == 0 and index.match(keys) == 5
    assert index.replace(THEIRS, 0, 10, places(keys, THEIRS)) == 0
    index.add_segment(THEIRS, 10, False)
    assert index.insert(places(keys, THEIRS)) == 5 and index.match(keys) == 10


# ---- use ----

def test_a_chain_is_evicted_from_its_end():
    keys = chain(200)
    for use in (lambda index: index.find(keys, 5), lambda index: index.touch(keys, 5),
                lambda index: None):
        index = make()
        for first in range(0, 200, 50):
            index.insert(places(keys[first:first + 50], first_slot=first))
        use(index)
        assert evicted(index, 150) + evicted(index, 99) == names(keys)[::-1]
        assert index.stats() | {"memory_bytes": 0} == dict.fromkeys(index.stats(), 0)


def test_the_least_recently_used_chain_goes_first():
    chains, index = [chain(3, seed) for seed in range(4)], make()
    for i, keys in enumerate(chains):
        index.insert(places(keys, first_slot=3 * i))
    index.touch(chains[0], 1), index.find(chains[2], 1), index.find(chains[1])      # not touched
    order = [chains[i] for i in (1, 3, 0, 2)]
    assert evicted(index, 12) == [name for keys in order for name in names(keys)[::-1]]


def test_touch_ignores_unknown_keys_and_counts_own_places():
    keys, index = chain(6), make()
    index.insert(places(keys[:2])), index.insert(places(keys[2:4], THEIRS))
    assert index.touch(keys, 7) == 2 and index.touch(chain(2, 9), 7) == 0


def test_a_segment_knows_its_last_use():
    keys, index = chain(6), make()
    index.insert(places(keys[:3])), index.insert(places(keys[2:], THEIRS))
    assert index.segment_use(THEIRS) == (4, 0) and index.segment_use(OTHERS) == (0, 0)
    index.find(keys[4:], 50)
    assert index.segment_use(THEIRS) == (4, 50) and index.segment_use(OURS) == (3, 0)
    index.find(keys, 40)
    assert index.segment_use(THEIRS) == (4, 50) and index.segment_use(OURS) == (3, 40)
    index.find(keys), index.match(keys)
    assert index.segment_use(OURS) == (3, 40)
    index.touch(keys[2:3], 60)                              # ours and theirs
    assert index.segment_use(THEIRS) == (4, 60) and index.segment_use(OURS) == (3, 60)


# ---- orphans, leaves, pins ----

def test_the_root_is_known_by_its_mark():
    layout = BlockLayout(2, 4, 16)
    for key in (bytes(16), root_key(layout), root_key(layout, b"tenant"), b"root" + bytes(12)):
        assert is_root(key)
    for key in (b"\1" + bytes(15), bytes(15) + b"\1", b"roo" + bytes(13), b"Root" + bytes(12)):
        assert not is_root(key)
    for keys in (bare(3), chain(3)):
        index = make()
        index.insert(places(keys))
        assert index.stats()["orphans"] == 0


def test_orphans_go_first_block_after_block():
    hot, broken, index = chain(20), chain(20, seed=1), make()
    index.insert(places(hot)), index.insert(places(broken, first_slot=100))
    index.touch(broken, 9)
    remove(index, places(broken, first_slot=100)[0])
    assert index.stats()["orphans"] == 1
    assert evicted(index, 5) == names(broken)[1:6]
    assert index.stats()["orphans"] == 1 and index.stats()["own_places"] == 34
    assert evicted(index, 14) == names(broken)[6:]
    assert index.stats()["orphans"] == 0 and index.stats()["ghosts"] == 1
    assert evicted(index, 2) == names(hot)[:-3:-1]


def test_an_orphan_is_none_any_more_when_its_parent_returns_from_anywhere():
    keys, index = chain(4), make()
    index.insert(places(keys[1:], first_slot=1))
    assert index.stats()["orphans"] == 1
    index.insert(places(keys[:1], THEIRS))
    assert index.stats()["orphans"] == 0 and evicted(index, 1) == names(keys)[3:]
    index.drop_segment(THEIRS)
    assert index.stats()["orphans"] == 1 and evicted(index, 9) == names(keys)[1:3]


def test_orphans_of_others_are_not_ours_to_evict():
    keys, index = chain(4), make()
    index.insert(places(keys[1:], THEIRS))
    assert index.stats()["orphans"] == 0 and evicted(index, 9) == [] and len(index) == 3


def test_the_parent_of_anybodys_block_is_no_leaf():
    keys, other, index = chain(3), chain(2, seed=1), make()
    index.insert(places(keys[:2])), index.insert(places(keys[2:], THEIRS))
    index.insert(places(other, first_slot=5))
    assert evicted(index, 2) == names(other)[::-1]          # hotter, but leaves
    assert evicted(index, 1) == names(keys)[1:2]            # inner ones at last
    assert evicted(index, 1) == names(keys)[:1] and len(index) == 1


def test_a_parent_that_was_passed_over_is_next_once_it_is_a_leaf():
    """Parents colder than their children: the suffix was read without its prefix."""
    keys, hot, index = chain(6), chain(2, seed=1), make()
    index.insert(places(keys)), index.insert(places(hot, first_slot=10))
    index.touch(keys[3:], 1), index.touch(hot, 1)
    assert evicted(index, 4) == names(keys)[:1:-1]
    assert evicted(index, 4) == names(keys)[1::-1] + names(hot)[::-1]
    index.insert(places(keys)), index.insert(places(hot, first_slot=10))
    index.touch(keys[3:], 1), index.touch(hot, 1)
    assert evicted(index, 1) == names(keys)[5:]             # has passed over the parents
    for i in (4, 3):
        remove(index, places(keys)[i])
    assert evicted(index, 9) == names(keys)[2::-1] + names(hot)[::-1]


def test_chains_whose_parents_are_colder_are_evicted_in_linear_time():
    """Level after level was written, so a scan passes over all parents once, not once a block."""
    levels, wide, index = 400, 500, make(slots=200_000)
    keys = np.zeros(levels * wide, KEY_DTYPE)
    keys["key"] = np.random.default_rng(3).integers(0, 256, (len(keys), 16), np.uint8)
    keys["parent"][wide:] = keys["key"][:-wide]
    for level in range(levels):
        index.insert(places(keys[level * wide:][:wide], first_slot=level * wide))
    started = time.monotonic()
    taken = np.concatenate([index.evict(wide * levels // 64) for _ in range(65)])
    assert time.monotonic() - started < 20 and len(index) == 0
    slots = taken["slot"].reshape(wide, levels)             # each chain from its end to its start
    assert (slots // wide == np.arange(levels)[::-1]).all()
    assert (slots % wide == np.arange(wide)[::-1, None]).all()


def test_pinned_blocks_stay():
    keys, index = chain(5), make()
    index.insert(places(keys))
    assert index.pin(keys[:3], 1) == 3 and index.pin(keys[:2], 1) == 2
    assert index.stats()["pinned"] == 3
    assert evicted(index, 9) == names(keys)[:2:-1] and index.match(keys) == 3
    index.pin(keys, -1)
    assert index.stats()["pinned"] == 2 and evicted(index, 9) == names(keys)[2:3]
    index.pin(keys, -1), index.pin(keys, -1)
    assert index.stats()["pinned"] == 0 and evicted(index, 9) == names(keys)[1::-1]


def test_what_lies_above_a_pinned_block_stays():
    keys, side, index = chain(5), bare(2, start=1), make()
    side["parent"] = keys["key"][1:3]
    index.insert(places(keys)), index.insert(places(side, first_slot=6))
    index.pin(keys[3:4], 1)
    assert sorted(evicted(index, 9)) == sorted(names(keys[4:]) + names(side))
    assert index.match(keys) == 4 and evicted(index, 9) == []
    index.pin(keys[3:4], -1)
    assert evicted(index, 9) == names(keys)[3::-1]


def test_keys_that_are_their_own_ancestors_end_no_walk():
    ring, index = bare(3, start=1), make()
    ring["parent"] = np.roll(ring["key"], 1, axis=0)
    index.insert(places(ring))
    assert len(evicted(index, 1)) == 1
    index.insert(places(ring)), index.pin(ring[:1], 1)
    assert evicted(index, 9) == []
    index.pin(ring, -1)
    assert len(evicted(index, 9)) == 3


def test_pin_counts_the_prefix_and_treats_all():
    keys, index = chain(5), make()
    index.insert(places(keys)[[0, 1, 3]])
    assert index.pin(keys, 1) == 2 and index.stats()["pinned"] == 3
    remove(index, places(keys)[1])
    assert index.stats()["pinned"] == 2                     # pins end with their block
    index.insert(places(keys)[1:2])
    assert index.stats()["pinned"] == 2


def test_pinned_orphans_stay_and_the_others_go():
    keys, index = chain(4), make()
    siblings = bare(3, start=1)
    siblings["parent"] = keys["key"][0]
    index.insert(places(siblings)), index.pin(siblings[1:2], 1)
    assert index.stats()["orphans"] == 3
    assert sorted(evicted(index, 9)) == sorted(names(siblings[::2]))
    assert index.stats()["orphans"] == 1 and evicted(index, 9) == []
    index.pin(siblings, -1)
    assert evicted(index, 9) == names(siblings[1:2]) and index.stats()["ghosts"] == 0


def test_eviction_describes_what_it_gives_up():
    keys, index = chain(2), make()
    stored = places(keys, first_slot=3, generation=6)
    stored["crc"], stored["tokens"], stored["flags"] = 77, 64, BLOCK_DURABLE
    index.insert(stored), index.insert(places(keys, THEIRS))
    assert (index.evict(5) == stored[::-1]).all()
    assert index.match(keys) == 2 and index.find(keys)["segment"].tolist() == [THEIRS] * 2


# ---- size ----

def test_rows_are_used_again():
    index, keys = make(), chain(3000)
    for round_ in range(50):
        index.insert(places(keys, generation=round_ + 1))
        if round_ == 0:
            before = index.stats()["memory_bytes"]
        for place in places(keys, generation=round_ + 1)[::2]:
            assert remove(index, place)
    assert index.stats()["memory_bytes"] <= before + 100 * 72


@pytest.mark.parametrize("make_keys", [bare, chain])
def test_it_grows(make_keys):
    keys, index = make_keys(60_000), make(slots=60_000)
    index.insert(places(keys[:30_000]))
    index.insert(places(keys[30_000:], first_slot=30_000))
    assert index.match(keys) == 60_000 == len(index)
    assert (index.find(keys)["slot"] == np.arange(60_000)).all()
    assert index.match(make_keys(10, 99_999)) == 0
    for slot in range(0, 60_000, 2):
        assert index.remove(OURS, slot, 1)
    found = index.find(keys)["status"] == -errno.EINPROGRESS
    assert (found == (np.arange(60_000) % 2 == 1)).all()


def test_rows_fill_more_than_one_chunk():
    count = (1 << 18) + 5000
    keys, index = bare(count), make(slots=count)
    index.insert(places(keys))
    assert index.match(keys) == count and index.stats()["memory_bytes"] < 100 * count
    out = index.evict(count)
    assert len(out) == count and len(index) == 0
    assert (out["slot"] == np.arange(count)[::-1]).all()


def test_threads_at_once():
    """Four threads insert, find, touch, pin and evict; at the end all is where it should be."""
    index, wrong, rounds = Index(), [], 60
    shared = chain(50, seed=1000)
    for number in range(8):
        index.add_segment(number, 1000, number < 4)
    index.insert(places(shared, 7, first_slot=900))

    def work(me):
        rng = np.random.default_rng(me)
        try:
            for round_ in range(rounds):
                keys = chain(100, seed=rounds * me + round_)
                rows = places(keys, me, generation=round_ + 1)
                index.insert(rows)
                index.insert(places(shared, 4 + me % 3, generation=round_ + 1))
                held = index.pin(keys[:10], 1)          # others evict meanwhile
                found = index.find(keys[:held], 1)
                assert (found["status"] == -errno.EINPROGRESS).all()
                assert index.match(keys) >= held and index.match(shared) == 50
                index.touch(keys, 2)
                index.replace(4 + me % 3, 0, 1000, places(shared, generation=round_ + 2))
                taken = index.evict(int(rng.integers(300)))
                assert not np.isin(taken["key"], rows["key"][:held]).any()
                index.stats(), index.segment_use(me), len(index)
                index.pin(keys[:10], -1)
        except BaseException as failed:
            wrong.append(failed)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert wrong == []
    taken = index.evict(10_000)
    assert index.stats()["own_places"] == 0 and len(index) == 50 and len(taken) <= 4000
