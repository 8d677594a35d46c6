"""A small Llama in numpy, whose KV-Cache belongs to the caller.

`LlamaModel` computes layer by layer over a working cache that the engine fills; `Tokenizer` and
`find_smollm2` serve the one real model, SmolLM2-135M-Instruct.
"""
from kvio.engine.model.chat import render_chat, turn_texts
from kvio.engine.model.llama import LlamaModel
from kvio.engine.model.locate import find_smollm2
from kvio.engine.model.tokenizer import Tokenizer

__all__ = ["LlamaModel", "Tokenizer", "find_smollm2", "render_chat", "turn_texts"]
