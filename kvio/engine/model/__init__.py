"""A small Llama in numpy, whose KV-Cache belongs to the caller.

`LlamaModel` computes layer by layer over a working cache that the engine fills; `Tokenizer` and
`find_smollm2` serve the one real model, SmolLM2-135M-Instruct.
"""
from kvio.engine.model.chat import render_chat, turn_texts
from kvio.engine.model.llama import LlamaModel
from kvio.engine.model.locate import find_smollm2

__all__ = ["LlamaModel", "Tokenizer", "find_smollm2", "render_chat", "turn_texts"]


def __getattr__(name):
    """The tokenizer alone needs a package beside numpy; a seeded model goes without."""
    if name != "Tokenizer":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from kvio.engine.model.tokenizer import Tokenizer
    return Tokenizer
