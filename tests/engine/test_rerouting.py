"""What a request's next try reads after each kind of failure: the rules, as tables of examples."""
import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from failing import LAYOUT, in_link_time
from kvio.engine.node import Buffer
from kvio.engine.request import EngineRequest
from kvio.engine.rerouting import PatientRing, TryAgain, parts_until, parts_without, recovered
from kvio.errors import BlocksMissing, Busy, Closed, OutOfBlocks, ReadStalled, TransferError
from kvio.layout import block_keys, root_key
from kvio.memory import BlockPool
from kvio.scheduler import Part

NODES = {side: SimpleNamespace(name=name, node_id=node_id) for side, name, node_id in (
    ("pe", "pe0", 0), ("de", "de0", 2), ("h0", "pe1", 1), ("h1", "de1", 3))}


def made(text) -> tuple:
    """"de:0-8 pe:8-20" as parts."""
    parts = []
    for word in text.split():
        side, _, span = word.partition(":")
        start, stop = span.split("-")
        parts.append(Part(side, (int(start), int(stop)), NODES[side].node_id))
    return tuple(parts)


@pytest.mark.parametrize("parts, num_tokens, left", [
    ("de:0-8 pe:8-20", 20, "de:0-8 pe:8-20"),
    ("de:0-8 pe:8-20", 12, "de:0-8 pe:8-12"),
    ("de:0-8 pe:8-20", 8, "de:0-8"),
    ("de:0-8 pe:8-20", 4, "de:0-4"),
    ("de:0-8 pe:8-20", 0, ""),
])
def test_fewer_hits(parts, num_tokens, left):
    assert parts_until(made(parts), num_tokens) == made(left)


@pytest.mark.parametrize("parts, side, others, left", [
    ("pe:0-20", "pe", "de", "de:0-20"),                     # the other side reads
    ("de:0-20", "de", "pe", "pe:0-20"),
    ("pe:0-20", "pe", "", ""),                              # nobody can: it is computed
    ("de:0-8 pe:8-20", "pe", "", "de:0-20"),                # the neighbour reads
    ("de:0-8 pe:8-20", "de", "", "pe:0-20"),
    ("de:0-8 h0:8-12 pe:12-20", "h0", "", "de:0-12 pe:12-20"),
    ("h0:0-8 pe:8-20", "h0", "de", "de:0-8 pe:8-20"),       # the DE's part is the first
    ("pe:0-8 h0:8-20", "h0", "de", "pe:0-20"),              # and no other
    ("de:0-8 h0:8-20", "h0", "pe", "de:0-8 pe:8-20"),
])
def test_without_a_storage_nic(parts, side, others, left):
    others = [(name, NODES[name].node_id) for name in others.split()]
    assert parts_without(made(parts), side, others) == made(left)


MISSING, STALLED = BlocksMissing("gone", 1), ReadStalled("pe0 stalls", "pe0")
FAILED, CLOSED = TransferError(5, "failed"), Closed("closed")


@pytest.mark.parametrize("failures, parts, figures", [
    ([MISSING], "de:0-4", ["replans"]),
    ([STALLED], "de:0-20", ["read_failovers"]),
    ([STALLED, ReadStalled("so does de0", "de0")], "", ["read_failovers"] * 2),
    ([STALLED, MISSING], "de:0-4", ["read_failovers", "replans"]),
    ([FAILED], "de:0-8 pe:8-20", ["retries"]),
    ([FAILED, CLOSED], "de:0-8 pe:8-20", ["retries"] * 2),
    ([FAILED, FAILED, FAILED], None, ["retries"] * 2),
    ([FAILED, MISSING, FAILED, STALLED, FAILED], None,       # only failed transfers are counted
     ["retries", "replans", "retries", "read_failovers"]),
    ([ArithmeticError("none of ours")], None, []),
])
def test_the_next_try(failures, parts, figures):
    again, now, seen = TryAgain(NODES, 4, 3), made("de:0-8 pe:8-20"), []
    for failure in failures:
        if failure is STALLED and not any(part.side == "pe" for part in now):
            now = made("pe:0-4")
        following = again.after(now, failure)
        if following is None:
            break
        now = following.parts
        seen.append(following.figure[4:])
        assert following.why == str(failure)
        assert following.num_hit_tokens == (now[-1].tokens[1] if now else 0)
    assert seen == figures
    assert (following is None) == (parts is None) and (parts is None or now == made(parts))


def test_the_error_has_all_failures_as_its_causes():
    again, failures = TryAgain(NODES, 4, 3), [TransferError(5, f"try {i}") for i in range(3)]
    for failure in failures:
        again.after((), failure)
    error = again.error(failures[-1])
    assert "3 tries have failed, the last one: try 2" in str(error) and error.errno == 5
    for failure in reversed(failures):
        error = error.__cause__
        assert error is failure
    assert TryAgain(NODES, 4, 1).error(FAILED) is FAILED


# ---- stalled reads

