"""Block keys against hashlib, CRC-32C against known vectors, and bad token ids."""
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio._ext import block as _block
from kvio._ext.index import is_root
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout, block_keys, root_key

LAYOUT = BlockLayout(2, 4, 16)
ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids, st.binary(max_size=20), st.integers(1, 70))
def test_keys_are_the_blake2b_chain_of_the_format(tokens, namespace, block_tokens):
    layout = BlockLayout(2, block_tokens, 16)
    keys = block_keys(np.array(tokens, np.uint32), layout, namespace)
    digest = hashlib.blake2b(namespace, digest_size=16, salt=layout.fingerprint,
                             person=b"kvio-root-1").digest()
    parent = b"root" + digest[:12]
    assert parent == root_key(layout, namespace) and is_root(parent)
    assert len(keys) == len(tokens) // block_tokens     # a partial block has no key
    for i, row in enumerate(keys):
        data = np.array(tokens[i * block_tokens:(i + 1) * block_tokens], "<u4").tobytes()
        assert row["parent"].tobytes() == parent
        parent = hashlib.blake2b(data, digest_size=16, salt=parent,
                                 person=b"kvio-block-1").digest()
        assert row["key"].tobytes() == parent


@given(st.binary(max_size=600), st.binary(min_size=16, max_size=16),
       st.binary(min_size=16, max_size=16))
def test_blake2b_is_hashlibs(data, salt, person):
    expected = hashlib.blake2b(data, digest_size=16, salt=salt, person=person).digest()
    assert _block.blake2b16(data, salt, person) == expected


@given(ids, st.integers(0, 10))
def test_a_chain_can_be_continued_from_any_block(tokens, cut):
    keys = block_keys(tokens, LAYOUT, b"m")
    cut = min(cut, len(keys))
    parent = keys[cut - 1]["key"].tobytes() if cut else root_key(LAYOUT, b"m")
    assert (block_keys(tokens[4 * cut:], LAYOUT, parent=parent) == keys[cut:]).all()


def test_the_first_different_token_changes_all_keys_after_it():
    a = block_keys(np.arange(40), LAYOUT)
    b = block_keys(np.where(np.arange(40) == 17, 99, np.arange(40)), LAYOUT)
    same = (a["key"] == b["key"]).all(axis=1)
    assert same.tolist() == [True] * 4 + [False] * 6
    other = block_keys(np.arange(40), LAYOUT, b"tenant")
    assert not (a["key"] == other["key"]).all(axis=1).any()


def test_a_known_key_stays_what_it_is():
    """Keys are stored on disk: a change here is a change of the format."""
    keys = block_keys(np.arange(8), LAYOUT, b"model")
    assert keys[1]["key"].tobytes().hex() == KNOWN


KNOWN = "55d5b1b1fcb7e839a3fb057a42859e2b"


@pytest.mark.parametrize("tokens", [[-1] * 8, [2**32] * 8, [0.5] * 8, [[1, 2]], ["a"],
                                    np.zeros((2, 2), np.int64)])
def test_wrong_token_ids_are_refused(tokens):
    with pytest.raises(InvalidArgument):
        block_keys(tokens, LAYOUT)


def test_wrong_parents_and_namespaces_are_refused():
    with pytest.raises(InvalidArgument):
        block_keys([1] * 4, LAYOUT, parent=b"short")
    with pytest.raises(InvalidArgument):
        block_keys([1] * 4, LAYOUT, "text")
