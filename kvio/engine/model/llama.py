"""A Llama decoder in numpy, computed layer by layer, whose KV-Cache belongs to the caller.

The KV of one token in one layer is one contiguous record, [2, num_kv_heads, head_dim] in the
storage dtype: the rotated key, then the value. 64 records are one Layer Block. New KV is rounded to
the storage dtype BEFORE attention reads it, so storing and loading it changes nothing.
"""
import dataclasses

import numpy as np

from kvio.engine.model.attention import GROUP, attend
from kvio.engine.model.gguf import Gguf
from kvio.engine.model.kvtype import from_storage, storage_dtype, to_storage
from kvio.engine.model.linear import Linear
from kvio.errors import InvalidArgument

MAX_POSITIONS = 1 << 20     # bounds the rotary table whatever a file announces


@dataclasses.dataclass(frozen=True)
class LlamaParams:
    """Sizes of a model; `ffn` is the width of the feed-forward part, `eps` of the RMS norm."""
    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    ffn: int
    vocab: int
    max_positions: int
    eps: float = 1e-5
    rope_base: float = 10000.0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if not getattr(self, field.name) > 0:
                raise InvalidArgument(f"{field.name} must be positive, "
                                      f"not {getattr(self, field.name)}")
        if self.max_positions > MAX_POSITIONS:
            raise InvalidArgument(f"max_positions {self.max_positions} exceeds {MAX_POSITIONS}")
        if self.dim % self.num_heads or self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise InvalidArgument(
                f"dim {self.dim} must be num_heads {self.num_heads} times an even head_dim, and "
                f"num_heads a multiple of num_kv_heads {self.num_kv_heads}")

    @property
    def head_dim(self):
        return self.dim // self.num_heads


class _Layer:
    """Weights of one layer, ready for use. `get(name, shape)` gives them as [out, in]."""

    def __init__(self, params, get, exact):
        p, kv_dim = params, params.num_kv_heads * params.head_dim
        # the norms and 1 / sqrt(head_dim) go into the matrices: fewer passes over activations
        norm = get("attn_norm", (p.dim,))
        q = _halves(get("attn_q", (p.dim, p.dim)), p.head_dim) * np.float32(p.head_dim ** -0.5)
        k = _halves(get("attn_k", (kv_dim, p.dim)), p.head_dim)
        v = get("attn_v", (kv_dim, p.dim))
        self.qkv = Linear((np.concatenate([q, k, v]) * norm).T, exact)
        self.out = Linear(get("attn_output", (p.dim, p.dim)).T, exact)
        norm = get("ffn_norm", (p.dim,))
        gate, up = get("ffn_gate", (p.ffn, p.dim)), get("ffn_up", (p.ffn, p.dim))
        self.gate_up = Linear((np.concatenate([gate, up]) * norm).T, exact)
        self.down = Linear(get("ffn_down", (p.dim, p.ffn)).T, exact)


