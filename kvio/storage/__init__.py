"""The block store: Full Blocks in segment files, found by key. Format: docs/format.md."""
from kvio.storage.store import BlockStore, Ring

__all__ = ["BlockStore", "Ring"]
