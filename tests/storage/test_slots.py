"""Free slots as runs, against a plain list of states."""
import os
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.storage import slots as module
from kvio.storage.slots import FREE, RETIRED, UNBACKED, UNUSED, VALID, Slots


def codes(slots):
    return slots._states & 7


def check(slots, stale):
    """The lists, the counters and the states say the same."""
    state = codes(slots)
    assert ((slots._states & 8 != 0) == stale)[state != VALID].all()
    assert (state[slots.next:] == UNUSED).all() and (state[:slots.next] != UNUSED).all()
    assert slots.num_free == np.count_nonzero(state == FREE)
    assert slots.num_flying == np.count_nonzero(state == module.FLYING)
    assert slots.num_valid == np.count_nonzero(state == VALID)
    assert sorted(slots.unbacked) == np.flatnonzero(state == UNBACKED).tolist()
    runs = dict(module._runs(np.flatnonzero(state == FREE)))
    listed = {}
    for number, first in enumerate(slots._first):
        assert bool(first) == bool(slots.lengths >> number & 1)
        before = 0
        while first:
            start, length = first - 1, slots._length[first - 1]
            assert slots._length[start + length - 1] == length
            assert slots._before[start] == before and start not in listed
            assert module._class_of(length) == number
            listed[start] = length
            before, first = first, slots._after[start]
    assert listed == runs


@settings(max_examples=int(os.environ.get("KVIO_EXAMPLES", "60")), deadline=None)
@given(st.data())
def test_every_slot_is_in_one_state_and_no_slot_is_handed_out_twice(data):
    count = data.draw(st.sampled_from([1, 33, 300]))
    slots, out, valid = Slots(count), set(), set()
    stale = np.zeros(count, bool)       # what `flags` must say
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["take", "take", "extend", "stored", "free", "free",
                                            "shelve", "unshelve"]))
        want = data.draw(st.integers(1, 90))
        if action == "take" and slots.num_free:
            runs = dict(module._runs(np.flatnonzero(codes(slots) == FREE)))
            start, got = slots.take(want)
            new = set(range(start, start + got))
            assert not new & (out | valid) and (codes(slots)[list(new)] == module.FLYING).all()
            assert slots.flags(start, got).tolist() == stale[start:start + got].tolist()
            longer = [length for length in runs.values() if length >= want]
            assert got == (want if longer else max(runs.values())) or want >= 64
            if longer and want < 64:    # best fit
                run = max(at for at in runs if at <= start)
                assert runs[run] == min(longer) or runs[run] > 64
            out |= new
        elif action == "extend" and slots.tail:
            start, got = slots.extend(min(want, slots.tail))
            out |= set(range(start, start + got))
        elif action == "stored" and out:
            done = np.array(sorted(out)[:want])
            slots.stored(done)
            out -= set(done.tolist())
            valid |= set(done.tolist())
        elif action in ("free", "shelve") and (out or valid):
            pool = valid if valid and (data.draw(st.booleans()) or not out) else out
            back = np.array(data.draw(st.permutations(sorted(pool)))[:want])
            if action == "free":
                suspect = np.array(data.draw(st.lists(st.booleans(), min_size=len(back),
                                                      max_size=len(back))))
                stale[back] |= suspect | (pool is valid)
                slots.free(back, suspect | (pool is valid))
            else:
                slots.shelve(back, data.draw(st.sampled_from([UNBACKED, RETIRED])))
                stale[back] &= pool is not valid
            pool -= set(back.tolist())
        elif action == "unshelve":
            slots.unshelve()
        check(slots, stale)
    assert (codes(slots)[sorted(out)] == module.FLYING).all()
    assert (codes(slots)[sorted(valid)] == VALID).all()


def freed(count, *spans):
    """Slots that are all valid but for these (first, length) runs."""
    slots = Slots(count)
    slots.extend(count)
    slots.stored(np.arange(count))
    for first, length in spans:
        slots.free(np.arange(first, first + length), True)
    return slots


def test_the_shortest_run_with_room_or_the_longest_there_is():
    slots = freed(2000, (10, 5), (40, 9), (100, 7), (200, 300), (1000, 70))
    assert slots.take(6) == (100, 6)
    assert slots.take(66) == (1000, 66)
    assert slots.take(400) == (200, 300)
    assert slots.take(400) == (40, 9)
    assert slots.take(1) == (106, 1)


def test_of_equal_runs_the_one_in_one_header_page():
    slots = freed(200, (5, 8), (60, 8), (156, 8))
    assert slots.take(8) == (5, 8)
    slots = freed(200, (20, 40))        # 20-31 | 32-59: the end lies in one page
    assert slots.take(20) == (40, 20)


def test_what_is_stale_stays_so_until_it_is_stored():
    slots = freed(40, (0, 10))
    start, count = slots.take(10)
    assert slots.flags(start, count).all()
    slots.free(np.arange(start, start + count), False)      # failed before anything was written
    start, count = slots.take(10)
    assert slots.flags(start, count).all()


def test_a_call_costs_the_same_in_a_large_fragmented_segment():
    slots = freed(480_000)
    slots.free(np.arange(0, 480_000, 2), True)              # the worst: no two are adjacent
    began = time.perf_counter()
    for _ in range(1000):
        first = [slots.take(8)[0] for _ in range(8)]
    took_us = (time.perf_counter() - began) * 1e3
    assert len(set(first)) == 8
    assert took_us < 1000, f"8 slots took {took_us:.0f} us"
