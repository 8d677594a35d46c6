"""What callers do with what is theirs: their arrays, and the names of their models."""
import asyncio
from dataclasses import replace

import numpy as np
from failing import LAYOUT, compute, config, right_tokens

from kvio.engine.cluster import Cluster
from kvio.storage import BlockStore


def test_the_caller_s_prompt_may_be_used_again_at_once(tmp_path):
    """Keys and KV are of the same tokens: else others would find wrong KV under right keys."""
    async def main(store):
        async with Cluster(config("pe"), "dualpath", store, compute) as cluster:
            prompt = np.arange(20, dtype=np.uint32)
            first = prompt.tolist()
            serving = asyncio.ensure_future(cluster.generate("s", prompt, 4))
            await asyncio.sleep(0)
            prompt[:] = 99
            assert (await serving).generated == right_tokens(first, 4)
            again = await cluster.generate("s", first, 4)
            assert again.generated == right_tokens(first, 4) and again.num_hit_tokens
            assert not any(engine.compute.num_kv_errors for engine in cluster.engines)
    with BlockStore.open(tmp_path, LAYOUT, segment_bytes=1 << 17) as store:
        asyncio.run(main(store))


def test_models_and_sessions_with_slashes_in_their_names_share_nothing():
    names = [replace(config("pe"), model_name=model).namespace(session)
             for model, session in (("m", "a/b"), ("m/a", "b"), ("m/a/b", ""), ("", "m/a/b"))]
    assert len(set(names)) == 4
