"""The model on random weights: exactness of reuse, storage types, threads, bad input."""
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.engine.model import linear
from kvio.engine.model.attention import attend
from kvio.engine.model.llama import LlamaModel, LlamaParams
from kvio.errors import InvalidArgument

NUM_TOKENS = 150
TOKENS = np.random.default_rng(7).integers(0, 128, NUM_TOKENS)
# odd sizes on purpose: blocks, tiles and kernels meet remainders
SIZES = dict(num_layers=2, dim=48, num_heads=6, num_kv_heads=2, ffn=520, vocab=128,
             max_positions=256)
KV_DTYPES = ("float32", "float16", "bfloat16")
MODELS = {(kv_dtype, exact): LlamaModel.random(1, **SIZES, kv_dtype=kv_dtype, exact=exact)
          for kv_dtype in KV_DTYPES for exact in (False, True)}
EXACT = MODELS["float16", True]


@pytest.fixture(scope="module")
def tiled():
    """An exact model that takes this BLAS for one whose rows are not invariant."""
    model = LlamaModel.random(1, **SIZES, exact=True)
    for layer in model._layers:
        for part in (layer.qkv, layer.out, layer.gate_up, layer.down):
            part._tiled = True
    model._head._tiled = True
    return model


def run(model, splits, cache=None):
    """Prefill TOKENS in pieces that end at `splits` -> (hidden states, KV of every layer)."""
    cache = cache or model.new_caches(NUM_TOKENS)
    hs, kvs, a = [], [], 0
    for b in (*splits, NUM_TOKENS):
        h, new = model.embed(TOKENS[a:b]), []
        for l in range(model.num_layers):
            h, new_kv = model.layer(l, h, a, cache[l])
            new.append(new_kv)
        hs.append(h)
        kvs.append(new)
        a = b
    return np.concatenate(hs), [np.concatenate(kv) for kv in zip(*kvs)]


def same(left, right):
    return np.array_equal(left[0], right[0]) and all(map(np.array_equal, left[1], right[1]))


WHOLE = {kv_dtype: run(MODELS[kv_dtype, True], ()) for kv_dtype in KV_DTYPES}
splits = st.lists(st.integers(1, NUM_TOKENS - 1), unique=True, max_size=12).map(sorted)


@given(splits, st.sampled_from(KV_DTYPES))
@settings(max_examples=60, deadline=None)
def test_exact_mode_gives_the_same_bits_for_every_split(splits, kv_dtype):
    assert same(run(MODELS[kv_dtype, True], splits), WHOLE[kv_dtype])


def test_exact_mode_gives_the_same_bits_token_by_token():
    assert same(run(EXACT, range(1, NUM_TOKENS)), WHOLE["float16"])


@given(splits)
@settings(max_examples=15, deadline=None)
def test_tiles_give_the_same_bits_where_rows_are_not_invariant(tiled, splits):
    assert same(run(tiled, splits), run(tiled, ()))


def test_more_rows_than_one_product_takes(monkeypatch):
    monkeypatch.setattr(linear, "MAX_ROWS", 37)      # 150 = 4 * 37 + 2, and 149 leaves one row
    assert same(run(EXACT, ()), WHOLE["float16"])
    assert same(run(EXACT, (149,)), WHOLE["float16"])


