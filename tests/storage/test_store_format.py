"""docs/format.md: its example, a reader written against it alone, and C against Python."""
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blocks import LAYOUT, SEGMENT, chain, open_store, payload, put, readable
from kvio._ext import ring as _ring
from kvio._ext.block import crc32c
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout, block_keys, root_key
from kvio.storage import format as fmt

HERE = Path(__file__).parent
DOCUMENT = (HERE.parent.parent / "docs" / "format.md").read_text()


def random_block(seed):
    rng = np.random.default_rng(seed)
    return np.frombuffer(rng.bytes(fmt.BLOCK_IO.itemsize), fmt.BLOCK_IO)[0].copy()


def test_sizes():
    assert fmt.BLOCK_IO.itemsize == _ring.BLOCK_IO_NBYTES
    assert (fmt.PAGE0.itemsize, fmt.PAGE1.itemsize, fmt.HEADER.itemsize) == (4096, 4096, 128)


@pytest.mark.parametrize("seed", range(20))
def test_c_and_python_write_the_same_bytes(seed):
    rng = np.random.default_rng(seed)
    block, uuid = random_block(seed), rng.bytes(16)
    nbytes = int(rng.integers(1, 1 << 40))
    header = fmt.encode_header(block, uuid, nbytes)
    raw = np.frombuffer(block.tobytes(), np.uint8)
    assert _ring.encode_header(raw, np.frombuffer(uuid, np.uint8), nbytes) == header
    bitmaps = rng.bytes(fmt.BITMAP_BYTES), rng.bytes(fmt.BITMAP_BYTES)
    figures = [int(n) for n in rng.integers(0, 1 << 31, 4)]
    page = _ring.encode_page1(uuid, *figures, *bitmaps)
    assert page == fmt.encode_page1(uuid, *figures, *bitmaps)
    assert _ring.decode_page1(page, uuid, figures[0]) == (*figures[1:], *bitmaps)
    wrong = bytearray(page)
    wrong[int(rng.integers(4096))] ^= 1 << int(rng.integers(8))
    assert _ring.decode_page1(wrong, uuid, figures[0]) is None
    assert _ring.decode_page1(page, bytes(16), figures[0]) is None
    assert _ring.decode_page1(page, uuid, figures[0] + 1) is None


def test_c_reads_what_python_writes():
    uuid, headers, blocks = bytes(range(16)), [], []
    for slot in range(64):
        block = random_block(slot)
        block["slot"], block["generation"] = slot, slot + 1
        blocks.append(block)
        headers.append(fmt.encode_header(block, uuid, 777) if slot % 3 else bytes(128))
    out = np.zeros(64, fmt.BLOCK_IO)
    data = np.frombuffer(b"".join(headers), np.uint8)
    count, damaged = _ring.scan_headers(data, uuid, 777, out)
    expected = [block for slot, block in enumerate(blocks) if slot % 3]
    assert (count, damaged) == (len(expected), 0)
    for name in ("slot", "generation", "tokens", "crc", "key", "parent"):
        assert out[:count][name].tolist() == [block[name].item() for block in expected]
    assert out[:count]["flags"].tolist() == [int(block["flags"]) & fmt.BLOCK_DURABLE
                                             for block in expected]
    assert _ring.scan_headers(data, uuid, 778, out) == (0, len(expected))
    assert _ring.scan_headers(data, bytes(16), 777, out) == (0, len(expected))


def test_the_tables_of_the_document_are_the_structs():
    for heading, struct in (("Page 0", fmt.PAGE0), ("Page 1", fmt.PAGE1),
                            ("Block headers", fmt.HEADER), ("6 Touches", fmt.TOUCH)):
        text = DOCUMENT.split(f"## {heading}")[1].split("\n##")[0]
        rows = [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+) \| (\d+) \|", text, re.M)]
        assert rows[0][0] == 0 and sum(rows[-1]) == struct.itemsize
        assert all(a + b == c for (a, b), (c, _) in zip(rows, rows[1:])), "no gaps"
        fields = {(struct.fields[n][1], struct.fields[n][0].itemsize) for n in struct.names}
        zeros = re.findall(r"^\| (\d+) \| (\d+) \| zeros", text, re.M)
        assert fields == set(rows) - {(int(a), int(b)) for a, b in zeros}


