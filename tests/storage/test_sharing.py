"""Blocks of other writers: found through page 1 and the marked header pages (DESIGN, Store).

Here the other writers are segments written by hand, one step at a time, and `refresh` looks.
"""
import errno
import os
import resource
import shutil
import time

import numpy as np
import pytest

from blocks import LAYOUT, Blocks, chain, edit, open_store, payload, put, readable
from kvio.storage import format as fmt
from kvio.storage.format import PAGE
from shared import Foreign, until

SEGMENT = 3_000_000             # 241 slots in 8 header pages


def observer(path, **options):
    return open_store(path, **{"segment_bytes": SEGMENT, "poll_s": 0, **options})


@pytest.fixture
def pair(tmp_path):
    """(an observer that looks only when told, a foreign segment that it knows)."""
    with observer(tmp_path) as store:
        foreign = Foreign(tmp_path, store.description)
        store.refresh()
        yield store, foreign


def figures(store):
    return store.stats()["sharing"]


def pages_read(store):
    """Header pages read since the last time."""
    total = figures(store)["header_pages_read"]
    before, store.pages_before = getattr(store, "pages_before", 0), total
    return total - before


def test_a_block_of_another_writer_is_found(pair):
    store, foreign = pair
    keys = chain(3)
    for slot, key in enumerate(keys):
        foreign.put(slot, key)
        assert store.refresh() == 0, "page 1 does not name it yet"
        foreign.publish()
        assert store.refresh() == 1
        assert store.match(keys) == slot + 1
    assert readable(store, keys).all()
    foreign.clear(0)
    foreign.publish()
    assert store.refresh() == 1 and store.match(keys) == 0
    foreign.put(0, keys[0])
    foreign.publish()
    assert store.refresh() == 1 and store.match(keys) == 3


def test_nothing_changed_reads_page_1_and_no_header(pair):
    store, foreign = pair
    pages_read(store)
    for _ in range(5):
        foreign.publish()           # a heartbeat alone
        store.refresh()
    assert pages_read(store) == 0
    reads = figures(store)["page1_reads"]
    store.refresh()
    assert figures(store)["page1_reads"] == reads + 1


def test_marked_pages_are_read_and_neighbours_together(pair):
    store, foreign = pair
    pages_read(store)
    for slot in (0, 40, 41, 200):   # pages 0, 1 and 6
        foreign.put(slot, chain(1, slot)[0])
    foreign.publish()
    store.refresh()
    assert pages_read(store) == 3
    assert all(store.match(chain(1, slot)) for slot in (0, 40, 41, 200))


@pytest.mark.parametrize("asleep", [0, 1, 2, 5])
def test_an_observer_that_slept_through_epochs_sees_everything(pair, asleep):
    store, foreign = pair
    foreign.put(3, chain(1, 99)[0])
    foreign.publish()
    store.refresh()
    pages_read(store)
    for epoch in range(asleep + 1):
        if epoch:
            foreign.next_epoch()
        foreign.put(32 * epoch, chain(1, epoch)[0])     # one header page an epoch
        foreign.publish()
    store.refresh()
    found = [store.match(chain(1, epoch)) for epoch in range(asleep + 1)]
    assert found == [1] * (asleep + 1)
    # This or the previous epoch: the marked pages. Anyone else: all of them.
    marked = asleep + 1 if asleep <= 1 else foreign.geometry.header_pages
    assert pages_read(store) == marked
    assert figures(store)["full_reads"] == (1 if asleep <= 1 else 2)


def test_marks_of_the_previous_epoch_count_also_for_who_saw_that_epoch_begin(pair):
    """Seen in epoch 1; then a change in 1 that was never published there, and epoch 2 begins."""
    store, foreign = pair
    foreign.put(70, chain(1, 1)[0])
    foreign.next_epoch()
    foreign.put(140, chain(1, 2)[0])
    foreign.publish()
    store.refresh()
    assert store.match(chain(1, 1)) and store.match(chain(1, 2))


def test_an_epoch_that_goes_backwards_is_no_epoch_one_has_seen(pair):
    store, foreign = pair
    foreign.epoch = 7
    foreign.publish()
    store.refresh()
    foreign.put(100, chain(1)[0])
    foreign.epoch, foreign.changed = 3, set()
    foreign.publish()
    store.refresh()
    assert store.match(chain(1)) == 1