def test_fast_mode_repeats_itself_and_stays_close():
    fast = MODELS["float16", False]
    assert same(run(fast, (64, 70)), run(fast, (64, 70)))
    np.testing.assert_allclose(run(fast, (64, 70))[0], WHOLE["float16"][0], atol=0.05)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_kv_that_went_through_bytes_changes_nothing(kv_dtype, exact):
    model = MODELS[kv_dtype, exact]
    scratch = run(model, (64, 128))
    cache = model.new_caches(NUM_TOKENS)
    for l, kv in enumerate(cache):
        kv[...] = 1e3                               # rows that were never loaded are finite
        for block in (0, 1):                        # two Layer Blocks, as a store would give them
            rows = slice(64 * block, 64 * block + 64)
            stored = model.pack(scratch[1][l][rows]).tobytes()
            assert len(stored) == 64 * model.bytes_per_token
            records = np.frombuffer(stored, np.uint8).reshape(64, -1)
            model.unpack(records, kv[rows])
    h = model.embed(TOKENS[128:])
    for l in range(model.num_layers):
        h, new_kv = model.layer(l, h, 128, cache[l])
        np.testing.assert_array_equal(new_kv, scratch[1][l][128:])
        np.testing.assert_array_equal(model.pack(cache[l][:128]), model.pack(scratch[1][l][:128]))
    np.testing.assert_array_equal(h, scratch[0][128:])
    np.testing.assert_array_equal(model.logits(h, 128), model.logits(scratch[0][128:], 128))


def test_one_changed_bit_of_the_past_changes_the_logits():
    cache = EXACT.new_caches(NUM_TOKENS)
    h = EXACT.forward(TOKENS[:149], 0, cache)
    clean = EXACT.logits(EXACT.forward(TOKENS[149:], 149, cache), 149)
    records = EXACT.pack(cache[0][:64]).copy()
    records[10, -1] ^= 0x40                         # an exponent bit of a value, as a bad disk does
    EXACT.unpack(records, cache[0][:64])
    assert not np.array_equal(EXACT.logits(EXACT.forward(TOKENS[149:], 149, cache), 149), clean)
    assert h.shape == (149, 48)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pack_and_unpack_lose_nothing(kv_dtype):
    model = MODELS[kv_dtype, False]
    new_kv = WHOLE[kv_dtype][1][0]
    assert new_kv.dtype == model.storage
    records = model.pack(new_kv)
    assert records.shape == (NUM_TOKENS, model.bytes_per_token) and records.dtype == np.uint8
    assert np.shares_memory(records, new_kv)
    out = np.zeros_like(records)
    assert model.pack(new_kv[3:4], out[3:4]).base is out    # one row, as decode writes it
    np.testing.assert_array_equal(out[2:5], records[2:5] * [[0], [1], [0]])
    rows = np.empty(new_kv.shape, np.float32)
    model.unpack(records, rows)
    np.testing.assert_array_equal(model.pack(rows), records)


def test_bfloat16_rounds_to_nearest_even():
    model = MODELS["bfloat16", False]
    rows = np.zeros((1, *model.record_shape), np.float32)
    rows.flat[:6] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -np.inf, np.nan]
    back = np.empty_like(rows)
    model.unpack(model.pack(rows), back)
    np.testing.assert_array_equal(
        back.flat[:6], [1, 1 + 2**-6, 1 + 2**-7, np.inf, -np.inf, np.nan])


@pytest.mark.parametrize("use_tiles", [False, True])
def test_a_decode_batch_has_the_bits_of_single_steps(tiled, use_tiles):
    model = tiled if use_tiles else EXACT
    positions = [5, 64, 21, 127, 64]                # 5 and 21 share a tile row, 64 occurs twice
    singles, caches = [], []
    for position in positions:
        one, other = model.new_caches(128), model.new_caches(128)
        model.forward(TOKENS[:position], 0, one)
        for source, target in zip(one, other):
            target[...] = source
        singles.append(model.forward(TOKENS[position:position + 1], position, one))
        caches.append(other)
    h = model.embed(TOKENS[positions])
    for l in range(model.num_layers):
        h, new_kv = model.decode(l, h, positions, [cache[l] for cache in caches])
        assert new_kv.shape == (5, *model.record_shape)
    np.testing.assert_array_equal(h, np.concatenate(singles))


def test_threads_share_one_model():
    results, start = [None] * 4, threading.Barrier(4)

    def work(i):
        start.wait()
        results[i] = run(EXACT, (10 * i + 1,))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(same(result, WHOLE["float16"]) for result in results)