def test_the_example_of_the_document():
    layout = BlockLayout(2, 4, 8)
    example = DOCUMENT.split("## 7 Example")[1]
    named = re.findall(r"`([0-9a-f]{32})`", example)
    keys, data = block_keys(np.arange(4), layout), bytes(range(64))
    assert named == [layout.fingerprint.hex(), root_key(layout).hex(),
                     keys["key"][0].tobytes().hex()]
    assert f"`{crc32c(data):#010x}`" in example
    block = np.zeros((), fmt.BLOCK_IO)
    block["key"], block["parent"] = (np.void(keys[n][0].tobytes()) for n in ("key", "parent"))
    block["generation"], block["tokens"], block["crc"] = 1, 4, crc32c(data)
    dump = bytes.fromhex("".join(re.findall(r"^ +\d+ ((?: [0-9a-f]{2}){16})$", example, re.M)))
    assert dump == fmt.encode_header(block, b"\x11" * 16, 64)
    geometry = fmt.Geometry(64, 4096, 3)
    assert (geometry.header_pages, geometry.payload_offset, geometry.segment_nbytes) == (
        1, 12288, 24576)


def test_a_script_reads_a_store_from_the_document_alone(tmp_path):
    keys = chain(30)
    with open_store(tmp_path, segment_bytes=200_000) as store:
        put(store, keys[:20])
        put(store, keys[20:], scattered=True)
        store.forget(keys[25:26])
        put(store, keys[29:])
    script = str(HERE / "read_by_format.py")
    text = Path(script).read_text()
    assert "import kvio" not in text and "from kvio" not in text
    assert len([line for line in text.splitlines() if line.strip()]) <= 60
    listed = subprocess.run([sys.executable, script, str(tmp_path)], capture_output=True,
                            text=True, check=True).stdout.split("\n")[:-1]
    expected = {f"{k['key'].tobytes().hex()} {k['parent'].tobytes().hex()} 4 good" for k in keys}
    assert set(listed) == expected and len(listed) == 30
    for key in keys[[0, 29]]:
        data = subprocess.run([sys.executable, script, str(tmp_path), key["key"].tobytes().hex()],
                              capture_output=True, check=True).stdout
        assert data == payload(key).tobytes()


def test_geometry():
    geometry = fmt.Geometry.choose(LAYOUT, SEGMENT)
    assert geometry.segment_nbytes <= SEGMENT and geometry.slot_stride == 12288
    assert SEGMENT - geometry.segment_nbytes < 2 * geometry.slot_stride
    assert fmt.Geometry.choose(LAYOUT, 1).slots == 1
    tiny = fmt.Geometry.choose(BlockLayout(1, 1, 1), 1 << 40)
    assert tiny.header_pages == 15_000 and tiny.slots == 480_000


def test_geometry_is_fixed_when_the_store_is_created(tmp_path):
    with open_store(tmp_path, segment_bytes=SEGMENT) as store:
        put(store, chain(3))
        slots = store.description.geometry.slots
    with open_store(tmp_path, segment_bytes=10 * SEGMENT) as store:
        assert store.description.geometry.slots == slots
        assert readable(store, chain(3)).all()


def test_segment_names():
    assert fmt.parse_segment_name(fmt.segment_name(b"\xab" * 16, 12)) == (b"\xab" * 16, 12)
    for name in ("segment-1-2", f"segment-{'a' * 32}-01", f"segment-{'A' * 32}-1",
                 f"segment-{'a' * 32}-1.tmp", f"xsegment-{'a' * 32}-1", f"segment-{'a' * 32}--1"):
        assert fmt.parse_segment_name(name) is None


def test_keys_in_any_form():
    keys = chain(3)
    assert fmt.as_keys(keys) is keys or (fmt.as_keys(keys) == keys).all()
    assert fmt.as_keys(keys[::-1])["key"].tolist() == keys["key"][::-1].tolist()
    bare = fmt.as_keys([bytes(16), b"\x01" * 16])
    assert bare["parent"].sum() == 0 and bare["key"][1].tolist() == [1] * 16
    assert fmt.key_list(bare) == [bytes(16), b"\x01" * 16]
    for wrong in ([b"x"], "abc", 7, np.zeros(16, np.uint8), [bytes(16), "no"], np.zeros(3)):
        with pytest.raises(InvalidArgument):
            fmt.as_keys(wrong)
