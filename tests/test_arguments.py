"""Numbers of a wrong type or range: one InvalidArgument that names the argument."""
import numpy as np
import pytest

from kvio.errors import InvalidArgument, MappingFailed, StoreError, checked_int
from kvio.layout import READ, BlockLayout, LayerDescriptors, Side
from kvio.memory import BlockPool, LayerPool
from kvio.storage import BlockStore

LAYOUT = BlockLayout(2, 4, 64)
WRONG = ["1", 1.5, None, True, [1], -1, 1 << 70]


@pytest.fixture
def pools():
    return BlockPool(LAYOUT, 4), LayerPool(LAYOUT, 4)


@pytest.mark.parametrize("wrong", WRONG)
def test_pools(pools, wrong):
    pool, layers = pools
    for name, call in (("num_blocks", lambda: BlockPool(LAYOUT, wrong)),
                       ("block_id", lambda: pool.full(wrong)),
                       ("block_id", lambda: pool.layer(wrong, 0)),
                       ("layer", lambda: pool.layer(0, wrong)),
                       ("layer", lambda: layers.layer(wrong))):
        with pytest.raises(InvalidArgument, match=name):
            call()
    if wrong != 1 << 70:                                # that many blocks are OutOfBlocks
        with pytest.raises(InvalidArgument, match="num_blocks"):
            pool.alloc(wrong)


@pytest.mark.parametrize("wrong", ["1", 1.5, True, [1], -1, 0])
@pytest.mark.parametrize("name", ["capacity_bytes", "segment_bytes", "queue_depth"])
def test_store_options(tmp_path, name, wrong):
    with pytest.raises(InvalidArgument, match=name):
        BlockStore.open(tmp_path, LAYOUT, **{name: wrong})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [3, None, 1.5])
def test_store_paths(path):
    with pytest.raises(InvalidArgument, match="path"):
        BlockStore.open(path, LAYOUT)


@pytest.mark.parametrize("wrong", ["1", 1.5, None, True, -1, [0, 1], [1, 2, 3], [1, "2"]])
def test_bytes_per_token(wrong):
    with pytest.raises(InvalidArgument, match="bytes_per_token"):
        BlockLayout(2, 4, wrong)


def test_more_memory_than_there_is_is_a_typed_error():
    with pytest.raises(MappingFailed, match="cannot map"):
        BlockPool(BlockLayout(1 << 16, 1, 1 << 20), 1 << 30)


def test_a_side_needs_an_offset_for_each_layer(pools):
    side = pools[0].side()
    short = Side(side.base, side.block_stride, (0,), 1)
    with pytest.raises(InvalidArgument, match="layer_offset"):
        LayerDescriptors(READ, LAYOUT, short, None, side, None, 4)


def test_a_missing_parent_directory_is_not_made(tmp_path):
    with pytest.raises(StoreError, match="cannot open"):
        BlockStore.open(tmp_path / "mount" / "kv", LAYOUT)
    assert list(tmp_path.iterdir()) == []


def test_numpys_integers_are_integers():
    assert checked_int("n", np.int8(3), 0) == 3 and type(checked_int("n", np.uint64(3), 0)) is int
    assert BlockLayout(np.int64(2), np.int32(4), np.uint8(64)) == LAYOUT
