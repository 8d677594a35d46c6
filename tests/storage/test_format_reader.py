"""The reader that was written against docs/format.md alone agrees with kvio about hard stores."""
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from blocks import LAYOUT, chain, edit, open_store, payload, put, readable, segments
from read_by_format import blocks
from read_by_format import payload as payload_of

SCRIPT = Path(__file__).parent / "read_by_format.py"


def listed(path):
    """{key in hex: the states of its copies}, as the script prints them."""
    lines = subprocess.run([sys.executable, str(SCRIPT), str(path)], capture_output=True, text=True,
                           check=True).stdout.splitlines()
    found = {}
    for key, _, tokens, state in map(str.split, lines):
        assert tokens == "4"
        found.setdefault(key, []).append(state)
    return found


def agree(path, *chains):
    """The script and kvio find the same blocks; both read the same bytes."""
    found = listed(path)
    with open_store(path) as store:
        for keys in chains:
            can = readable(store, keys)
            for key, here in zip(keys, can):
                states = found.pop(key["key"].tobytes().hex(), [])
                assert here == ("good" in states), key
    assert not found, "the script finds blocks that nobody wrote"
    for key, parent, _, *where in list(blocks(str(path)))[:20]:
        data = payload_of(*where)
        row = np.frombuffer(key + parent, chains[0].dtype)[0]
        assert data is None or data == payload(row).tobytes()


def test_slots_that_were_used_again(tmp_path):
    chains = [chain(8, seed) for seed in range(9)]
    with open_store(tmp_path, segment_bytes=200_000) as store:
        for turn, keys in enumerate(chains):
            put(store, keys, scattered=turn % 2 == 1)
            if turn >= 2:
                store.forget(chains[turn - 2])
        stored = len(store)
    assert stored == 16
    assert sum(len(states) for states in listed(tmp_path).values()) >= 16
    agree(tmp_path, *chains)


def test_several_writers_and_copies(tmp_path):
    keys, more = chain(12), chain(5, seed=1)
    with open_store(tmp_path, segment_bytes=100_000) as one, open_store(tmp_path) as two:
        put(one, keys)
        put(two, keys[:4])                              # it opened before they were there
        put(two, more)
        with open_store(tmp_path) as third:
            put(third, chain(3, seed=2))
    agree(tmp_path, keys, more, chain(3, seed=2))


def test_damage_of_every_kind(tmp_path):
    first, second, third, fourth = (chain(8, seed) for seed in range(4))
    files = []
    for keys in (first, second, third, fourth):
        with open_store(tmp_path, segment_bytes=200_000) as store:
            put(store, keys)
            start = store.description.geometry.payload_offset
        files += [name for name in segments(tmp_path) if name not in files]
    edit(files[0], 8192 + 2 * 128 + 60, lambda byte: byte ^ 4)      # a header
    edit(files[0], start + 5 * LAYOUT.stride + 7, lambda byte: byte ^ 4)        # a payload
    edit(files[0], 4096 + 40, lambda byte: byte ^ 4)                # page 1
    edit(files[1], 50, lambda byte: byte ^ 4)                       # page 0
    os.truncate(files[2], start + 3 * LAYOUT.stride + 100)
    os.rename(files[3], files[3][:-1] + "7")
    (tmp_path / "kvio.json.draft").write_text("{")
    found = listed(tmp_path)
    good = sum("good" in states for states in found.values())
    assert good == 6 + 3 and sum("bad" in states for states in found.values()) == 1
    agree(tmp_path, first, second, third, fourth)
