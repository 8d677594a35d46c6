"""The reference engine end to end: real files, rings and NIC queues under a tiny exact model, and
under timed stand-in compute. What the demo shows at length is proven here, byte for byte."""
import asyncio
import gc
import glob

import numpy as np
import pytest

from kvio import completion
from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.compute import ModelCompute, TimedCompute
from kvio.engine.metrics import figures
from kvio.engine.model import LlamaModel
from kvio.engine.request import Session, Turn, predicted_hit_tokens
from kvio.engine.workload import run_sessions
from kvio.errors import InvalidArgument, TransferError
from kvio.layout import BlockLayout, block_keys
from kvio.loader import persist_plan, read_plan, traffic
from kvio.memory import POISON, BlockAllocator, BlockPool
from kvio.storage import BlockStore
from kvio.storage import format as fmt

MODEL = LlamaModel.random(3, num_layers=3, exact=True)
LAYOUT = BlockLayout.from_config(MODEL.config(), "float16", block_tokens=16)
TIMED = BlockLayout(3, 16, 64)


def sessions(num=3, turns=3, vocabulary=128, append=40, new=9):
    draw = np.random.default_rng(5)
    return [Session(f"agent{i}", tuple(Turn(tuple(draw.integers(0, vocabulary, append + 7 * t)),
                                            new) for t in range(turns))) for i in range(num)]


def config(layout=LAYOUT, **changes):
    return ClusterConfig(layout, **{"buffer_blocks": 64, "hbm_blocks": 96, "max_tokens": 512,
                                    **changes})


def model_compute():
    return ModelCompute(MODEL, LAYOUT)


def timed_compute():
    return TimedCompute(TIMED, 2e-6, 1e-5)


async def serve(mode, store, made, conf, compute, look=None, in_step=True):
    async with Cluster(conf, mode, store, compute) as cluster:
        served = await run_sessions(cluster, made, in_step=in_step)
        if look is not None:
            look(cluster, served)
        result = figures(cluster, served, 1.0)
        errors = sum(getattr(e.compute, "num_kv_errors", 0) for e in cluster.engines)
    return served, result, errors


def run(mode, path=None, made=None, conf=None, compute=model_compute, look=None, in_step=True,
        **options):
    """One mode over a fresh (or given) store; ({name: requests}, figures, KV errors)."""
    made, conf = made or sessions(), conf or config()
    if mode == "none":
        return asyncio.run(serve(mode, None, made, conf, compute, look, in_step))
    with BlockStore.open(path, conf.layout, segment_bytes=1 << 20, **options) as store:
        return asyncio.run(serve(mode, store, made, conf, compute, look, in_step))


def tokens(served):
    return {name: [r.generated for r in requests] for name, requests in served.items()}


def margins(served):
    return {name: [r.margins for r in requests] for name, requests in served.items()}


def test_all_modes_generate_the_same_tokens_bit_for_bit(tmp_path):
    none, _, _ = run("none")
    for mode in ("basic", "dualpath"):
        served, result, _ = run(mode, tmp_path / mode)
        assert tokens(served) == tokens(none) and margins(served) == margins(none)
        found = {name: [r.num_hit_tokens for r in rs] for name, rs in served.items()}
        assert found == {s.name: predicted_hit_tokens(s, LAYOUT) for s in sessions()}
        assert result["hit_tokens"] > 0 and result["replans"] == 0
    assert result["paths"]["pe"] and result["paths"]["de"]      # dualpath took both


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_stored_kv_is_bitwise_the_computed_kv(tmp_path, backend):
    if backend == "uring":
        from require import need
        need("uring")
    served, _, _ = run("dualpath", tmp_path, backend=backend)
    with BlockStore.open(tmp_path, LAYOUT, backend=backend) as store, \
            BlockPool(LAYOUT, 32) as pool:
        for name, requests in served.items():
            last = requests[-1]
            ids = np.concatenate([last.prompt, last.generated[:-1]]).astype(np.uint32)
            keys = block_keys(ids, LAYOUT, config().namespace(name))
            assert store.match(keys) == len(keys) > 0
            held = pool.alloc(len(keys))
            assert store.read(keys, pool, held).wait() == len(keys)
            caches = MODEL.new_caches(len(ids))
            MODEL.forward(ids, 0, caches)
            for layer in range(LAYOUT.num_layers):
                loaded = np.concatenate([pool.layer(i, layer) for i in held])
                assert (loaded == MODEL.pack(caches[layer][:len(loaded)])).all()
            pool.free(held)