def test_attention_follows_its_definition():
    model = LlamaModel.random(3, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn=8, vocab=9,
                              kv_dtype="float32")
    tokens, cache = [3, 1, 4, 1, 5], model.new_caches(5)
    h = model.embed(tokens)
    model.layer(0, h, 0, cache[0])
    rms = h / np.sqrt((h * h).mean(-1, keepdims=True) + 1e-5)
    x = model._layers[0].qkv(rms, range(5)).reshape(5, 4, 4)
    angle = np.arange(5)[:, None] * 10000.0 ** (-np.array([0, 2]) / 4)
    turn = np.exp(1j * angle)[:, None]
    q, k = (np.stack([y.real, y.imag], -2).reshape(5, -1, 4) for y in (
        (x[:, heads, :2] + 1j * x[:, heads, 2:]) * turn for heads in (slice(0, 2), slice(2, 3))))
    np.testing.assert_allclose(cache[0][:5, 0], k, atol=1e-5)
    np.testing.assert_array_equal(cache[0][:5, 1], x[:, 3:])
    y = attend(np.ascontiguousarray(q, np.float32), 0, cache[0], exact=False)
    for i in range(5):
        for head in range(2):
            score = np.exp(k[:i + 1, 0] @ q[i, head])
            expected = score @ x[:i + 1, 3] / score.sum()
            np.testing.assert_allclose(y[i, 4 * head:4 * head + 4], expected, atol=1e-5)


def test_greedy_equals_prefill_of_its_own_answer():
    out = EXACT.greedy(TOKENS[:70], 6)
    context = [*TOKENS[:70], *out[:-1]]
    h = EXACT.forward(context, 0, EXACT.new_caches(len(context)))
    assert np.argmax(EXACT.logits(h[69:], 69), axis=1).tolist() == out


def test_sizes_are_told():
    assert EXACT.num_layers == 2
    assert EXACT.bytes_per_token == 2 * 2 * 8 * 2
    config = EXACT.config()
    assert (config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]) == (
        2, 2, 8)


@pytest.mark.parametrize("change", [
    dict(num_heads=5), dict(num_kv_heads=4), dict(num_layers=0), dict(dim=6),
    dict(max_positions=1 << 40)])
def test_impossible_sizes_are_refused(change):
    with pytest.raises(InvalidArgument):
        LlamaParams(**SIZES | change)
    with pytest.raises(InvalidArgument, match="kv_dtype"):
        LlamaModel.random(0, kv_dtype="int4")


def test_wrong_arrays_are_refused_before_anything_is_written():
    cache = EXACT.new_cache(64)
    h = EXACT.embed(TOKENS[:4])
    frozen = np.zeros_like(cache)
    frozen.flags.writeable = False
    bad_caches = [cache.astype(np.float16), cache[:63], cache[:, :1], frozen]
    for position, kv in [(0, kv) for kv in bad_caches] + [(61, cache), (-1, cache), (255, cache)]:
        with pytest.raises(InvalidArgument):
            EXACT.layer(0, h, position, kv)
    for bad in (h[:, :-1], h.astype(np.float64), h[0], h[:0]):
        with pytest.raises(InvalidArgument):
            EXACT.layer(0, bad, 0, cache)
    for tokens in ([-1], [128], [0.5], [[1]]):
        with pytest.raises(InvalidArgument):
            EXACT.embed(tokens)
    wide = np.zeros((4, 128), np.uint8)
    with pytest.raises(InvalidArgument, match="read-only"):
        EXACT.unpack(wide[:, :64], frozen[:4])
    for records in (wide[:, :3], wide[:, :64].view(np.int8), wide[:, ::2]):
        with pytest.raises(InvalidArgument):
            EXACT.unpack(records, cache[:4])
    with pytest.raises(InvalidArgument):
        EXACT.pack(cache[:4].astype(np.float64))
    with pytest.raises(InvalidArgument, match="fill"):
        EXACT.pack(cache[:4], wide[:3, :64])
    with pytest.raises(InvalidArgument):
        EXACT.decode(0, h, [1], [cache])
    assert not cache.any()
