"""LMCache's own StorageManager with kvio as its second tier: one process of test_lmcache_real.py.

    python lmcache_driver.py store|load '{"path": .., "shape": .., "first": .., "count": .., ..}'

Prints one line of JSON.
"""
import json
import sys
import time

import torch
from lmcache.v1.distributed.api import (GroupedObjectKeys, MemoryLayoutDesc, ObjectKey,
                                        PrefetchTaskSpec)
from lmcache.v1.distributed.config import parse_args
from lmcache.v1.distributed.storage_manager import StorageManager


def manager(task):
    spec = {"type": "native_plugin", "module_path": "kvio.integrations.lmcache",
            "class_name": "KvioConnector",
            "adapter_params": {"path": task["path"], **task.get("params", {})},
            **task.get("adapter", {})}
    return StorageManager(parse_args(["--l1-size-gb", "0.125", "--eviction-policy", "LRU",
                                      "--l2-adapter", json.dumps(spec)]))


def keys_of(task):
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    return [ObjectKey(chunk_hash=i.to_bytes(32, "big"), model_name="org/model", kv_rank=rank,
                      object_group_id=task.get("group", 0))
            for i in range(task["first"], task["first"] + task["count"])]


def content(key, shape):
    seed = int.from_bytes(key.chunk_hash, "big") * 10 + key.object_group_id
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def store(task, storage, keys, layout):
    objects = storage.reserve_write(keys, layout)
    for key, obj in objects.items():
        obj.tensor.copy_(content(key, task["shape"]))
    storage.finish_write(keys)
    adapter, total = storage.l2_adapters()[0][1], sum(o.get_size() for o in objects.values())
    until = time.monotonic() + 20
    while adapter.get_usage().total_bytes_used < total and time.monotonic() < until:
        if task.get("fails"):
            break
        time.sleep(0.01)
    if task.get("fails"):                       # nothing of LMCache's tells when it has given up
        time.sleep(1.0)
    if task.get("delete"):
        adapter.delete(keys[:task["delete"]])
    return {"reserved": len(objects), "used": adapter.get_usage().total_bytes_used}


def load(task, storage, keys, layout):
    handle = storage.submit_prefetch_task(PrefetchTaskSpec(
        [GroupedObjectKeys(keys, task.get("group", 0), layout)]))
    assert storage.wait_prefetch_status(handle, 30)
    found = storage.query_prefetch_status(handle)
    hits = found.hit_cells[0].popcount()
    good = keys[:hits]
    with storage.read_prefetched_results(good) as objects:
        equal = [torch.equal(obj.tensor.view(task["shape"]), content(key, task["shape"]))
                 for key, obj in zip(good, objects)]
    storage.finish_read_prefetched(good)
    return {"hits": hits, "l1_hits": found.l1_hit_count, "l2_hits": found.l2_hit_count,
            "equal": equal}


def main():
    task = json.loads(sys.argv[2])
    layout = MemoryLayoutDesc([torch.Size(task["shape"])], [torch.bfloat16])
    storage = manager(task)
    connector = storage.l2_adapters()[0][1]._client
    assert type(connector).__module__ == "kvio.integrations.lmcache"
    out = {"store": store, "load": load}[sys.argv[1]](task, storage, keys_of(task), layout)
    figures = connector.stats()
    storage.close()
    print(json.dumps({**out, "direct": figures["direct_chunks"],
                      "staged": figures["staged_chunks"]}))


if __name__ == "__main__":
    main()
