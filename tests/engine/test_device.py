"""HBM in device memory, on the fake libcuda: the tokens of host memory, from bytes that the CPU
cannot reach by any view; what it computes on is fetched, and what it makes is written back."""
import asyncio
import gc
import threading
from dataclasses import replace

import pytest
from flows import (ATTENTION, LAYOUT, POLICIES, TIMED, assert_all_is_given_back, config,
                   figures_of, model_compute, run, sessions, timed_compute)
from on_device import DEVICE, bytes_of, device, fake, left_behind, opened    # noqa: F401

from kvio.engine.cluster import Cluster, ClusterConfig
from kvio.engine.collectives import CollectiveSetting
from kvio.engine.compute import TimedCompute
from kvio.engine.trace import Tracer
from kvio.engine.workload import run_sessions
from kvio.errors import BackendUnavailable, InvalidArgument, MappingFailed
from kvio.memory import POISON
from kvio.storage import BlockStore
from kvio.transfer import Fabric

COMPUTES = {"model": (model_compute, LAYOUT), "timed": (timed_compute, TIMED)}
# name -> mode, policy, quota
RUNS = {"none": ("none", None, None), "basic": ("basic", None, None),
        "dualpath": ("dualpath", None, None), "split": ("dualpath", "split", None),
        "push": ("dualpath", "push", None), "push_any": ("dualpath", "push_any", None),
        "chunks": ("dualpath", "push", 2e-5)}


def setting(name, layout, **changes):
    mode, policy, quota_s = RUNS[name]
    return mode, config(layout, policy=policy and POLICIES[policy], quota_s=quota_s,
                        attention_time=ATTENTION if quota_s else None, **changes)


def on_host(kind, name, path):
    compute, layout = COMPUTES[kind]
    mode, conf = setting(name, layout)
    return run(mode, None if mode == "none" else path, conf, compute)


@pytest.mark.parametrize("kind", COMPUTES)
@pytest.mark.parametrize("name", RUNS)
def test_tokens_and_hits_are_those_of_host_memory(fake, tmp_path, kind, name):
    compute, layout = COMPUTES[kind]
    mode, conf = setting(name, layout, device=DEVICE)

    def look(cluster, served):
        assert_all_is_given_back(cluster)
        assert left_behind(fake, cluster) == []
        assert all(engine.hbm.device == DEVICE for engine in cluster.decode)
        assert all(space.region.array is None for e in cluster.prefill for space in e.workspaces)

    served = run(mode, None if mode == "none" else tmp_path / "device", conf, compute, look=look)
    assert figures_of(served) == figures_of(on_host(kind, name, tmp_path / "host"))


@pytest.mark.parametrize("kind", COMPUTES)
def test_only_hits_are_fetched_and_only_new_rows_are_written(fake, tmp_path, kind):
    compute, layout = COMPUTES[kind]
    width, block = sum(layout.layer_bytes_per_token), layout.full_block_nbytes
    seen = {}

    def look(cluster, served):
        for side, engines in ("pe", cluster.prefill), ("de", cluster.decode):
            seen[side] = [sum(getattr(e.memory, f"{what}_nbytes") for e in engines)
                          for what in ("fetched", "written")]

    served = run("dualpath", tmp_path, config(layout, device=DEVICE), compute, look=look)
    requests = [r for each in served.values() for r in each]
    assert seen["pe"] == [sum(r.num_hit_tokens for r in requests) * width,
                          sum(r.num_prompt_tokens - r.num_hit_tokens for r in requests) * width]
    assert seen["de"] == [sum(layout.num_blocks(r.num_prompt_tokens) for r in requests) * block,
                          sum(r.num_new_tokens - 1 for r in requests) * width]
    assert 0 not in seen["pe"] + seen["de"]


# ---- that these bytes matter