def test_page_1_that_fails_its_crc_twice_means_all_pages(pair):
    store, foreign = pair
    keys = chain(2)
    pages_read(store)
    foreign.put(0, keys[0])
    foreign.publish()
    edit(foreign.path, PAGE + 200, lambda byte: byte ^ 4)       # a mark, say
    store.refresh()
    assert store.match(keys) == 1
    assert pages_read(store) == foreign.geometry.header_pages
    assert figures(store)["page1_damaged"] == 1
    for _ in range(3):                                          # as long as it is the same damage
        store.refresh()
    assert pages_read(store) == 0
    foreign.put(33, keys[1])
    foreign.changed = {1}
    foreign.publish()                                           # and good again
    store.refresh()
    assert store.match(keys) == 2 and pages_read(store) == 1


@pytest.mark.parametrize("field, at", [("magic", 0), ("version", 8), ("header_pages", 12),
                                       ("segment", 16)])
def test_a_sealed_page_1_of_something_else_is_a_damaged_one(pair, field, at):
    store, foreign = pair
    foreign.put(50, chain(1)[0])
    foreign.changed = set()
    page = bytearray(foreign.page1())
    page[at] ^= 3
    foreign.write(PAGE, fmt.seal(np.frombuffer(bytes(page), fmt.PAGE1)[0].copy()))
    store.refresh()
    assert store.match(chain(1)) == 1 and figures(store)["page1_damaged"] == 1


def test_a_torn_header_is_a_miss_until_it_is_whole(pair):
    store, foreign = pair
    keys = chain(3)
    for slot, key in enumerate(keys):
        foreign.put(slot, key)
    edit(foreign.path, 2 * PAGE + 128 * 1 + 60, lambda byte: byte ^ 8)
    foreign.publish()
    store.refresh()
    assert store.match(keys) == 1 and figures(store)["headers_damaged"] == 1
    assert readable(store, keys).tolist() == [True, False, True]
    edit(foreign.path, 2 * PAGE + 128 * 1 + 60, lambda byte: byte ^ 8)
    foreign.publish()
    store.refresh()
    assert store.match(keys) == 3


def test_a_slot_beyond_the_end_of_the_file_holds_no_block(pair):
    store, foreign = pair
    keys = chain(2)
    for slot, key in enumerate(keys):
        foreign.put(slot, key)
    os.truncate(foreign.path, foreign.geometry.payload_offset + LAYOUT.stride)
    foreign.publish()
    store.refresh()
    assert store.match(keys) == 1 and figures(store)["headers_beyond_end"] == 1
    os.truncate(foreign.path, 3 * PAGE)             # not even all header pages are there
    foreign.publish()
    store.refresh()
    assert store.match(keys) == 0


def test_only_the_newest_segment_is_looked_at_until_its_others_moves(tmp_path):
    with observer(tmp_path) as store:
        old = Foreign(tmp_path, store.description)
        new = Foreign(tmp_path, store.description, n=1, writer=old.writer)
        store.refresh()
        keys = chain(2)
        old.put(0, keys[0])
        old.publish()
        store.refresh()
        assert store.match(keys) == 0
        new.others += 1
        new.publish()
        store.refresh()
        assert store.match(keys) == 1
        os.unlink(new.path)                         # now the other one is the newest
        store.refresh()
        old.put(1, keys[1])
        old.publish()
        store.refresh()
        assert store.match(keys) == 2


def test_a_segment_that_is_still_being_made_is_looked_at_again(tmp_path):
    with observer(tmp_path) as store:
        foreign = Foreign(tmp_path, store.description, whole=False)
        store.refresh()
        name = os.path.basename(foreign.path)
        assert name in store.stats()["segments_ignored"]
        foreign.publish()
        foreign.put(0, chain(1)[0])
        store.refresh()
        assert store.match(chain(1)) == 0           # its page 0 may still be anybody's
        foreign.write(0, foreign.page0)
        until(lambda: store.refresh() and store.match(chain(1)), step=0.02)
        assert not store.stats()["segments_ignored"]


def test_a_file_that_vanishes_takes_its_blocks_along(pair, backend):
    store, foreign = pair
    foreign.put(0, chain(1)[0])
    foreign.publish()
    store.refresh()
    assert readable(store, chain(1)).all()
    fds = len(os.listdir("/proc/self/fd"))
    os.unlink(foreign.path)
    assert store.refresh() == 0 and store.match(chain(1)) == 0
    until(lambda: store.refresh() == 0 and len(os.listdir("/proc/self/fd")) == fds - 1)
    assert figures(store)["segments_lost"] == 1 and figures(store)["writers_live"] == 0


