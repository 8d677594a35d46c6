"""The models that `kvio demo` can serve: the real one, and seeded ones that cost next to nothing.

A seeded model talks noise, but the same noise on every machine; it runs where arithmetic is slow
(an emulated guest) or the real model is not installed, and checks the same bytes.
"""
import contextlib
import re
from dataclasses import dataclass

import numpy as np

from kvio.engine.request import Session, Turn
from kvio.errors import InvalidArgument, ModelMissing
from kvio.layout import BlockLayout

__all__ = ["DemoModel", "check_model", "load_model"]

SEED = 7
SEEDED = re.compile(r"seeded(?::([1-8]))?")


@dataclass(frozen=True)
class DemoModel:
    """A model, its agents, and the sizes that suit both. `text(tokens)` shows generated tokens."""

    title: str
    name: str
    model: object
    layout: BlockLayout
    sessions: tuple[Session, ...]
    text: object
    num_blocks: int                         # of each buffer and of each decode engine's HBM
    max_tokens: int
    segment_bytes: int | None = None        # of the store: small where little is stored


def check_model(name: str) -> str:
    """`name`, or InvalidArgument where no model is called so."""
    if name != "smollm2" and not SEEDED.fullmatch(name):
        raise InvalidArgument("the model is smollm2, or seeded:LAYERS with 1 to 8 layers (seeded "
                              f"is seeded:2), not {name!r}")
    return name


def load_model(name: str = "smollm2", exact: bool = False, num_turns: int | None = None,
               num_new_tokens: int | None = None) -> DemoModel:
    """"smollm2" (ModelMissing where it is not installed) or "seeded:LAYERS", which is always
    exact. num_turns and num_new_tokens: of each agent, None for what suits the model."""
    seeded = SEEDED.fullmatch(check_model(name))
    if seeded:
        return _seeded(int(seeded[1] or 2), num_turns or 3, num_new_tokens or 6)
    return _smollm2(exact, num_turns or 3, num_new_tokens or 12)


def _smollm2(exact, num_turns, num_new_tokens):
    from kvio.engine.conversation import AGENTS
    from kvio.engine.model import LlamaModel, Tokenizer, find_smollm2, turn_texts
    path = find_smollm2()
    model, tokenizer = LlamaModel.from_gguf(path, exact=exact), Tokenizer.from_gguf(path)
    sessions = tuple(
        Session(agent.name, tuple(Turn(tuple(tokenizer.encode(text)), num_new_tokens)
                                  for text in turn_texts(agent)[:num_turns]))
        for agent in AGENTS)
    return DemoModel("SmolLM2-135M-Instruct", "smollm2-135m-instruct", model,
                     BlockLayout.from_config(model.config(), "float16"), sessions,
                     tokenizer.decode, 128, 2048)


def _seeded(num_layers, num_turns, num_new_tokens):
    from kvio.engine.model import LlamaModel
    model = LlamaModel.random(SEED, num_layers=num_layers, exact=True)
    draw = np.random.default_rng(SEED)

    def append(turn):
        return tuple(draw.integers(0, model.params.vocab, 40 + 9 * turn).tolist())

    sessions = tuple(Session(f"agent {i}", tuple(Turn(append(turn), num_new_tokens)
                                                 for turn in range(num_turns)))
                     for i in range(3))
    return DemoModel(f"a seeded Llama of {num_layers} layers (it talks noise)",
                     f"seeded-{num_layers}", model,
                     BlockLayout.from_config(model.config(), "float16", block_tokens=16),
                     sessions, lambda tokens: " ".join(map(str, tokens)), 64,
                     model.params.max_positions, 1 << 20)


def one_blas_thread(needed: bool):
    """An engine is one thread; BLAS threads of their own would fight over the cores. Where the
    arithmetic is small that is no matter."""
    try:
        from threadpoolctl import threadpool_limits
    except ImportError as missing:
        if not needed:
            return contextlib.nullcontext()
        raise ModelMissing("the demo needs threadpoolctl; run: pip install threadpoolctl") \
            from missing
    return threadpool_limits(1, "blas")