@pytest.mark.parametrize("kind", COMPUTES)
@pytest.mark.parametrize("where", ["prefill", "decode"])
def test_one_flipped_byte_in_device_memory_is_seen(fake, tmp_path, kind, where):
    """The positive control: spoiled behind everybody's back, just before it is computed on."""
    make, layout = COMPUTES[kind]
    flipped, errors, width = [], [], layout.layer_bytes_per_token[0]

    class Spoils:
        def _prefill_layer(self, state, layer, slot):
            if where == "prefill" and state.num_hits and not flipped:
                bytes_of(fake, slot._region)[slot._start + slot.width - 1] ^= 0x40
                flipped.append(layer)
            return super()._prefill_layer(state, layer, slot)

        def _begin_decode(self, sequence):
            if where == "decode" and sequence.request.num_hit_tokens and not flipped:
                at = sequence.ids[0] * sequence.pool.block_stride + width - 1
                bytes_of(fake, sequence.pool.region)[at] ^= 0x40
                flipped.append(at)
            return super()._begin_decode(sequence)

    base = type(make())
    spoiling = type("Spoiling", (Spoils, base), {})
    arguments = (make().model, LAYOUT) if kind == "model" else (TIMED, 2e-6, 1e-5)

    async def main(store):
        conf = config(layout, num_prefill=1, num_decode=1, device=DEVICE)
        async with Cluster(conf, "basic", store, lambda: spoiling(*arguments)) as cluster:
            served = await run_sessions(cluster, sessions(1), in_step=True)
            errors.append(sum(getattr(e.compute, "num_kv_errors", 0) for e in cluster.engines))
        return served

    with BlockStore.open(tmp_path / "device", layout, segment_bytes=1 << 20) as store:
        served = asyncio.run(main(store))
    right = run("basic", tmp_path / "host", config(layout, num_prefill=1, num_decode=1), make,
                sessions(1))
    assert len(flipped) == 1
    assert figures_of(served) != figures_of(right)      # the logits' margins, or the tokens
    assert bool(errors[0]) == (kind == "timed")


def test_the_device_is_out_of_the_cpus_reach(fake):
    """What would be a forgotten view: there is none to be had."""
    async def main():
        async with Cluster(config(TIMED, device=DEVICE), "none", None, timed_compute) as cluster:
            pools = [cluster.decode[0].hbm.region, cluster.prefill[0].workspaces[0].region]
            assert [region.array for region in pools] == [None, None]
            assert (bytes_of(fake, pools[0]) == POISON).all()
    asyncio.run(main())


def test_prefill_finds_poison_where_kv_is_still_to_be_computed(fake, tmp_path):
    """One slot for all layers and requests: what those left is gone, on the device too."""
    seen = []

    class Looks(TimedCompute):
        def _prefill_layer(self, state, layer, slot):
            fresh = bytes_of(fake, slot._region)[
                slot._start + state.num_hits * slot.width:slot._start
                + len(state.tokens) * slot.width]
            seen.append(bool((fresh == POISON).all()) and len(fresh) > 0)
            super()._prefill_layer(state, layer, slot)

    for name in "dualpath", "split", "push":
        run("dualpath", tmp_path / name, config(
            TIMED, depth=1, device=DEVICE,
            policy=POLICIES[name] if name in POLICIES else None),
            lambda: Looks(TIMED, 2e-6, 1e-5), sessions(2))
    assert len(seen) == 3 * 2 * 3 * TIMED.num_layers and all(seen)


def test_two_parts_come_into_a_layer_that_is_poisoned_once_before_both(fake, tmp_path):
    """On a device that takes a while: whoever comes second waits for it as well."""
    fake.cost("cuMemsetD8Async", run_ns=2_000_000)
    served = run("dualpath", tmp_path / "device", config(TIMED, policy=POLICIES["split"],
                                                         device=DEVICE), timed_compute)
    assert {r.path for rs in served.values() for r in rs} == {"none", "split"}
    assert figures_of(served) == figures_of(on_host("timed", "split", tmp_path / "host"))


