"""Two kinds of arithmetic behind one interface: a real language model, and a timed stand-in.

Both read the KV of hit tokens from the bytes that lie in HBM (`hbm`: a GPU's memory, or the host's
in its place) and write the KV of new tokens back as bytes, so whatever storage and NICs do to those
bytes shows in the tokens. The stand-in sleeps in place of the arithmetic: its KV is a known
function of token, position and layer, it checks every record it is given, and its next token
depends on them.

A prefill state and a decode state live as long as their request; an engine calls the methods of
one state one after the other.
"""
import asyncio
import concurrent.futures
import functools
import operator
from dataclasses import dataclass, field

import numpy as np

from kvio.engine.clock import now_s, sleep_until
from kvio.engine.hbm import Slot, new_records
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout

__all__ = ["ModelCompute", "TimedCompute"]

_ROWS = 64                                  # working caches grow in whole blocks


@dataclass
class _ModelPrefill:
    hidden: np.ndarray
    num_hits: int
    tokens: np.ndarray


@dataclass
class _ModelDecode:
    caches: list


class ModelCompute:
    """A real model. Each engine has one of its own: a thread and a working cache; the weights are
    shared and read-only."""

    def __init__(self, model, layout: BlockLayout):
        if layout.bytes_per_token != model.bytes_per_token or \
                layout.num_layers != model.num_layers:
            raise InvalidArgument("the layout is not the model's")
        self.model, self.layout = model, layout
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "kvio-compute")
        self._cache = None                  # float32 working cache of one layer

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    async def _run(self, function, *args):
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _rows(self, num_tokens):
        """An empty working cache: float32 [tokens, 2, kv heads, head dim], finite throughout."""
        return self.model.new_cache(-(-num_tokens // _ROWS) * _ROWS)

    def begin_prefill(self, tokens: np.ndarray, num_hits: int):
        """State for computing tokens[num_hits:] after num_hits tokens whose KV is loaded."""
        return _ModelPrefill(self.model.embed(tokens[num_hits:]), num_hits, tokens)

    async def prefill_layer(self, state, layer: int, slot: Slot, ready_s: float) -> float:
        """Compute one layer. `slot` is HBM: hits are read from it, new KV is written behind them.
        Returns when it was done."""
        await self._run(self._prefill_layer, state, layer, slot)
        return now_s()

    def _prefill_layer(self, state, layer, slot):
        total, hits = len(state.tokens), state.num_hits
        if self._cache is None or len(self._cache) < total:
            self._cache = self._rows(total)
        self.model.unpack(slot.rows(0, hits), self._cache[:hits])
        state.hidden, new = self.model.layer(layer, state.hidden, hits, self._cache)
        with slot.new_rows(hits, total) as rows:
            self.model.pack(new, rows)

    async def first_token(self, state):
        """(token, margin): the greedy token after the prompt."""
        return (await self._run(self._greedy, state.hidden[-1:], [len(state.tokens) - 1]))[0]

    def _greedy(self, hidden, positions):
        logits = self.model.logits(hidden, positions)
        top = np.partition(logits, -2, axis=1)[:, -2:]
        return [(int(token), float(second_first[1] - second_first[0]))
                for token, second_first in zip(logits.argmax(axis=1), top, strict=True)]

    async def begin_decode(self, sequence) -> None:
        """Make the working caches of a sequence from the bytes in its HBM blocks."""
        sequence.state = await self._run(self._begin_decode, sequence)

    def _begin_decode(self, sequence):
        caches = []
        for layer in range(self.layout.num_layers):
            cache = self._rows(sequence.num_tokens + sequence.request.num_new_tokens)
            self.model.unpack(sequence.kv_bytes(layer), cache[:sequence.num_tokens])
            caches.append(cache)
        return _ModelDecode(caches)

    async def decode_step(self, sequences) -> list:
        """One token for each sequence: [(token, margin)]. New KV is written to HBM."""
        return await self._run(self._decode_step, sequences)

    def _decode_step(self, sequences):
        positions = [sequence.num_tokens for sequence in sequences]
        tokens = [sequence.request.generated[-1] for sequence in sequences]
        hidden = self.model.embed(np.array(tokens, np.uint32))
        with new_records(sequences) as records:
            for layer in range(self.layout.num_layers):
                caches = [sequence.state.caches[layer] for sequence in sequences]
                hidden, new = self.model.decode(layer, hidden, positions, caches)
                for i, record in enumerate(records):
                    self.model.pack(new[i:i + 1], record[layer:layer + 1])
        return self._greedy(hidden, positions)


@dataclass
class _TimedPrefill:
    tokens: np.ndarray
    num_hits: int
    digest: int = 0


@dataclass
class TimedCompute:
    """Sleeps `prefill_s_per_token` a new token and `attention_time(cached, new)` seconds a chunk
    (None: nothing), both over all layers, and `decode_s` a decode step.

    Work of one engine is queued on one virtual stream: a layer starts when the one before has
    ended or when its data are there, whichever is later; late wake-ups do not add up.
    `num_kv_errors` counts records that were not what their token, position and layer say.
    """

    layout: BlockLayout
    prefill_s_per_token: float
    decode_s: float
    vocabulary: int = 32000
    attention_time: object = None       # an AttentionModel, or any function of its kind
    num_kv_errors: int = 0
    busy_s: float = 0.0
    _free_s: float = field(default=0.0, repr=False)

    def __post_init__(self):
        if not self.layout.is_uniform or self.layout.bytes_per_token % 8:
            raise InvalidArgument("the stand-in needs equal layers of 8-byte words")

    def close(self) -> None:
        """Nothing to give back."""

    def records(self, tokens: np.ndarray, position: int, layer) -> np.ndarray:
        """The KV that these tokens have from `position` on: uint64, one word a token, which
        fills the whole record. `layer` may be an array of layers, of one token."""
        words = np.asarray(tokens).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        words += np.arange(position + 1, position + 1 + len(tokens), dtype=np.uint64) \
            * np.uint64(0xC2B2AE3D27D4EB4F)
        lanes = (np.asarray(layer, np.uint64) + np.uint64(1)) * np.uint64(0x165667B19E3779F9)
        return (words ^ lanes) * np.uint64(0xD6E8FEB86659FD93)

    def _check(self, kv_bytes, tokens, position, layer):
        """Look into the records of these tokens, at every 16th word and the last; returns a digest
        of what was really there."""
        words = kv_bytes.reshape(len(tokens), -1).view(np.uint64)
        probes = words[:, [*range(0, words.shape[1] - 1, 16), -1]]
        wrong = (probes != self.records(tokens, position, layer)[:, None]).any(axis=1)
        self.num_kv_errors += int(np.count_nonzero(wrong))
        return int(np.bitwise_xor.reduce(probes[:, -1]))

    def write_records(self, rows: np.ndarray, tokens, position, layer) -> None:
        """Fill uint8 rows [tokens, bytes_per_token] with the tokens' KV in a layer, or rows
        [layers, bytes_per_token] with one token's KV in these layers."""
        rows.view(np.uint64)[:] = self.records(tokens, position, layer)[:, None]

    async def _stream(self, duration_s, ready_s):
        begin = max(self._free_s, ready_s)
        self._free_s = begin + duration_s
        self.busy_s += duration_s
        await sleep_until(self._free_s)
        return self._free_s

    def begin_prefill(self, tokens, num_hits):
        return _TimedPrefill(tokens, num_hits)

    async def prefill_layer(self, state, layer, slot, ready_s):
        hits = state.num_hits
        new = len(state.tokens) - hits
        await slot.run(self._prefill_layer, state, layer, slot)
        seconds = new * self.prefill_s_per_token
        if self.attention_time is not None:
            seconds += self.attention_time(hits, new)
        return await self._stream(seconds / self.layout.num_layers, ready_s)

    def _prefill_layer(self, state, layer, slot):
        tokens, hits = state.tokens, state.num_hits
        if hits:
            state.digest ^= self._check(slot.rows(0, hits), tokens[:hits], 0, layer)
        with slot.new_rows(hits, len(tokens)) as rows:
            self.write_records(rows, tokens[hits:], hits, layer)
            state.digest ^= self._check(rows, tokens[hits:], hits, layer)

    def _token(self, *seed):
        value = 0x243F6A8885A308D3
        for word in seed:
            value = (value ^ int(word)) * 0x9E3779B97F4A7C15 % 2**64
            value ^= value >> 29
        return value % self.vocabulary, float("inf")

    async def first_token(self, state):
        return self._token(state.tokens[-1], len(state.tokens), state.digest)

    async def begin_decode(self, sequence):
        sequence.state = await sequence.memory.run(self._begin_decode, sequence)

    def _begin_decode(self, sequence):
        tokens = np.asarray(sequence.tokens[:sequence.num_tokens], np.uint32)
        digests = (self._check(sequence.kv_bytes(layer), tokens, 0, layer)
                   for layer in range(self.layout.num_layers))
        return functools.reduce(operator.xor, digests)

    async def decode_step(self, sequences):
        await sequences[0].memory.run(self._decode_step, sequences)
        await self._stream(self.decode_s, now_s())
        return [self._token(s.request.generated[-1], s.num_tokens + 1, s.state)
                for s in sequences]

    def _decode_step(self, sequences):
        layers = np.arange(self.layout.num_layers)
        with new_records(sequences) as records:
            for sequence, rows in zip(sequences, records, strict=True):
                token, position = sequence.request.generated[-1:], sequence.num_tokens
                self.write_records(rows, token, position, layers)
                sequence.state ^= self._digest(token, position)

    def _digest(self, tokens, position):
        """What `_check` makes of one token's records in all layers: tokens depend on all KV before
        them, however that came about."""
        layers = np.arange(self.layout.num_layers)
        return int(np.bitwise_xor.reduce(self.records(tokens, position, layers)))
