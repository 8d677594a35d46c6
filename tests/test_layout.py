"""Layouts: the models' byte figures, slicing without copies, and what is refused."""
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio._ext.block import gather_into
from kvio.errors import InvalidArgument
from kvio.layout import (READ, SGE_DTYPE, WR_DTYPE, WRITE, BlockLayout, LayerDescriptors,
                         Side)

# Bytes per token over all layers, as published or computed from the models' configs.
FIGURES = {
    "deepseek-v3.2": 40016, "deepseek-v3.2-indexer": 48068, "deepseek-27b": 19200,
    "qwen2.5-32b": 262144, "llama-3.1-8b": 131072, "llama-3.1-70b": 327680,
    "qwen3-235b-a22b": 96256, "gpt-oss-120b": 18432, "smollm2-135m": 23040,
}


@pytest.mark.parametrize("name", FIGURES)
def test_presets_have_the_published_bytes_per_token(name):
    layout = BlockLayout.preset(name)
    assert sum(layout.layer_bytes_per_token) == FIGURES[name]
    assert layout.full_block_nbytes == 64 * FIGURES[name]


def test_the_papers_read_of_v32():
    """32.7k tokens: 511 blocks, 1.31 GB, 31,171 Layer Blocks of 41,984 bytes."""
    layout = BlockLayout.preset("deepseek-v3.2")
    assert layout.layer_block_nbytes(0) == 41984
    assert 511 * layout.num_layers == 31171
    assert round(511 * layout.full_block_nbytes / 1e9, 2) == 1.31


def test_mha_is_gqa_with_all_heads_and_head_dim_has_a_default():
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    assert BlockLayout.from_config(config, "float32").bytes_per_token == 2 * 4 * 16 * 4
    gqa = {**config, "num_key_value_heads": 1, "head_dim": 32}
    assert BlockLayout.from_config(gqa).bytes_per_token == 2 * 1 * 32 * 2


