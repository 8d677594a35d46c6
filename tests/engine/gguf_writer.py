"""Writes small GGUF files for tests."""
import struct

import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8}


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(item):
    """A metadata value with its type id in front."""
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    strings = isinstance(item[0], str)
    body = b"".join(text(x) if strings else struct.pack("<i", x) for x in item)
    return struct.pack("<IIQ", 9, 8 if strings else 5, len(item)) + body


def gguf(meta, tensors, version=3, align=32):
    """File bytes. tensors: name -> (type name, shape [out, in], raw bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(meta))
    head += b"".join(text(key) + value(item) for key, item in meta.items())
    body = b""
    for name, (kind, shape, raw) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", TYPES[kind], len(body))
        body += raw + bytes(-len(raw) % align)
    return head + bytes(-len(head) % align) + body


def f32(array):
    array = np.ascontiguousarray(array, "<f4")
    return "F32", array.shape, array.tobytes()


def llama(dim=16, heads=2, kv_heads=1, ffn=24, vocab=20, layers=1, seed=0):
    """(meta, tensors) of a tiny Llama of random weights."""
    rng = np.random.default_rng(seed)
    kv_dim = dim // heads * kv_heads
    meta = {"general.architecture": "llama", "llama.block_count": layers,
            "llama.embedding_length": dim, "llama.attention.head_count": heads,
            "llama.attention.head_count_kv": kv_heads, "llama.feed_forward_length": ffn,
            "llama.context_length": 128, "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10000.0,
            "tokenizer.ggml.tokens": [f"t{i}" for i in range(vocab)]}
    shapes = {"token_embd": (vocab, dim), "output_norm": (dim,)}
    for l in range(layers):
        shapes |= {f"blk.{l}.{name}": shape for name, shape in dict(
            attn_norm=(dim,), attn_q=(dim, dim), attn_k=(kv_dim, dim), attn_v=(kv_dim, dim),
            attn_output=(dim, dim), ffn_norm=(dim,), ffn_gate=(ffn, dim), ffn_up=(ffn, dim),
            ffn_down=(dim, ffn)).items()}
    return meta, {f"{name}.weight": f32(rng.standard_normal(shape) / 4)
                  for name, shape in shapes.items()}
