"""Plug-ins for engines. Nothing is imported here: each module needs its own engine, or none."""
