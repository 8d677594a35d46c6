"""The index: first found, copies in reserve, the rule of the trie."""
import numpy as np

from blocks import chain
from kvio.storage.format import BLOCK_IO
from kvio.storage.index import Index


def places(keys, segment=0, first_slot=0, generation=1):
    out = np.zeros(len(keys), BLOCK_IO)
    for name in ("key", "parent"):
        out[name] = np.ascontiguousarray(keys[name]).view("V16").ravel()
    out["segment"], out["slot"] = segment, first_slot + np.arange(len(keys))
    out["generation"] = generation
    return out


def test_match_walks_from_the_root():
    keys, index = chain(10), Index()
    assert index.match(keys) == 0
    assert index.insert(places(keys)) == 10 and index.match(keys) == 10
    assert index.match(keys[:4]) == 4 and index.match(chain(10, seed=1)) == 0


def test_a_block_without_its_ancestor_is_invisible_until_that_returns():
    keys, index = chain(10), Index()
    index.insert(places(keys))
    assert index.remove(places(keys)[3])
    assert index.match(keys) == 3 and len(index) == 9
    assert keys["key"][5].tobytes() in index        # still stored
    index.insert(places(keys)[3:4])
    assert index.match(keys) == 10


def test_another_copy_takes_over():
    keys, index = chain(2), Index()
    for segment in range(3):
        assert index.insert(places(keys, segment)) == (2 if segment == 0 else 0)
    for segment in (1, 0, 2):
        assert index.match(keys) == 2
        assert index.remove(places(keys, segment)[0])
    assert index.match(keys) == 0 and len(index) == 1
    assert index.places(index.find(keys[1:]))["segment"].tolist() == [0]


def test_only_the_very_copy_is_removed():
    keys, index = chain(2), Index()
    index.insert(places(keys, segment=1, generation=5))
    for other in (places(keys, segment=2, generation=5), places(keys, 1, 9, 5),
                  places(keys, segment=1, generation=6)):
        assert not index.remove(other[0])
    assert not index.remove(places(chain(2, seed=1), 1, 0, 5)[0])
    assert index.match(keys) == 2


def test_rows_are_used_again():
    index = Index()
    for seed in range(50):
        keys = chain(100, seed)
        index.insert(places(keys))
        assert (index.find(keys) >= 0).all() and (index.find(chain(3, seed + 1)) == -1).all()
        for place in places(keys):
            assert index.remove(place)
    assert len(index) == 0 and len(index._places) == 1024


def test_it_grows():
    keys, index = chain(5000), Index()
    index.insert(places(keys[:3000]))
    index.insert(places(keys[3000:], first_slot=3000))
    assert index.match(keys) == 5000
    assert (index.places(index.find(keys))["slot"] == np.arange(5000)).all()