@pytest.mark.parametrize("mode", ["basic", "dualpath"])
def test_bytes_at_every_port_are_those_of_the_plans(tmp_path, mode):
    """Counted where packets are copied, against the traffic matrix summed over requests."""
    seen = {}

    def look(cluster, served):
        expected = {(side, port): 0 for side in ("pe", "de")
                    for port in ("tx", "rx", "snic_read", "snic_write")}
        for requests in served.values():
            for r in requests:
                moved = traffic(read_plan(LAYOUT, r.parts, r.num_hit_tokens,
                                          r.num_prompt_tokens - r.num_hit_tokens).steps, LAYOUT)
                stored = LAYOUT.num_full_blocks(r.num_prompt_tokens + len(r.generated) - 1)
                for block in range(r.num_hit_tokens // 16, stored):
                    moved += traffic(persist_plan(LAYOUT, block, block >= len(r.keys)), LAYOUT)
                for port, nbytes in moved.items():
                    expected[port] += nbytes
        for side, engine in (("pe", cluster.prefill[0]), ("de", cluster.decode[0])):
            nic, ring = engine.nic.stats(), engine.ring.stats()
            seen.update({(side, "tx"): nic["tx_bytes"], (side, "rx"): nic["rx_bytes"],
                         (side, "snic_read"): ring["read_bytes"],
                         (side, "snic_write"): ring["write_bytes"]})
        assert seen == expected

    run(mode, tmp_path, look=look)
    assert seen["pe", "tx"] and seen["de", "snic_write"]
    assert bool(seen["de", "snic_read"]) == (mode == "dualpath")


def test_a_dropped_packet_shows_in_bytes_and_counter(tmp_path):
    """The positive control of the test above: counters count copies, not intentions."""
    def run_with(drop):
        counters = {}

        async def main(store):
            async with Cluster(config(TIMED), "basic", store, timed_compute) as cluster:
                if drop:
                    from kvio._ext import nic as ext
                    cluster.prefill[0].nic._ext._fault(ext.DROP, 1)
                await run_sessions(cluster, sessions(1, 1), in_step=True)
                counters["rx"] = sum(e.nic.stats()["rx_bytes"] for e in cluster.engines)
                return sum(e.compute.num_kv_errors for e in cluster.engines)

        with BlockStore.open(tmp_path / str(drop), TIMED) as store:
            return asyncio.run(main(store)), counters["rx"]

    good_errors, good_rx = run_with(False)
    bad_errors, bad_rx = run_with(True)
    assert good_errors == 0 and bad_errors > 0          # wrong KV was seen
    assert 0 < good_rx - bad_rx <= 4096                 # one packet did not arrive


def flip(path, key, offset=1):
    """Flip one payload byte of a stored block on disk."""
    geometry = fmt.read_description(str(path)).geometry
    for name in glob.glob(str(path / "segment-*")):
        with open(name, "r+b") as file:
            data = file.read(geometry.payload_offset)
            for slot in range(geometry.slots):
                at = fmt.FIRST_HEADER_PAGE * fmt.PAGE + slot * fmt.HEADER_NBYTES
                if key in data[at:at + fmt.HEADER_NBYTES]:
                    file.seek(geometry.payload_offset + slot * geometry.slot_stride + offset)
                    byte = file.read(1)[0]
                    file.seek(-1, 1)
                    file.write(bytes([byte ^ 0x40]))
                    return True
    return False


def second_run(path, flipped, **options):
    """Agents resume from what an earlier run stored, with a byte of the first block flipped."""
    first = sessions(1, 1)
    served, _, _ = run("basic", path, first, **options)
    done = served["agent0"][0]
    context = tuple(int(t) for t in (*done.prompt, *done.generated))
    if flipped:
        assert flip(path, done.keys[0]["key"].tobytes())
    later = [Session("agent0", (Turn(tuple(range(20)), 6),), context)]
    return run("basic", path, later, **options)


def test_without_verification_one_flipped_byte_changes_the_logits(tmp_path):
    options = {"verify": "never", "durability": "durable"}
    good, _, _ = second_run(tmp_path / "good", False, **options)
    bad, result, _ = second_run(tmp_path / "bad", True, **options)
    assert good["agent0"][0].num_hit_tokens == bad["agent0"][0].num_hit_tokens > 0
    assert margins(good) != margins(bad)                # the stored bytes are really used


def test_with_verification_a_flipped_byte_is_a_miss_and_the_tokens_stay_right(tmp_path):
    good, _, _ = second_run(tmp_path / "good", False)
    bad, result, _ = second_run(tmp_path / "bad", True)
    request = bad["agent0"][0]
    assert request.num_replans == 1 and request.num_hit_tokens == 0
    assert tokens(good) == tokens(bad) and margins(good) == margins(bad)


def test_freed_buffers_and_hbm_hold_nothing_but_poison(tmp_path):
    def look(cluster, served):
        for engine in cluster.engines:
            pool = engine.buffer.pool
            assert pool.num_free == pool.num_blocks
            assert (pool.region.array == POISON).all()
        for engine in cluster.decode:
            assert engine.hbm.num_free == engine.hbm.num_blocks
            assert (engine.hbm.region.array == POISON).all()
            assert engine.promised_blocks == engine.num_requests == engine.num_tokens == 0
        for engine in cluster.prefill:
            assert engine.num_requests == engine.num_tokens == 0
            assert engine.read_queue_tokens == 0

    run("dualpath", tmp_path, look=look)
    assert completion.in_flight() == 0


def test_prefill_finds_poison_where_kv_is_still_to_be_computed(tmp_path):
    """HBM slots are used again by later layers and requests; what those left must be gone."""
    seen = []

    class Looks(TimedCompute):
        async def prefill_layer(self, state, layer, slot, ready_s):
            fresh = slot.rows(state.num_hits, len(state.tokens))
            seen.append(bool((fresh == POISON).all()))
            return await super().prefill_layer(state, layer, slot, ready_s)

    run("dualpath", tmp_path, sessions(2), config(TIMED, depth=1),
        lambda: Looks(TIMED, 2e-6, 1e-5))
    assert len(seen) == 2 * 3 * TIMED.num_layers and all(seen)


@pytest.mark.parametrize("decode", [1, 2])
def test_stand_in_compute_checks_every_record_it_gets(tmp_path, decode):
    conf = config(TIMED, num_decode=decode)
    results = [run(mode, tmp_path / mode, sessions(5), conf, timed_compute)
               for mode in ("basic", "dualpath")]
    assert [errors for _, _, errors in results] == [0, 0]
    assert tokens(results[0][0]) == tokens(results[1][0])
    none, _, _ = run("none", None, sessions(5), conf, timed_compute)
    assert tokens(none) == tokens(results[0][0])


def test_small_buffers_make_requests_wait_not_fail(tmp_path):
    """Every pool just holds one request: all must take turns, in any interleaving."""
    made = sessions(6)
    longest = max(sum(len(t.append) + t.num_new_tokens for t in s.turns) for s in made)
    blocks = LAYOUT.num_blocks(longest)
    conf = config(TIMED, buffer_blocks=blocks + 1, hbm_blocks=blocks, depth=1)
    served, _, errors = run("dualpath", tmp_path, made, conf, timed_compute, in_step=False)
    assert errors == 0 and all(r.finished for rs in served.values() for r in rs)


def test_overloaded_prefill_engines_make_requests_wait(tmp_path):
    """beta admits one request an engine at a time; two engines share the work."""
    conf = config(TIMED, num_prefill=2, beta=1, alpha=1)
    seen = set()

    def look(cluster, served):
        seen.update(r.reason.split("PE: ")[1].split(" reading")[0]
                    for rs in served.values() for r in rs)
        assert all(e.nic.stats()["rx_bytes"] for e in cluster.prefill)

    served, _, errors = run("dualpath", tmp_path, sessions(6), conf, timed_compute, look,
                            in_step=False)
    assert errors == 0 and all(r.finished for rs in served.values() for r in rs)
    assert seen and seen <= {"short", "long"}


def test_a_full_store_costs_reuse_and_nothing_else(tmp_path):
    none, _, _ = run("none")

    def look(cluster, served):
        engines = cluster.decode        # whether a block is refused or evicted is a race
        assert sum(e.num_persisted_blocks + e.num_persist_failures for e in engines) > 9

    served, result, _ = run("basic", tmp_path, look=look, capacity_bytes=3 * LAYOUT.stride)
    assert tokens(served) == tokens(none)
    # In step: all three agents have stored three blocks and more before the first comes again.
    reuse = sum(sum(predicted_hit_tokens(s, LAYOUT)) for s in sessions())
    assert result["hit_tokens"] < reuse


def test_a_failing_nic_fails_the_request_by_name_and_gives_everything_back(tmp_path):
    from kvio._ext import nic as ext

    async def main(store):
        async with Cluster(config(TIMED, max_attempts=1), "basic", store,
                           timed_compute) as cluster:
            cluster.prefill[0].nic._ext._fault(ext.STATUS, 3, 11)       # REM_OP_ERR
            with pytest.raises(TransferError, match="REM_OP_ERR"):
                await cluster.generate("agent", range(50), 4)
            for engine in cluster.engines:
                assert engine.buffer.pool.num_free == engine.buffer.pool.num_blocks
                assert engine.num_requests == engine.num_tokens == 0
            assert cluster.decode[0].hbm.num_free == cluster.decode[0].hbm.num_blocks
            request = await cluster.generate("agent", range(50), 4)     # its peers work again
            assert request.finished

    with BlockStore.open(tmp_path, TIMED) as store:
        asyncio.run(main(store))
    assert completion.in_flight() == 0


@pytest.mark.parametrize("steps", [1, 3, 10, 30, 60, 100])
def test_cancelling_at_any_moment_leaves_nothing_behind(tmp_path, steps):
    async def main(store):
        async with Cluster(config(TIMED), "dualpath", store, timed_compute) as cluster:
            task = asyncio.ensure_future(run_sessions(cluster, sessions(4)))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            for engine in cluster.engines:
                assert engine.buffer.pool.num_free == engine.buffer.pool.num_blocks
                assert engine.num_requests == engine.num_tokens == 0
                assert engine.waiting_read_tokens == 0
            assert cluster.scheduler.num_waiting == 0

    with BlockStore.open(tmp_path, TIMED) as store:
        asyncio.run(main(store))
    assert completion.in_flight() == 0


def test_a_closed_cluster_leaves_no_memory_to_the_garbage_collector(tmp_path):
    gc.collect()
    gc.disable()
    try:
        run("dualpath", tmp_path, conf=config(TIMED), compute=timed_compute)
        pools = [o for o in gc.get_objects() if isinstance(o, BlockAllocator)]
        assert pools == []
    finally:
        gc.enable()


def test_a_failing_decode_step_fails_its_batch_and_not_the_engine():
    class FailsOnce(TimedCompute):
        num_steps = 0

        async def decode_step(self, sequences):
            FailsOnce.num_steps += 1
            if FailsOnce.num_steps == 1:
                raise ArithmeticError("this step")
            return await super().decode_step(sequences)

    async def main():
        async with Cluster(config(TIMED), "none", None,
                           lambda: FailsOnce(TIMED, 2e-6, 1e-5)) as cluster:
            with pytest.raises(ArithmeticError, match="this step"):
                await cluster.generate("agent", range(50), 4)
            request = await asyncio.wait_for(cluster.generate("agent", range(50), 4), 30)
            assert request.finished
    asyncio.run(main())


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_cluster_that_cannot_be_opened_closes_what_it_has_opened(tmp_path):
    uneven = BlockLayout(3, 16, [64, 32, 64])

    async def main(store):
        with pytest.raises(InvalidArgument, match="equal size"):
            async with Cluster(config(uneven), "basic", store, timed_compute):
                pass

    with BlockStore.open(tmp_path, uneven) as store:
        asyncio.run(main(store))
        assert store.stats()["rings"] == {}
    gc.collect()                                        # a NIC that was left open warns here


def test_bad_requests_are_refused(tmp_path):
    async def main():
        async with Cluster(config(hbm_blocks=2), "none", None, model_compute) as cluster:
            with pytest.raises(InvalidArgument, match="hbm_blocks"):
                await asyncio.wait_for(cluster.generate("a", range(33), 1), 30)
        async with Cluster(config(), "none", None, model_compute) as cluster:
            for prompt, new in ((range(600), 1), ([], 1), ([1], 0), ([-1], 1)):
                with pytest.raises(InvalidArgument):
                    await cluster.generate("a", prompt, new)
        with pytest.raises(InvalidArgument):
            Cluster(config(), "fast", None, model_compute)
        with pytest.raises(InvalidArgument):
            Cluster(config(), "basic", None, model_compute)
        with pytest.raises(InvalidArgument):
            ModelCompute(MODEL, TIMED)
    asyncio.run(main())
