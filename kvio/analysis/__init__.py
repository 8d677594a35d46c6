"""The theory: which link binds, what loading costs beside computing, how large buffers must be.

Everything here is arithmetic on a few numbers; nothing is measured. Sources: DualPath (arXiv
2602.21548), and the models' own configurations.
"""
from kvio.analysis.cost import COSTS, ModelCost, cache_compute_ratio, model_cost
from kvio.analysis.links import (LINKS, ClusterShape, Link, best_read_rates, bottleneck_free_range,
                                 derived_bounds, flow_coefficients, formula_bounds, positive,
                                 utilisation)
from kvio.analysis.sizing import alpha_tokens, beta_tokens, buffer_bytes, working_set_bytes

__all__ = ["COSTS", "ClusterShape", "LINKS", "Link", "ModelCost", "alpha_tokens",
           "best_read_rates", "beta_tokens", "bottleneck_free_range", "buffer_bytes",
           "cache_compute_ratio", "derived_bounds", "flow_coefficients", "formula_bounds",
           "model_cost", "positive", "utilisation", "working_set_bytes"]