class LlamaModel:
    """The model. Its weights are never written, so any number of threads may call it at once.

    With `exact`, a token's KV and logits are the same bits however the tokens before it and around
    it were split over prefill, reuse, decode and decode batches. Without, last bits may differ.
    """

    def __init__(self, params, get, kv_dtype="float16", exact=False):
        """`get(name, shape)` gives the float32 weight of that GGUF name, or None if it is absent
        and optional ("output.weight": the embedding then serves)."""
        self.params, self.kv_dtype, self.exact = params, kv_dtype, exact
        self.storage = storage_dtype(kv_dtype)
        p = params
        embedding = get("token_embd.weight", (p.vocab, p.dim))
        output = get("output.weight", (p.vocab, p.dim))
        self._head = self._embedding = Linear(embedding.T, exact)
        if output is not None:
            self._head = Linear(output.T, exact)
        del embedding, output                   # hundreds of MB, and the blocks are copies
        self._norm = get("output_norm.weight", (p.dim,))
        self._layers = [
            _Layer(p, lambda name, shape, l=l: get(f"blk.{l}.{name}.weight", shape), exact)
            for l in range(p.num_layers)]
        inverse = p.rope_base ** (-np.arange(0, p.head_dim, 2, dtype=np.float64) / p.head_dim)
        angle = np.arange(p.max_positions)[:, None] * inverse
        self._cos, self._sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    @classmethod
    def from_gguf(cls, path, kv_dtype="float16", exact=False):
        """Load a Llama-architecture GGUF file. InvalidArgument where it is anything else."""
        with Gguf(path) as file:
            if (arch := file.require("general.architecture")) != "llama":
                raise InvalidArgument(f"{path}: architecture {arch!r}; only 'llama' is known")
            sizes = [file.require(f"llama.{key}", int) for key in (
                "block_count", "embedding_length", "attention.head_count",
                "attention.head_count_kv", "feed_forward_length")]
            vocab = len(file.require("tokenizer.ggml.tokens", list))
            params = LlamaParams(
                *sizes, vocab, file.require("llama.context_length", int),
                file.require("llama.attention.layer_norm_rms_epsilon", float),
                file.require("llama.rope.freq_base", float))
            names = set(file.names())

            def get(name, shape):
                if name == "output.weight" and name not in names:
                    return None
                return file.tensor(name, shape)

            return cls(params, get, kv_dtype, exact)

    @classmethod
    def random(cls, seed, num_layers=2, dim=64, num_heads=4, num_kv_heads=2, ffn=96, vocab=128,
               max_positions=512, kv_dtype="float16", exact=False):
        """A model of random weights, for tests: it talks noise, but always the same noise."""
        rng = np.random.default_rng(seed)

        def get(name, shape):
            if "norm" in name:
                return 1 + rng.standard_normal(shape, dtype=np.float32) / 8
            return rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[1] ** 0.5)

        params = LlamaParams(num_layers, dim, num_heads, num_kv_heads, ffn, vocab, max_positions)
        return cls(params, get, kv_dtype, exact)

    @property
    def num_layers(self):
        return self.params.num_layers

    @property
    def record_shape(self):
        """Shape of one token's KV in one layer: (2, num_kv_heads, head_dim)."""
        return 2, self.params.num_kv_heads, self.params.head_dim

    @property
    def bytes_per_token(self):
        """Bytes of one token's KV in ONE layer."""
        return int(np.prod(self.record_shape)) * self.storage.itemsize

    def config(self):
        """The model's sizes under the names of a Hugging Face config.json."""
        p = self.params
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                "num_hidden_layers": p.num_layers, "hidden_size": p.dim,
                "num_attention_heads": p.num_heads, "num_key_value_heads": p.num_kv_heads,
                "head_dim": p.head_dim, "intermediate_size": p.ffn, "vocab_size": p.vocab,
                "max_position_embeddings": p.max_positions, "rms_norm_eps": p.eps,
                "rope_theta": p.rope_base, "torch_dtype": self.kv_dtype}

    # ---- KV records

    def unpack(self, records, out):
        """Bytes of stored tokens -> rows of a working cache; exact.

        records: uint8 [tokens, bytes_per_token], rows contiguous. out: float32
        [tokens, 2, num_kv_heads, head_dim], written.
        """
        if (records.dtype != np.uint8 or records.ndim != 2 or records.strides[1] != 1
                or records.shape[1] != self.bytes_per_token or out.dtype != np.float32
                or out.shape != (records.shape[0], *self.record_shape)
                or not out.flags.writeable):
            raise InvalidArgument(
                f"unpack wants uint8 [n, {self.bytes_per_token}] of contiguous rows and writable "
                f"float32 [n, *{self.record_shape}], not {_told(records)} and {_told(out)}")
        stored = records.view(self.storage).reshape(out.shape)
        from_storage(stored, self.kv_dtype, out)

    def pack(self, kv, out=None):
        """Tokens' KV -> their stored bytes, uint8 [tokens, bytes_per_token].

        kv: [tokens, 2, num_kv_heads, head_dim], either new_kv as `layer` gives it (then the result
        is a view of it) or float32 rows of a working cache (lossless: they were rounded before).
        With `out`, uint8 of the result's shape, the bytes are copied there.
        """
        if kv.shape[1:] != self.record_shape or kv.dtype not in (self.storage, np.float32):
            raise InvalidArgument(f"pack wants {self.storage} or float32 [n, *{self.record_shape}],"
                                  f" not {_told(kv)}")
        if kv.dtype != self.storage:
            kv = to_storage(kv, self.kv_dtype)
        records = np.ascontiguousarray(kv).reshape(len(kv), -1).view(np.uint8)
        if out is None:
            return records
        if out.dtype != np.uint8 or out.shape != records.shape or not out.flags.writeable:
            raise InvalidArgument(f"pack wants to fill uint8 {records.shape}, not {_told(out)}")
        out[...] = records
        return out

    # ---- the steps

    def embed(self, tokens):
        """Token ids [n] -> float32 [n, dim]."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise InvalidArgument(f"token ids must be integers [n], not {ids.dtype} {ids.shape}")
        if ids.size and not 0 <= ids.min() <= ids.max() < self.params.vocab:
            raise InvalidArgument(f"token ids must be within 0..{self.params.vocab - 1}")
        return self._embedding.columns(ids)

    def layer(self, l, h, position, kv):
        """Layer `l` for n consecutive new tokens of one context, the first at `position`.

        h: float32 [n, dim]. kv: the float32 working cache of this layer, [capacity, 2,
        num_kv_heads, head_dim] with capacity a multiple of 64; its rows before `position` hold the
        past, and any other row must be finite; rows position..position+n are written here.
        Returns (h, new_kv): new_kv [n, 2, num_kv_heads, head_dim] in the storage dtype.
        """
        positions = range(position, position + len(h))
        return self._step(l, h, positions, [(slice(0, len(h)), position, kv)])

    def decode(self, l, h, positions, kvs):
        """Layer `l` for one new token of each of n contexts: the weights are read once for all.

        h: float32 [n, dim]. positions: n positions. kvs: the n working caches, as for `layer`.
        Returns (h, new_kv) as `layer` does; in exact mode with the bits of n calls of `layer`.
        """
        if not len(h) == len(positions) == len(kvs):
            raise InvalidArgument(f"{len(h)} rows, {len(positions)} positions, {len(kvs)} caches")
        return self._step(l, h, positions, [
            (slice(i, i + 1), position, kv)
            for i, (position, kv) in enumerate(zip(positions, kvs))])

    def logits(self, h, position):
        """h [n, dim] after the last layer -> [n, vocab]. `position` is that of the first of n
        consecutive tokens, or a list of n positions (one token of each of n contexts)."""
        rows = _unit(h, self.params.eps)
        rows *= self._norm
        one = isinstance(position, (int, np.integer))
        return self._head(rows, range(position, position + len(h)) if one else position)

    def _step(self, l, h, positions, runs):
        """One layer over runs: (rows of h, position of the first, working cache)."""
        if h.dtype != np.float32 or h.shape[1:] != (self.params.dim,):
            raise InvalidArgument(f"h is float32 [n, {self.params.dim}], not {_told(h)}")
        for rows, position, kv in runs:
            self._check(rows.stop - rows.start, position, kv)
        p, w, n = self.params, self._layers[l], len(h)
        num_rotated = p.num_heads + p.num_kv_heads
        x = w.qkv(_unit(h, p.eps), positions).reshape(n, num_rotated + p.num_kv_heads, p.head_dim)
        self._rotate(x[:, :num_rotated], positions)
        new = x[:, p.num_heads:].reshape(n, *self.record_shape)
        new_kv = to_storage(new, self.kv_dtype)
        y = np.empty((n, p.dim), np.float32)
        for rows, position, kv in runs:
            count = rows.stop - rows.start
            from_storage(new_kv[rows], self.kv_dtype, kv[position:position + count])
            y[rows] = attend(x[rows, :p.num_heads], position, kv, self.exact)
        h = h + w.out(y, positions)
        h += w.down(_swiglu(w.gate_up(_unit(h, p.eps), positions)), positions)
        return h, new_kv

    def _rotate(self, x, positions):
        """Rotary embedding of x[n, heads, head_dim], in place; a head's halves are the pairs."""
        at = slice(positions[0], positions[-1] + 1) if isinstance(positions, range) else positions
        cos, sin = self._cos[at][:, None], self._sin[at][:, None]
        half = x.shape[2] // 2
        a, b = x[..., :half], x[..., half:]
        turned = a * sin
        turned += b * cos
        a *= cos
        a -= b * sin
        b[...] = turned

    def _check(self, n, position, kv):
        if n < 1 or position < 0 or position + n > self.params.max_positions:
            raise InvalidArgument(f"{n} tokens at position {position}: at least one, within "
                                  f"0..{self.params.max_positions}")
        if (kv.dtype != np.float32 or kv.shape[1:] != self.record_shape or len(kv) % GROUP
                or not kv.flags.writeable):
            raise InvalidArgument(f"a working cache is writable float32 [a multiple of {GROUP}, "
                                  f"*{self.record_shape}], not {_told(kv)}")
        if position + n > len(kv):
            raise InvalidArgument(f"{n} tokens at position {position} exceed the working cache "
                                  f"of {len(kv)} rows")

    def new_cache(self, capacity):
        """A zeroed working cache of ONE layer for `capacity` tokens, rounded up to 64 rows."""
        rows = -(-capacity // GROUP) * GROUP
        return np.zeros((rows, *self.record_shape), np.float32)

    # ---- the whole model over working caches that never leave memory

    def new_caches(self, capacity):
        """A working cache for each layer."""
        return [self.new_cache(capacity) for _ in range(self.num_layers)]

    def forward(self, tokens, position, caches):
        """All layers for new tokens at `position` -> h [n, dim]."""
        h = self.embed(tokens)
        for l in range(self.num_layers):
            h, _ = self.layer(l, h, position, caches[l])
        return h

    def greedy(self, tokens, count):
        """The `count` likeliest next tokens, one after another; ties go to the lowest id."""
        caches = self.new_caches(len(tokens) + count)
        h, position, out = self.forward(tokens, 0, caches), len(tokens), []
        while True:
            out.append(int(np.argmax(self.logits(h[-1:], position - 1)[0])))
            if len(out) == count:
                return out
            h = self.forward(out[-1:], position, caches)
            position += 1


def _told(array):
    """An array's type for a message."""
    return f"{'' if array.flags.writeable else 'read-only '}{array.dtype} {array.shape}"


def _halves(weight, head_dim):
    """GGUF rotates pairs (2i, 2i + 1); put each head's even rows first, so halves pair up."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return heads.transpose(0, 2, 1, 3).reshape(weight.shape)


def _unit(h, eps):
    """Rows of h divided by their root mean square, as a new array."""
    square = np.einsum("ij,ij->i", h, h)        # no temporary of h's size
    square /= np.float32(h.shape[1])
    square += np.float32(eps)
    return h / np.sqrt(square)[:, None]


def _swiglu(x):
    """x[n, 2 * ffn] = gate | up -> silu(gate) * up, [n, ffn]."""
    gate, up = x[:, :x.shape[1] // 2], x[:, x.shape[1] // 2:]
    y = np.negative(gate)
    with np.errstate(over="ignore"):            # exp(89) is inf, and gate / inf the right 0
        np.exp(y, out=y)
    y += 1
    np.divide(gate, y, out=y)
    y *= up
    return y