def test_mla_counts_latent_rope_and_indexer():
    config = {"num_hidden_layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert BlockLayout.from_config(config, "bfloat16").bytes_per_token == 1152
    indexed = {**config, "index_head_dim": 128}
    assert BlockLayout.from_config(indexed, "float8_e4m3").bytes_per_token == 704
    assert BlockLayout.from_config(indexed, "fp8_ds_mla").bytes_per_token == 788


@pytest.mark.parametrize("arguments", [
    (0, 64, 8), (2, 0, 8), (2, 64, 0), (2, 64, -1), (2, 64, [8]), (2, 64, [8, 0]), (True, 64, 8),
    (1 << 40, 64, 8), (2, 1 << 40, 8), (2, 64, 2.5), (2, 64, None), (2.0, 64, 8), (1, 64, 1 << 30),
])
def test_impossible_layouts_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        BlockLayout(*arguments)


@pytest.mark.parametrize("config, dtype, layers", [
    ({}, "bfloat16", "all"),
    ({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}, "float7", "all"),
    ({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}, "float16", "some"),
    ({"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8}, "fp8_ds_mla", "all"),
])
def test_unusable_configs_are_refused(config, dtype, layers):
    with pytest.raises(InvalidArgument):
        BlockLayout.from_config(config, dtype, layers=layers)
    with pytest.raises(InvalidArgument, match="llama-3.1-8b"):
        BlockLayout.preset("no such model")


per_layer = st.lists(st.integers(1, 300), min_size=1, max_size=7)


@given(per_layer, st.integers(1, 80))
def test_layer_blocks_tile_the_full_block(widths, tokens):
    layout = BlockLayout(len(widths), tokens, widths)
    sizes = [layout.layer_block_nbytes(layer) for layer in range(len(widths))]
    assert layout.layer_offsets == tuple(np.cumsum([0, *sizes]))
    assert layout.full_block_nbytes == sum(sizes) == layout.layer_offsets[-1]
    assert layout.stride % 4096 == 0 and 0 <= layout.stride - layout.full_block_nbytes < 4096
    again = BlockLayout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout and again.fingerprint == layout.fingerprint


def test_uniform_layers_are_one_layout_however_they_are_written():
    assert BlockLayout(3, 64, [8, 8, 8]) == BlockLayout(3, 64, 8)
    fingerprints = {BlockLayout(n, t, b).fingerprint
                    for n in (1, 2) for t in (16, 64) for b in (8, 16)}
    assert len(fingerprints) == 8


def test_wr_dtype_matches_the_c_struct_field_by_field(ext_fields):
    for dtype, name in ((WR_DTYPE, "kvio_wr"), (SGE_DTYPE, "kvio_sge")):
        fields = {field: (dtype.fields[field][1], dtype.fields[field][0].itemsize)
                  for field in dtype.names}
        assert fields == ext_fields[name]


@pytest.fixture
def ext_fields():
    from kvio._ext.block import struct_fields
    return struct_fields()


def expected_addresses(side, ids, count, layer):
    ids = range(count) if ids is None else ids
    return [side.base + int(i) * side.block_stride + side.layer_offsets[layer] for i in ids]


@given(per_layer.map(lambda w: w[:4]), st.integers(1, 9), st.integers(1, 40), st.data())
def test_descriptors_say_where_every_layer_of_every_block_lies(widths, tokens, num_tokens, data):
    layout = BlockLayout(len(widths), tokens, widths)
    count = layout.num_blocks(num_tokens)
    ids = np.array(data.draw(st.permutations(range(count + 3)))[:count], np.int64)
    pool = Side(1 << 40, layout.stride, layout.layer_offsets[:-1], 7)
    work = Side(1 << 41, max(widths) * tokens + 64, tuple(64 * i for i in range(len(widths))), 9)
    descriptors = LayerDescriptors(READ, layout, work, None, pool, ids, num_tokens)
    layers = data.draw(st.lists(st.integers(0, len(widths) - 1), max_size=6))
    for layer in [0, *layers]:
        assert descriptors.layer(layer) is descriptors
        wrs = descriptors.wrs.copy()                    # as a post copies them
        with np.errstate(over="ignore"):
            wrs["local_addr"] += np.uint64(descriptors.local_offset % 2**64)
            wrs["remote_addr"] += np.uint64(descriptors.remote_offset % 2**64)
        width = widths[layer]
        assert wrs["local_addr"].tolist() == expected_addresses(work, None, count, layer)
        assert wrs["remote_addr"].tolist() == expected_addresses(pool, ids, count, layer)
        assert wrs["length"].tolist()[:-1] == [tokens * width] * (count - 1)
        assert wrs["length"].sum() == num_tokens * width == descriptors.nbytes
        assert set(wrs["lkey"]) == {9} and set(wrs["rkey"]) == {7} and set(wrs["num_sge"]) == {0}


def test_a_key_is_a_number():
    with pytest.raises(InvalidArgument, match="region.key"):
        Side(0, 4096, (0,), object())


def test_blocks_that_touch_on_both_sides_are_one_work_request():
    layout = BlockLayout(1, 4, 1024)                # a Layer Block is a whole Full Block
    pool, work = Side(1 << 20, 4096, (0,), 1), Side(1 << 30, 4096, (0,), 2)
    ids = np.array([3, 4, 5, 9], np.int64)
    wrs = LayerDescriptors(READ, layout, work, None, pool, ids, 14).wrs
    assert wrs["length"].tolist() == [3 * 4096, 2048]
    assert wrs["remote_addr"].tolist() == [(1 << 20) + 3 * 4096, (1 << 20) + 9 * 4096]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=30, unique=True), st.integers(1, 9),
       st.sampled_from([READ, WRITE]), st.integers(1, 3))
def test_blocks_that_touch_on_the_remote_side_share_a_list(ids, max_sge, opcode, layer):
    """Whatever is joined, byte for byte the same is moved, layer by layer."""
    layout, ids = BlockLayout(4, 2, 512), np.array(ids, np.int64)
    work = Side(1 << 30, 1024, (0, 1 << 20, 2 << 20, 3 << 20), 2)       # blocks touch
    pool = Side(1 << 20, 4096, layout.layer_offsets[:4], 1)             # scattered
    tokens = 2 * len(ids) - 1
    plain = LayerDescriptors(opcode, layout, pool, ids, work, None, tokens)
    made = LayerDescriptors(opcode, layout, pool, ids, work, None, tokens, max_sge=max_sge)
    assert len(made.wrs) == -(-len(ids) // max_sge)
    moved, seen = [], 0
    for wr in made.layer(layer).wrs:
        own = [(wr["local_addr"], wr["lkey"], wr["length"])]
        if wr["num_sge"]:
            assert 2 <= wr["num_sge"] <= max_sge and wr["sge_first"] == seen
            seen += int(wr["num_sge"])
            own = [(e["addr"], e["lkey"], e["length"])
                   for e in made.sges[wr["sge_first"]:wr["sge_first"] + wr["num_sge"]]]
        far = int(wr["remote_addr"])
        for addr, lkey, length in own:
            moved.append((int(addr), int(lkey), far, int(length)))
            far += int(length)
        assert far - int(wr["remote_addr"]) == wr["length"] and wr["rkey"] == 2
        assert wr["opcode"] == opcode
    assert seen == (0 if made.sges is None else len(made.sges))
    assert moved == [(int(w["local_addr"]), 1, int(w["remote_addr"]), int(w["length"]))
                     for w in plain.wrs]
    plain.layer(layer)
    assert (made.local_offset, made.remote_offset) == (plain.local_offset, plain.remote_offset)


def test_lists_are_not_made_of_what_does_not_touch_nor_of_lists():
    layout, ids = BlockLayout(1, 4, 1024), np.array([0, 2, 3, 9], np.int64)
    pool, work = Side(1 << 20, 8192, (0,), 1), Side(1 << 30, 4096, (0,), 2)
    made = LayerDescriptors(WRITE, layout, pool, ids, work, ids, 16, max_sge=16)
    assert made.wrs["num_sge"].tolist() == [0, 2, 0] and len(made.sges) == 2
    for wrs, sges in [(made.wrs, np.zeros(3, SGE_DTYPE)), (made.wrs[:1], np.zeros(0, SGE_DTYPE)),
                      (made.wrs[:1], np.zeros(9, "u1"))]:
        with pytest.raises(ValueError, match="entry"):
            gather_into(wrs, sges, 16)
    with pytest.raises(InvalidArgument, match="max_sge"):
        LayerDescriptors(WRITE, layout, pool, ids, work, ids, 16, max_sge=0)


@pytest.mark.parametrize("ids, tokens", [
    (np.arange(3, dtype=np.int64), 64 * 4), (np.arange(4, dtype=np.int32), 64 * 4),
    (np.arange(4, dtype=np.int64), 0), (np.arange(8, dtype=np.int64)[::2], 64 * 4), ([0], 64),
])
def test_ids_that_do_not_fit_the_tokens_are_refused(ids, tokens):
    side = Side(4096, 4096, (0,), 1)
    with pytest.raises((InvalidArgument, TypeError)):
        LayerDescriptors(READ, BlockLayout(1, 64, 8), side, None, side, ids, tokens)


def test_block_ids_of_another_type_are_refused_and_not_reinterpreted():
    """Read as int64, the bits of a float make an address, of block 0 as often as not."""
    layout = BlockLayout(2, 16, 256)
    here, there = Side(1 << 20, 4096, (0, 0)), Side(1 << 30, 8192, (0, 4096))
    for ids in (np.array([2.0, 3.0]), np.array([2, 3], np.uint64), np.arange(4, dtype=np.int32),
                [2, 3], b"0123456789abcdef"):
        for both in ((ids, None), (None, ids)):
            with pytest.raises(InvalidArgument, match="int64"):
                LayerDescriptors(READ, layout, here, both[0], there, both[1], 32)


@pytest.mark.parametrize("tokens, layer", [(2**63, 0), (2**40, 0), (1.5, 0), (16, 2), (16, -1)])
def test_token_counts_and_layers_that_do_not_exist_are_refused(tokens, layer):
    layout, side = BlockLayout(2, 16, 256), Side(4096, 4096, (0, 0))
    with pytest.raises(InvalidArgument):
        LayerDescriptors(READ, layout, side, None, side, None, tokens).layer(layer)
    with pytest.raises(InvalidArgument):
        LayerDescriptors(READ, layout, side, None, side, None, tokens, layer)


def test_descriptors_keep_their_ids_for_layers_of_another_size():
    """They are built anew there, when the caller's array may be something else by then."""
    layout = BlockLayout(2, 4, [8, 16])
    side = Side(1 << 20, layout.stride, layout.layer_offsets[:2], 7)
    ids = np.array([3, 5], np.int64)
    made = LayerDescriptors(READ, layout, side, ids, side, ids, 8)
    ids[:] = 9
    assert made.layer(1).wrs["local_addr"].tolist() == [
        (1 << 20) + i * layout.stride + layout.layer_offsets[1] for i in (3, 5)]