def test_the_file_of_a_read_in_flight_stays_open_until_it_has_drained(tmp_path, backend):
    with observer(tmp_path, backend=backend) as store:
        foreign = Foreign(tmp_path, store.description)
        foreign.put(0, chain(1)[0])
        foreign.publish()
        store.refresh()
        ring = store.open_ring()
        target, late = Blocks(1), Blocks(1)
        ring.read(chain(1), target.pool, target.ids).wait()     # the ring has registered the file
        ring._ring._pause(True)
        transfer = ring.read(chain(1), target.pool, target.ids)
        os.unlink(foreign.path)
        store.refresh()
        assert store.match(chain(1)) == 0 and open_names(foreign.path)
        ring._ring._pause(False)
        assert transfer.wait() == 1 and target.holds(chain(1))
        until(lambda: store.refresh() == 0 and not open_names(foreign.path))
        time.sleep(0.05)
        assert not open_names(foreign.path)


def test_a_read_that_comes_after_its_segment_has_gone_is_a_miss(tmp_path, backend):
    """Its place was found in the index, then the file vanished, then it is submitted."""
    with observer(tmp_path, backend=backend) as store:
        foreign = Foreign(tmp_path, store.description)
        foreign.put(0, chain(1)[0])
        foreign.publish()
        store.refresh()
        target, submit = Blocks(1), store._requests._submit

        def late(*arguments):
            os.unlink(foreign.path)
            store.refresh()
            until(lambda: store.refresh() == 0 and not open_names(foreign.path))
            return submit(*arguments)

        store._requests._submit = late
        transfer = store.read(chain(1), target.pool, target.ids)
        assert transfer.wait() == 0 and transfer.status.tolist() == [-errno.ENOENT]


def open_names(path):
    """Whoever keeps a file (deleted or not) open: descriptors, and rings that registered it."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
            found += name == path
            if "io_uring" in name:
                with open(f"/proc/self/fdinfo/{fd}") as file:
                    found += os.path.basename(path) in file.read()
        except OSError:
            pass
    return found


def test_too_few_descriptors_are_announced_and_retried(tmp_path):
    """With one left the directory can be listed and the first segment opened, not the second."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with observer(tmp_path) as store:
        for seed in range(2):
            foreign = Foreign(tmp_path, store.description)
            foreign.put(0, chain(1, seed)[0])
            foreign.publish()
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
        try:
            with pytest.raises(OSError):
                while True:
                    held.append(os.dup(0))
            os.close(held.pop())
            with pytest.warns(RuntimeWarning, match="ulimit -n"):
                store.refresh()
            assert store.match(chain(1, 0)) + store.match(chain(1, 1)) == 1
        finally:
            for fd in held:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        until(lambda: store.refresh() is not None and store.match(chain(1, 0)) == 1
              and store.match(chain(1, 1)) == 1, step=0.05)
        assert not store.stats()["segments_ignored"]


def test_the_same_key_in_two_writers_segments(tmp_path):
    with observer(tmp_path) as store:
        first, second = (Foreign(tmp_path, store.description) for _ in range(2))
        for foreign in (first, second):
            foreign.put(0, chain(1)[0])
            foreign.publish()
        store.refresh()
        assert len(store) == 1 and readable(store, chain(1)).all()
        os.unlink(first.path)
        store.refresh()
        assert store.match(chain(1)) == 1 and readable(store, chain(1)).all()
        second.clear(0)
        second.publish()
        store.refresh()
        assert store.match(chain(1)) == 0 and len(store) == 0


def test_an_own_copy_outlives_the_other_writers(tmp_path):
    with observer(tmp_path) as store:
        put(store, chain(2))
        foreign = Foreign(tmp_path, store.description)
        foreign.put(0, chain(1)[0])
        foreign.publish()
        store.refresh()
        os.unlink(foreign.path)
        store.refresh()
        assert store.match(chain(2)) == 2 and readable(store, chain(2)).all()


