"""kvio moves LLM KV-Cache between storage, host memory, GPU memory and nodes (DualPath)."""
__version__ = "0.1.0"
