"""kvio moves LLM KV-Cache between storage, host memory, GPU memory and nodes (DualPath)."""
from kvio import errors
from kvio.completion import Transfer
from kvio.layout import READ, WRITE, BlockLayout, LayerDescriptors, Side, block_keys
from kvio.memory import BlockPool, LayerPool
from kvio.storage import BlockStore
from kvio.transfer import COLLECTIVE, KV, Nic, Region, TrafficClass

__version__ = "0.1.0"

__all__ = ["BlockLayout", "BlockPool", "BlockStore", "COLLECTIVE", "KV", "LayerDescriptors",
           "LayerPool", "Nic", "READ", "Region", "Side", "TrafficClass", "Transfer", "WRITE",
           "block_keys", "errors", "get_include"]


def get_include() -> str:
    """The folder to compile against: `#include "kvio/nic.h"` and its neighbours."""
    import os
    return os.path.join(os.path.dirname(__file__), "include")
