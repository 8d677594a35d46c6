"""The GGUF reader: values against their definition, and files that are damaged or foreign."""
import struct

import numpy as np
import pytest
from gguf_writer import f32, gguf, llama

from kvio.engine.model.gguf import Gguf
from kvio.engine.model.llama import LlamaModel
from kvio.errors import InvalidArgument


@pytest.fixture
def write(tmp_path):
    def write(data, name="tiny.gguf"):
        path = tmp_path / name
        path.write_bytes(data)
        return path
    return write


def test_metadata_of_every_kind_comes_back(write):
    meta = {"a": "text", "b": 7, "c": 0.5, "d": ["x", "ä"], "e": [1, -2]}
    for version in (2, 3):
        with Gguf(write(gguf(meta, {}, version))) as file:
            assert file.meta == meta
            assert file.names() == []
            assert file.require("b") == 7
            with pytest.raises(InvalidArgument, match="'z' is missing"):
                file.require("z")


def test_tensors_are_decoded_by_their_definition(write):
    rng = np.random.default_rng(1)
    plain = rng.standard_normal((3, 32), dtype=np.float32)
    scale, low = np.float16([0.25, -1.5]), np.float16([3, 0.125])
    signed = rng.integers(-128, 128, (2, 32)).astype("i1")
    packed = rng.integers(0, 256, (2, 16)).astype("u1")
    nibbles = np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)
    column = scale.astype(np.float32)[:, None]

    def blocks(*parts):
        return b"".join(part[i].tobytes() for i in range(2) for part in parts)

    path = write(gguf({}, {
        "f32": f32(plain), "f16": ("F16", (3, 32), plain.astype("<f2").tobytes()),
        "q8_0": ("Q8_0", (2, 32), blocks(scale, signed)),
        "q4_0": ("Q4_0", (2, 32), blocks(scale, packed)),
        "q4_1": ("Q4_1", (2, 32), blocks(scale, low, packed))}))
    with Gguf(path) as file:
        got = {name: file.tensor(name) for name in file.names()}
    expected = {"f32": plain, "f16": plain.astype("<f2").astype(np.float32),
                "q8_0": signed * column, "q4_0": (nibbles - 8) * column,
                "q4_1": nibbles * column + low.astype(np.float32)[:, None]}
    for name, array in expected.items():        # after close: tensors are copies
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], array, err_msg=name)


def test_a_file_cut_anywhere_is_one_clear_error(write):
    data = gguf(*llama())
    assert LlamaModel.from_gguf(write(data)).num_layers == 1
    ends = {*range(0, 64), *range(64, len(data) - 64, 61), *range(len(data) - 64, len(data))}
    for end in sorted(ends):
        path = write(data[:end], "cut.gguf")
        with pytest.raises(InvalidArgument, match="cut.gguf"):
            LlamaModel.from_gguf(path)


@pytest.mark.parametrize("seed", range(8))
def test_flipped_bytes_in_the_header_never_escape(write, seed):
    meta, tensors = llama()
    data, rng = gguf(meta, tensors), np.random.default_rng(seed)
    header = len(gguf(meta, {})) + 40 * len(tensors)
    for _ in range(60):
        bad = bytearray(data)
        bad[rng.integers(header)] ^= 1 << rng.integers(8)
        try:
            with Gguf(write(bytes(bad))) as file:
                for name in file.names():
                    file.tensor(name)
        except InvalidArgument:
            pass


@pytest.mark.parametrize("data, message", [
    (b"", "magic"), (b"PK\x03\x04" + bytes(100), "magic"),
    (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0), "version 1"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "do not fit"),
    (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 60), "truncated"),
    (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 63), "truncated"),
    (gguf({"general.alignment": 0}, {}), "alignment"),
    (gguf({"general.architecture": "rwkv"}, {}), "rwkv"),
    (gguf({"general.architecture": "llama"}, {}), "block_count"),
])
def test_foreign_files_say_what_is_wrong(write, data, message):
    with pytest.raises(InvalidArgument, match=message):
        LlamaModel.from_gguf(write(data))


def test_tensors_of_another_shape_or_type_are_refused(write):
    meta, tensors = llama()
    good = tensors["blk.0.attn_q.weight"]
    path = write(gguf(meta, tensors | {"blk.0.attn_q.weight": (good[0], (8, 32), good[2])}))
    with pytest.raises(InvalidArgument, match=r"attn_q.*shape \(8, 32\)"):
        LlamaModel.from_gguf(path)
    with Gguf(write(gguf({}, {"q": ("Q8_0", (4, 8), bytes(34))}))) as file:
        with pytest.raises(InvalidArgument, match="blocks"):
            file.tensor("q")
        with pytest.raises(InvalidArgument, match="'k' is missing"):
            file.tensor("k")


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        Gguf(tmp_path / "none.gguf")