def test_an_orphan_is_found_when_its_ancestor_returns(tmp_path):
    keys = chain(3)
    with observer(tmp_path) as store:
        foreign = Foreign(tmp_path, store.description)
        for slot, key in enumerate(keys):
            foreign.put(slot, key)
        foreign.clear(0)
        foreign.publish()
        store.refresh()
        assert store.match(keys) == 0
        assert readable(store, keys).tolist() == [False, True, True]
        other = Foreign(tmp_path, store.description)        # somebody else stores it again
        other.put(5, keys[0])
        other.publish()
        store.refresh()
        assert store.match(keys) == 3 and readable(store, keys).all()


def test_only_own_segments_are_ever_written(tmp_path):
    with observer(tmp_path) as store:
        foreign = Foreign(tmp_path, store.description)
        foreign.put(0, chain(1)[0])
        foreign.publish()
        before = open(foreign.path, "rb").read()
        store.refresh()
        put(store, chain(30, 5))
        store.forget(chain(1))                     # not ours: nothing happens
        assert readable(store, chain(1)).all()
        store.refresh()
    assert open(foreign.path, "rb").read() == before


def test_the_directory_vanishes(tmp_path, backend):
    path = tmp_path / "store"
    with observer(path, backend=backend) as store:
        put(store, chain(3))
        foreign = Foreign(path, store.description)
        foreign.put(0, chain(1, 7)[0])
        foreign.publish()
        store.refresh()
        assert store.match(chain(1, 7)) == 1
        shutil.rmtree(path)
        with pytest.warns(RuntimeWarning) as warned:
            store.refresh()
        said = " ".join(str(w.message) for w in warned)
        assert "directory is gone" in said and "was deleted while" in said
        assert store.match(chain(1, 7)) == 0 and store.match(chain(3)) == 0
        assert not readable(store, chain(3)).any()
        for _ in range(3):
            store.refresh()
        os.mkdir(path)                              # it is back, with a segment
        back = Foreign(path, store.description)
        back.put(0, chain(1, 8)[0])
        back.publish()
        store.refresh()
        assert store.match(chain(1, 8)) == 1
        put(store, chain(2, 9))
        assert readable(store, chain(2, 9)).all()


def test_what_could_not_be_taken_over_is_made_up_for(pair):
    """The index of another store refuses the segment, which it does not know: as when a header
    page cannot be read, nothing of that page 1 may count as seen."""
    store, foreign = pair
    foreign.put(0, chain(1)[0])
    foreign.publish()
    index, store._watch._index = store._watch._index, type(store._index)()
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        store.refresh()
    store._watch._index = index
    assert store.match(chain(1)) == 0 and figures(store)["poll_failures"] == 1
    until(lambda: store.refresh() is not None and store.match(chain(1)) == 1, step=0.1)


@pytest.mark.parametrize("asleep", [1, 3])
def test_epochs_of_a_real_writer(tmp_path, asleep):
    """The same as above, with the pages that a writer itself marks; an epoch lasts a second."""
    with observer(tmp_path) as store, observer(tmp_path) as writer:
        put(writer, chain(1, 100))
        until(lambda: store.refresh() is not None and store.match(chain(1, 100)))
        for epoch in range(asleep + 1):
            put(writer, chain(33, epoch))               # into another header page each
            time.sleep(1.05)
        store.refresh()
        for epoch in range(asleep + 1):
            assert store.match(chain(33, epoch)) == 33
        assert figures(store)["full_reads"] == (1 if asleep == 1 else 2)


def test_writes_to_an_older_segment_are_found_through_the_newest(tmp_path):
    """Two rings write two segments; the newest one's page 1 tells of the other's."""
    with observer(tmp_path) as store, observer(tmp_path) as writer:
        first, second = writer.open_ring(), writer.open_ring()
        blocks = Blocks(1)

        def write(ring, seed):
            blocks.flat(blocks.ids[0])[:] = payload(chain(1, seed)[0])
            ring.write(chain(1, seed), blocks.pool, blocks.ids).wait()

        write(first, 1)
        write(second, 2)
        until(lambda: store.refresh() is not None and store.match(chain(1, 2)) == 1)
        took = []
        for seed in range(3, 23):
            write(first, seed)
            took.append(until(lambda: store.refresh() is not None
                              and store.match(chain(1, seed)) == 1))
        print(f"worst of {len(took)}: {1e3 * max(took):.0f} ms")
        assert sorted(took)[len(took) // 4] < 0.1       # a heartbeat would take up to a second
        assert store.stats()["segments"] == 2