def test_the_event_loop_is_not_held_up_by_copies(fake):
    """While what the CPU copies for itself waits for the device, the loop goes on: it is a task
    that lets the device go on."""
    freed = []

    def let_go(who):
        if not freed:
            freed.append(who)
            fake.hold(held=False)

    class Held(TimedCompute):
        def _begin_decode(self, sequence):
            fake.hold()
            self.loop.call_soon_threadsafe(self.loop.call_later, 0.02, let_go, "loop")
            rescue = threading.Timer(10, let_go, ["nobody"])
            rescue.start()
            try:
                return super()._begin_decode(sequence)
            finally:
                rescue.cancel()

    async def main():
        Held.loop = asyncio.get_running_loop()
        async with Cluster(config(TIMED, device=DEVICE), "none", None,
                           lambda: Held(TIMED, 0, 0)) as cluster:
            return await cluster.generate("a", range(40), 3)
    assert asyncio.run(main()).finished and freed == ["loop"]


def test_a_trace_has_the_same_rows(fake, tmp_path):
    def spans(where):
        tracer = Tracer()

        async def main(store):
            async with Cluster(config(TIMED, device=where), "basic", store, timed_compute,
                               tracer=tracer) as cluster:
                await run_sessions(cluster, sessions(1), in_step=True)
        with BlockStore.open(tmp_path / str(where), TIMED) as store:
            asyncio.run(main(store))
        return sorted((e["cat"], e["name"], str(e["args"])) for e in tracer.events()
                      if e["ph"] == "X" and e["name"] != "decode")
    assert spans(None) == spans(DEVICE)


# ---- what does not go together

@pytest.mark.parametrize("changes, word", [
    ({"device": "verbs:mlx5_0"}, "cuda:0"), ({"device": 0}, "cuda:0"), ({"device": ""}, "cuda:0"),
    ({"nic": "verbs"}, "leave nic"), ({"cnic_bytes_per_s": 10**9}, "cnic_bytes_per_s"),
    ({"collectives": CollectiveSetting()}, "collectives")])
def test_settings_that_do_not_go_with_a_device(changes, word):
    with pytest.raises(InvalidArgument, match=word):
        ClusterConfig(TIMED, **{"device": DEVICE, **changes})


def test_modes_and_fabrics_that_do_not_go_with_a_device(tmp_path):
    conf = config(TIMED, device=DEVICE)
    with pytest.raises(InvalidArgument, match="oracle"):
        Cluster(conf, "oracle", None, timed_compute)
    with pytest.raises(InvalidArgument, match="fabric"):
        Cluster(conf, "none", None, timed_compute, Fabric())


def test_a_device_that_is_not_there_opens_nothing(fake):
    async def main():
        async with Cluster(replace(config(TIMED), device="cuda:7"), "none", None, timed_compute):
            pass
    with pytest.raises(BackendUnavailable, match="cuda:7"):
        asyncio.run(main())


def test_two_clusters_share_a_device(fake):
    async def main():
        one, two = (Cluster(config(TIMED, device=DEVICE), "none", None, timed_compute)
                    for _ in range(2))
        async with one, two:
            return [(await cluster.generate("a", range(40), 4)).generated for cluster in (one, two)]
    first, second = asyncio.run(main())
    assert first == second


def test_device_memory_goes_with_the_cluster_and_waits_for_no_garbage_collection(fake, tmp_path):
    before = fake.objects()
    gc.disable()
    try:
        run("dualpath", tmp_path, config(TIMED, policy=POLICIES["push"], device=DEVICE),
            timed_compute)
        assert fake.objects() == before
    finally:
        gc.enable()


def test_a_device_without_the_memory_is_a_typed_error_and_keeps_nothing(fake):
    async def main(**changes):
        async with Cluster(config(TIMED, device=DEVICE, **changes), "none", None,
                           timed_compute) as cluster:
            return (await cluster.generate("a", range(40), 4)).finished

    before = fake.objects()
    with pytest.raises(MappingFailed, match="OUT_OF_MEMORY"):
        asyncio.run(main(hbm_blocks=1 << 23))
    gc.collect()
    assert fake.objects() == before
    assert asyncio.run(main())
