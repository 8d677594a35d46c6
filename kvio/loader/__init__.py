"""What moves where, and in which order: `ReadPlan`s, and the movers that carry out their steps."""
from kvio.loader.admission import Budget, Claim, buffer_order
from kvio.loader.mover import Binding, Mover
from kvio.loader.plan import (COMPUTE, NIC_READ, NIC_WRITE, RELEASE, STORAGE_READ, STORAGE_WRITE,
                              Part, ReadPlan, Step, chunk_steps, insert_steps, load_steps,
                              path_name, persist_plan, read_plan, traffic)
from kvio.loader.run import run_plan

__all__ = ["Binding", "Budget", "COMPUTE", "Claim", "Mover", "NIC_READ", "NIC_WRITE", "Part",
           "RELEASE", "ReadPlan", "STORAGE_READ", "STORAGE_WRITE", "Step", "buffer_order",
           "chunk_steps", "insert_steps", "load_steps", "path_name", "persist_plan", "read_plan",
           "run_plan", "traffic"]