class Transfer:
    def __init__(self, ring, nbytes):
        self.ring, self.nbytes = ring, nbytes
        self.future = asyncio.get_running_loop().create_future()

    def end(self):
        self.ring.completed += self.nbytes
        self.ring.outstanding.remove(self)
        self.future.set_result(1)

    def __await__(self):
        return asyncio.shield(self.future).__await__()


class Ring:
    """Completes when the test says so."""

    def __init__(self):
        self.completed, self.outstanding = 0, []

    def read(self, keys, pool, ids):
        self.outstanding.append(Transfer(self, 100))
        return self.outstanding[-1]

    def stats(self):
        return {"read_bytes": self.completed}

    @property
    def read_queue(self):
        return SimpleNamespace(nbytes=sum(each.nbytes for each in self.outstanding))


def patient(ring, strays, told):
    return PatientRing("pe0", ring, 0.02, strays, lambda: told.append("drained"))


def test_a_long_queue_is_no_stall():
    async def main(_):
        ring, strays = Ring(), set()
        before = [ring.read(0, 0, [0]) for _ in range(6)]
        reading = asyncio.ensure_future(patient(ring, strays, []).read(0, 0, [0]))
        for transfer in before:                     # each takes nearly as long as patience lasts
            await asyncio.sleep(0.012)
            transfer.end()
        assert not reading.done()
        ring.outstanding[0].end()
        assert await reading == 1 and not strays

    in_link_time(main)


@pytest.mark.parametrize("others_go_on", [False, True])
def test_a_read_that_stalls_is_given_up_and_keeps_its_memory(others_go_on):
    """Also when the ring serves those behind it, and only this one hangs."""
    async def main(_):
        ring, strays, told = Ring(), set(), []

        async def traffic():
            while others_go_on:
                transfer = ring.read(0, 0, [0])
                await asyncio.sleep(0.005)
                transfer.end()
        busy = asyncio.ensure_future(traffic())
        reading = asyncio.ensure_future(patient(ring, strays, told).read(0, 0, [0]))
        await asyncio.sleep(0)
        mine = ring.outstanding[-1]
        with pytest.raises(ReadStalled, match="pe0 .* read of 1 blocks .* 0.02 s") as failure:
            await asyncio.wait_for(reading, 10)
        busy.cancel()
        assert failure.value.nic == "pe0" and len(strays) == 1 and told == []
        mine.end()
        await asyncio.sleep(0.001)
        assert not strays and told == ["drained"]

    in_link_time(main)


def test_blocks_of_a_stray_go_to_who_waits_for_them():
    async def main(_):
        with BlockPool(LAYOUT, 4) as pool:
            ring, strays, buffer = Ring(), set(), Buffer(pool)
            ids = await buffer.acquire(4)
            pool.pin(ids)                           # as a read does, until it has drained
            reading = PatientRing("pe0", ring, 0.01, strays, buffer.regrant)
            with pytest.raises(ReadStalled):
                await reading.read(0, pool, ids)
            buffer.release(ids)
            waiting = asyncio.ensure_future(buffer.acquire(2))
            await asyncio.sleep(0.001)
            assert not waiting.done() and pool.num_free == 0
            with pytest.raises(OutOfBlocks):
                pool.alloc(1)
            pool.unpin(ids)
            ring.outstanding[0].end()
            assert len(await asyncio.wait_for(waiting, 5)) == 2

    in_link_time(main)


# ---- queue pairs

def test_recovery_waits_until_what_is_in_flight_has_flushed():
    class Peer:
        def __init__(self, answers):
            self.answers = answers

        def reset(self):
            answer = self.answers.pop(0)
            if answer is not None:
                raise answer

    mover = SimpleNamespace(peers={
        0: Peer([Busy("in flight"), Busy("in flight"), None]),
        1: Peer([None, None, None]), 2: Peer([Closed("gone")] * 3)})
    asyncio.run(recovered(mover))
    assert not any(peer.answers for peer in mover.peers.values())


def test_tokens_of_what_is_left_reach_the_origin():
    async def main():
        prompt = np.arange(9, dtype=np.uint32)
        first = EngineRequest(1, "a", prompt, 5, block_keys(prompt, LAYOUT, b"m"),
                              root_key(LAYOUT, b"m"))
        assert first.rest(LAYOUT) is first          # nothing is there yet
        first.add_token(100, 1.0)
        second = first.rest(LAYOUT)
        second.add_token(101, 1.0)
        second.add_token(102, 1.0)
        second.note("num_reroutes", "de0 has died")
        third = second.rest(LAYOUT)
        third.add_token(103, 1.0)
        assert first.generated == [100, 101, 102, 103] and not first.finished
        assert third.prompt.tolist() == [*range(9), 100, 101, 102]
        assert third.num_new_tokens == 2 and third.origin is first
        assert (third.keys == block_keys(third.prompt, LAYOUT, b"m")).all()
        third.add_token(104, 1.0)
        assert first.finished and third.finished
        assert first.num_reroutes == 1 and first.mended == ["reroutes: de0 has died"]

    asyncio.run(main())
