"""Geometry of the KV-Cache: Full Blocks, Layer Blocks, keys, and the work requests of a layer.

A **Layer Block** holds one layer of a block of tokens, `[1, block_tokens, bytes]`; a **Full
Block** holds all layers, `[num_layers, block_tokens, bytes]`. Layer Blocks of one block, one
after another, are the Full Block: slicing is the only conversion.
"""
import hashlib
import json
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvio._ext import block as _block
from kvio.errors import InvalidArgument, checked_int

__all__ = ["BlockLayout", "KEY_DTYPE", "LayerDescriptors", "READ", "SGE_DTYPE", "Side", "WRITE",
           "WR_DTYPE", "block_keys", "root_key", "token_array"]

PAGE = 4096
READ, WRITE = 1, 2                                  # enum kvio_opcode

_INT64 = np.dtype(np.int64)
KEY_DTYPE = np.dtype([("key", "u1", (16,)), ("parent", "u1", (16,))])
WR_DTYPE = np.dtype([("wr_id", "<u8"), ("local_addr", "<u8"), ("remote_addr", "<u8"),
                     ("lkey", "<u8"), ("rkey", "<u8"), ("length", "<u4"), ("opcode", "<u4"),
                     ("sge_first", "<u4"), ("num_sge", "<u4"), ("reserved", "<u8")])
SGE_DTYPE = np.dtype([("addr", "<u8"), ("lkey", "<u8"), ("length", "<u4"), ("reserved", "<u4")])

# Bytes of one value of a KV-Cache. `fp8_ds_mla` is DeepSeek-V3.2's latent: 512 FP8 values, four
# float32 scales and 64 BF16 rope values are 656 bytes; its indexer key adds 128 FP8 and a scale.
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1,
             "int8": 1}


