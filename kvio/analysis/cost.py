"""What loading a prompt's hits costs beside computing its new tokens: bytes over operations.

A token costs two operations for each weight that it uses, and attention to each token before it.
Attention is counted as it is computed against a cache: GQA and MHA 4 d operations a head (2 d for
the scores, 2 d for the values); absorbed MLA 2 (rank + rope) + 2 rank a head, for keys and values
stay compressed; an indexer 2 d a head on top, for which attention itself sees `top_k` tokens.
"""
from dataclasses import dataclass

from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout

__all__ = ["COSTS", "ModelCost", "cache_compute_ratio", "model_cost"]


@dataclass(frozen=True)
class ModelCost:
    """Operations of a model. `num_weights` are those that a token uses (active, without the
    embedding table); `pair_flop` is what attention costs for each pair of a new token and one
    before it, over all layers that look back without limit.

    `top_k` > 0: attention itself sees that many tokens at most, and `indexer_flop` is what it
    costs to choose them, again for each pair. `window_flop` is attention of layers that see only
    `window` tokens. `layout` is what is stored of a token.
    """

    layout: str
    num_weights: float
    pair_flop: float
    top_k: int = 0
    indexer_flop: float = 0.0
    window_flop: float = 0.0
    window: int = 0

    def prefill_flop(self, num_context_tokens: int, num_new_tokens: int) -> float:
        """Operations to compute new tokens that follow a stored context.

        New tokens see one another as well; the mean of what they see of themselves is half.
        """
        seen = num_context_tokens + num_new_tokens / 2
        attended = min(seen, self.top_k) if self.top_k else seen
        each = 2 * self.num_weights + self.pair_flop * attended + self.indexer_flop * seen \
            + self.window_flop * min(seen, self.window)
        return num_new_tokens * each


def _gqa(layers, heads, head_dim):
    return 4.0 * layers * heads * head_dim


def _mla(layers, heads, rank=512, rope=64):
    return layers * heads * (2.0 * (rank + rope) + 2.0 * rank)


# Weights: the models' own cards. Heads, layers and widths: their config.json.
COSTS = {
    "qwen2.5-32b": ModelCost("qwen2.5-32b", 31.0e9, _gqa(64, 40, 128)),
    "gpt-oss-120b": ModelCost("gpt-oss-120b", 5.1e9, _gqa(18, 64, 64),
                              window_flop=_gqa(18, 64, 64), window=128),
    "qwen3-235b-a22b": ModelCost("qwen3-235b-a22b", 22e9, _gqa(94, 64, 128)),
    "deepseek-v3": ModelCost("deepseek-v3.2", 37e9, _mla(61, 128)),
    "deepseek-v3.2": ModelCost("deepseek-v3.2", 37e9, _mla(61, 128), top_k=2048,
                               indexer_flop=2.0 * 61 * 64 * 128),
    "llama-3.1-8b": ModelCost("llama-3.1-8b", 7.5e9, _gqa(32, 32, 128)),
    "llama-3.1-70b": ModelCost("llama-3.1-70b", 69.5e9, _gqa(80, 64, 128)),
}


def model_cost(name: str) -> ModelCost:
    """A well-known model's costs; InvalidArgument lists the names."""
    if name not in COSTS:
        raise InvalidArgument(f"no model {name!r}; there are {', '.join(sorted(COSTS))}")
    return COSTS[name]


def cache_compute_ratio(model: ModelCost | str, num_context_tokens: int,
                        num_new_tokens: int = 429) -> float:
    """Bytes loaded for each operation computed when `num_context_tokens` hit and
    `num_new_tokens` are appended; times 1e6 it is GB per PFLOP. Source: DualPath, Table 1."""
    if num_context_tokens < 0 or num_new_tokens < 1:
        raise InvalidArgument("a context of at least 0 tokens and at least one new token, not "
                              f"{num_context_tokens} and {num_new_tokens}")
    cost = model_cost(model) if isinstance(model, str) else model
    per_token = sum(BlockLayout.preset(cost.layout).layer_bytes_per_token)
    return num_context_tokens * per_token / cost.prefill_flop(num_context_tokens, num_new_tokens)
