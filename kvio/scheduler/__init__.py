"""Which prefill engine, which decode engine, which read path: DualPath's decisions (§6).

Decisions only. There is no clock, no I/O and no randomness in here: queue lengths come in as
`EngineReport`s, decisions go out as plain data with their reason, so the reference engine and a
simulator run the very same code. All ties go to the lowest engine id.

Vocabulary of the paper: seq_e = `num_requests`, tok_e = `num_tokens`, read_q =
`read_queue_tokens`, alpha and beta as there, Z the limit of normal load in `choose_decode`.
"""
from kvio.scheduler.attention import AttentionFit, AttentionModel, fit_attention, profile
from kvio.scheduler.data import (DE, PE, EngineReport, Part, PrefillWork, Rejection, Request,
                                 Route)
from kvio.scheduler.decode import choose_decode, choose_group
from kvio.scheduler.fill import Lane
from kvio.scheduler.paths import (AnyNode, Basic, NodeState, Push, ReadChoice, RoundRobin,
                                  ShorterQueue, Split, choose_path, spare_rate)
from kvio.scheduler.prefill import choose_prefill
from kvio.scheduler.quota import pack_prefill
from kvio.scheduler.reason import Reason
from kvio.scheduler.recompute import LoadChoice, LoadOrRecompute
from kvio.scheduler.scheduler import Scheduler

__all__ = ["AnyNode", "AttentionFit", "AttentionModel", "Basic", "DE", "EngineReport", "Lane",
           "LoadChoice", "LoadOrRecompute", "NodeState", "PE", "Part", "PrefillWork", "Push",
           "ReadChoice", "Reason", "Rejection", "Request", "RoundRobin", "Route", "Scheduler",
           "ShorterQueue", "Split", "choose_decode", "choose_group", "choose_path",
           "choose_prefill", "fit_attention", "pack_prefill", "profile", "spare_rate"]