@dataclass(frozen=True)
class BlockLayout:
    """The shape of a block.

    `bytes_per_token` is per layer: an int, or a sequence of `num_layers` ints when layers differ.
    """

    num_layers: int
    block_tokens: int = 64
    bytes_per_token: int | tuple[int, ...] | None = None

    def __post_init__(self):
        for name, most in (("num_layers", 1 << 16), ("block_tokens", 1 << 20)):
            object.__setattr__(self, name, checked_int(name, getattr(self, name), 1, most))
        per_layer = self.bytes_per_token
        if not isinstance(per_layer, (list, tuple, np.ndarray)):
            per_layer = (per_layer,) * self.num_layers
        per_layer = tuple(checked_int("bytes_per_token", n, 1) for n in per_layer)
        if len(per_layer) != self.num_layers:
            raise InvalidArgument(f"bytes_per_token needs one int for each of {self.num_layers} "
                                  f"layers, not {len(per_layer)}")
        uniform = len(set(per_layer)) == 1
        object.__setattr__(self, "bytes_per_token", per_layer[0] if uniform else per_layer)
        if max(per_layer) * self.block_tokens > _block.MAX_LENGTH:
            raise InvalidArgument("a Layer Block may not exceed 1 GiB; use fewer block_tokens")

    @property
    def is_uniform(self) -> bool:
        """True when all layers have the same bytes per token."""
        return isinstance(self.bytes_per_token, int)

    @cached_property
    def layer_bytes_per_token(self) -> tuple[int, ...]:
        """Bytes of one token, layer by layer."""
        per = self.bytes_per_token
        return (per,) * self.num_layers if isinstance(per, int) else per

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where each Layer Block starts in its Full Block; one more entry, the end."""
        sizes = [n * self.block_tokens for n in self.layer_bytes_per_token]
        return tuple(int(n) for n in np.concatenate([[0], np.cumsum(sizes)]))

    @cached_property
    def full_block_nbytes(self) -> int:
        """Bytes of a Full Block."""
        return self.layer_offsets[-1]

    @cached_property
    def stride(self) -> int:
        """Bytes from one block of a pool or slot of a segment to the next: whole 4 KiB pages."""
        return -(-self.full_block_nbytes // PAGE) * PAGE

    def layer_block_nbytes(self, layer: int) -> int:
        """Bytes of the Layer Block of `layer`."""
        return self.layer_bytes_per_token[layer] * self.block_tokens

    def num_full_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` fill; a partial block has no key and is never stored."""
        return num_tokens // self.block_tokens

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`, the last one maybe partial."""
        return -(-num_tokens // self.block_tokens)

    def to_dict(self) -> dict:
        """Plain data, as in a store's kvio.json."""
        per = self.bytes_per_token
        return {"num_layers": self.num_layers, "block_tokens": self.block_tokens,
                "bytes_per_token": per if isinstance(per, int) else list(per)}

    @classmethod
    def from_dict(cls, data: dict) -> "BlockLayout":
        """The inverse of `to_dict`; InvalidArgument for anything else."""
        try:
            return cls(**data)
        except TypeError:
            raise InvalidArgument(f"not a block layout: {data!r}") from None

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the geometry does (docs/format.md §1)."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16, person=b"kvio-layout-1").digest()

    @classmethod
    def from_config(cls, config: dict, dtype: str = "bfloat16", block_tokens: int = 64,
                    layers: str = "all") -> "BlockLayout":
        """The layout of a model from its Hugging Face config.

        MHA and GQA: `2 * num_key_value_heads * head_dim` values a token and layer (keys and
        values). MLA: `kv_lora_rank + qk_rope_head_dim`, and `index_head_dim` more with an
        indexer. Sources: the models' own config.json and DualPath (arXiv 2602.21548).
        `dtype` is a storage type or "fp8_ds_mla" (DeepSeek-V3.2: 656 bytes, 788 with the
        indexer). `layers="full_attention"` leaves out the layers that `layer_types` names
        otherwise (a sliding window is not worth storing).
        """
        try:
            num_layers = config["num_hidden_layers"]
            if layers == "full_attention":
                num_layers = sum(kind == "full_attention" for kind in config["layer_types"])
            elif layers != "all":
                raise InvalidArgument(f"layers must be 'all' or 'full_attention', not {layers!r}")
            per_token = _mla_bytes(config, dtype) if config.get("kv_lora_rank") else \
                _gqa_bytes(config, dtype)
        except KeyError as missing:
            raise InvalidArgument(f"the model config lacks {missing}") from None
        return cls(num_layers, block_tokens, per_token)

    @classmethod
    def preset(cls, name: str, block_tokens: int = 64) -> "BlockLayout":
        """A well-known model's layout; InvalidArgument lists the names."""
        if name not in PRESETS:
            raise InvalidArgument(f"no preset {name!r}; there are {', '.join(sorted(PRESETS))}")
        config, dtype, layers = PRESETS[name]
        return cls.from_config(config, dtype, block_tokens, layers)


def _itemsize(dtype: str) -> int:
    if dtype not in _ITEMSIZE:
        raise InvalidArgument(f"dtype must be one of {', '.join(sorted(_ITEMSIZE))} or "
                              f"fp8_ds_mla for MLA, not {dtype!r}")
    return _ITEMSIZE[dtype]


def _gqa_bytes(config: dict, dtype: str) -> int:
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return 2 * num_kv_heads * head_dim * _itemsize(dtype)


def _mla_bytes(config: dict, dtype: str) -> int:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    index = config.get("index_head_dim") or 0
    if dtype == "fp8_ds_mla":
        return rank + rank // 128 * 4 + 2 * rope + (index + index // 128 * 4)
    return (rank + rope + index) * _itemsize(dtype)


def _gqa(num_layers, num_kv_heads, head_dim, **more):
    return {"num_hidden_layers": num_layers, "num_attention_heads": num_kv_heads,
            "num_key_value_heads": num_kv_heads, "head_dim": head_dim, **more}


_V32 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
PRESETS = {
    "deepseek-v3.2": (_V32, "fp8_ds_mla", "all"),
    "deepseek-v3.2-indexer": ({**_V32, "index_head_dim": 128}, "fp8_ds_mla", "all"),
    "deepseek-27b": ({"num_hidden_layers": 30, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                      "index_head_dim": 64}, "float8_e4m3", "all"),
    "qwen2.5-32b": (_gqa(64, 8, 128), "float16", "all"),
    "llama-3.1-8b": (_gqa(32, 8, 128), "float16", "all"),
    "llama-3.1-70b": (_gqa(80, 8, 128), "float16", "all"),
    "qwen3-235b-a22b": (_gqa(94, 4, 128), "float8_e4m3", "all"),
    "gpt-oss-120b": (_gqa(36, 8, 64, layer_types=["sliding_attention", "full_attention"] * 18),
                     "float8_e4m3", "full_attention"),
    "smollm2-135m": (_gqa(30, 3, 64), "float16", "all"),
}


def root_key(layout: BlockLayout, namespace: bytes = b"") -> bytes:
    """The parent of every chain's first block: it names model, tenant and geometry; 16 bytes.

    It begins with a mark, so that a first block can be told from one whose parent is not stored.
    """
    if not isinstance(namespace, bytes):
        raise InvalidArgument(f"namespace must be bytes, not {type(namespace).__name__}")
    digest = hashlib.blake2b(namespace, digest_size=16, salt=layout.fingerprint,
                             person=b"kvio-root-1").digest()
    return b"root" + digest[:12]


def block_keys(token_ids, layout: BlockLayout, namespace: bytes = b"",
               parent: bytes | None = None) -> np.ndarray:
    """Keys of the full blocks of a token sequence, each chained to the one before.

    Returns a structured array `(key, parent)`, 16 bytes each, one row per full block: a slice of
    it still knows its parents. `parent` continues a chain instead of starting at the root.
    Stable between processes and machines. Formula: docs/format.md §1.
    """
    ids = token_array(token_ids)
    root = root_key(layout, namespace) if parent is None else bytes(parent)
    if len(root) != 16:
        raise InvalidArgument(f"parent must be a key of 16 bytes, not {len(root)}")
    keys = np.empty(len(ids) // layout.block_tokens, KEY_DTYPE)
    _block.block_keys_into(ids, layout.block_tokens, root, keys.view(np.uint8))
    return keys


def any_array(values, what: str) -> np.ndarray:
    """np.asarray; InvalidArgument where nesting or a type leaves no array to make."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as wrong:
        raise InvalidArgument(f"{what} do not make an array: {wrong}") from None


def token_array(token_ids) -> np.ndarray:
    """Token ids as a contiguous uint32 array; InvalidArgument unless they are such."""
    ids = any_array(token_ids, "token ids")
    if ids.size == 0:
        return np.empty(0, np.uint32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument("token ids must be a sequence of ints, not "
                              f"{ids.dtype} of shape {ids.shape}")
    if ids.dtype != np.uint32:
        if int(ids.min()) < 0 or int(ids.max()) > 0xFFFFFFFF:
            raise InvalidArgument("token ids must lie between 0 and 2**32 - 1")
        ids = ids.astype("<u4")
    return np.ascontiguousarray(ids)


@dataclass(frozen=True)
class Side:
    """Where the blocks of one end of a transfer lie.

    Block `b` of layer `l` starts at `base + b * block_stride + layer_offsets[l]`; `key` is the
    region's key. A pool of Full Blocks, a cache kept layer by layer and a workspace of one layer
    are all of this kind.
    """

    base: int
    block_stride: int
    layer_offsets: tuple[int, ...]
    key: int = 0

    def __post_init__(self):
        if not isinstance(self.key, (int, np.integer)):
            raise InvalidArgument("key must be a region's key, an int (region.key), not "
                                  f"{self.key!r}")


class LayerDescriptors:
    """The work requests for "layer l of these blocks", built once for all layers.

    `peer.read` and `peer.write` take it: they copy `wrs` (dtype WR_DTYPE), adding `local_offset`
    and `remote_offset`, which lead from the layer that `wrs` were built for to the current one. So
    pointing at another layer touches no request, whatever is in flight. `num_tokens` cuts the last
    block short. With max_sge over 1, blocks that touch on the remote side become one request with
    a list (`sges`) of up to that many; `peer.query()` says how many a queue pair takes.
    """

    __slots__ = ("wrs", "sges", "local_offset", "remote_offset", "_args", "_built", "_layer",
                 "_layout", "_max_sge", "_tokens")

    def __init__(self, opcode: int, layout: BlockLayout, local: Side, local_ids, remote: Side,
                 remote_ids, num_tokens: int, layer: int = 0, *, max_sge: int = 1):
        """`*_ids` are contiguous int64 arrays of one id a block, or None for 0, 1, 2, ..."""
        for side, ids in (local, local_ids), (remote, remote_ids):
            if not isinstance(side, Side):
                raise InvalidArgument(f"a Side is needed, as pool.side(key) gives, not {side!r}")
            if len(side.layer_offsets) < layout.num_layers:
                raise InvalidArgument("each side needs a layer_offset for each of "
                                      f"{layout.num_layers} layers")
            if ids is not None and getattr(ids, "dtype", None) != _INT64:
                raise InvalidArgument("block ids must be an int64 array (as BlockPool.alloc gives) "
                                      f"or None, not {ids!r}")
        if opcode not in (READ, WRITE):
            raise InvalidArgument(f"opcode must be kvio.READ or kvio.WRITE, not {opcode!r}")
        if not layout.is_uniform:                   # read again for a layer of another size
            local_ids, remote_ids = (None if ids is None else ids.copy()
                                     for ids in (local_ids, remote_ids))
        self._args = opcode, local, local_ids, remote, remote_ids
        self._layout, self._tokens = layout, checked_int("num_tokens", num_tokens, 1)
        self._max_sge = checked_int("max_sge", max_sge, 1, 1 << 16)
        self._build(checked_int("layer", layer, 0, layout.num_layers - 1))

    def _build(self, layer):
        opcode, local, local_ids, remote, remote_ids = self._args
        per_token, tokens = self._layout.layer_bytes_per_token[layer], self._layout.block_tokens
        count = -(-self._tokens // tokens)
        if count >= 1 << 31:
            raise InvalidArgument(f"cannot move {self._tokens} tokens, {count} blocks, at once")
        wrs = np.empty(count, WR_DTYPE)
        try:
            made = _block.describe_into(
                wrs, opcode, local.base + local.layer_offsets[layer], local.block_stride,
                local.key, local_ids, remote.base + remote.layer_offsets[layer],
                remote.block_stride, remote.key, remote_ids, tokens * per_token,
                (self._tokens - (count - 1) * tokens) * per_token)
        except (ValueError, OverflowError, BufferError) as wrong:
            given = ", ".join(str(len(ids)) for ids in (local_ids, remote_ids) if ids is not None)
            raise InvalidArgument(f"{self._tokens} tokens are {count} blocks, which need as many "
                                  f"ids on each side (here {given or 'None'}): {wrong}") from None
        self.wrs, self.sges = wrs if made == count else wrs[:made], None
        if self._max_sge > 1:
            sges = np.empty(made, SGE_DTYPE)
            left, used = _block.gather_into(self.wrs, sges, self._max_sge)
            self.wrs, self.sges = self.wrs[:left], sges[:used]
        self._built = self._layer = layer
        self.local_offset = self.remote_offset = 0

    @property
    def nbytes(self) -> int:
        """Bytes that one layer moves."""
        return self._tokens * self._layout.layer_bytes_per_token[self._layer]

    def layer(self, layer: int) -> "LayerDescriptors":
        """Point at another layer; returns itself. Requests are built anew only where the layer is
        of another size."""
        built, per_token = self._built, self._layout.layer_bytes_per_token
        if type(layer) is not int or not 0 <= layer < len(per_token):
            layer = checked_int("layer", layer, 0, len(per_token) - 1)
        if per_token[layer] != per_token[built]:
            self._build(layer)
            return self
        _, local, _, remote, _ = self._args
        self.local_offset = local.layer_offsets[layer] - local.layer_offsets[built]
        self.remote_offset = remote.layer_offsets[layer] - remote.layer_offsets[built]
        self._layer = layer
        return self
