"""The paper's rules as tables of examples: each row names the sentence of DualPath §6 it is for."""
import pickle
from types import SimpleNamespace

import pytest

from kvio.scheduler import (DE, PE, EngineReport, LoadOrRecompute, Reason, Request, RoundRobin,
                            Scheduler, choose_path)

ROOM = 10**6


def request(number, num_tokens=100, hits=0):
    """A request that needs `num_tokens` of HBM, one of them to be generated."""
    return Request(number, num_tokens - 1, hits, 1)


def pe(number, tok=0, read=0, seq=0, group=0, **more):
    return EngineReport(number, number, seq, tok, read, group_id=group, **more)


def de(number, tok=0, seq=0, free=ROOM, read=0, group=0, **more):
    return EngineReport(number, 100 + number, seq, tok, read, free, group, **more)


def given(lengths, alpha=50, beta=1000, hits=0, **options):
    made = Scheduler(alpha, beta, **options)
    for number, length in enumerate(lengths):
        made.submit(request(number, length, hits))
    return made


# (the sentence, engines, lengths of the requests, where they go; alpha = 50, beta = 1000)
PREFILL = [
    ("FIFO waiting queue", [pe(0)], [10, 20, 30], [0, 0, 0]),
    ("overloaded: tok_e > beta", [pe(0, tok=1001)], [10], []),
    ("... and tok_e = beta is not", [pe(0, tok=1000)], [10], [0]),
    ("short queue: read_q <= alpha", [pe(0, read=51), pe(1, tok=900, read=50)], [10], [1]),
    ("long queue: read_q > alpha and tok_e <= beta", [pe(0, read=51), pe(1, tok=1001)], [10], [0]),
    ("the min-tok_e PE of the short class", [pe(0, tok=7), pe(1, tok=5), pe(2, tok=6)], [10], [1]),
    ("... ties to the lowest id", [pe(2), pe(1), pe(3)], [10], [1]),
    ("else of the long class", [pe(0, tok=9, read=99), pe(1, tok=8, read=99)], [10], [1]),
    ("... short first, whatever the load", [pe(0, tok=1, read=99), pe(1, tok=999)], [10, 10],
     [1, 0]),
    ("else the fetch ends", [pe(0, tok=950), pe(1, tok=980, read=99)], [60, 30, 10], [0, 1]),
    ("tok_e is updated after each assignment", [pe(0, tok=10), pe(1)], [15, 10, 10, 10],
     [1, 0, 1, 0]),
    ("... and read_q is not, until it is read", [pe(0, read=50)], [10, 10], [0, 0]),
]


@pytest.mark.parametrize("sentence, engines, lengths, expected", PREFILL,
                         ids=[row[0] for row in PREFILL])
def test_prefill_engines(sentence, engines, lengths, expected):
    made = given(lengths)
    routes = made.fetch(engines, [de(0)])
    assert [r.prefill_engine for r in routes] == expected
    assert [r.request_id for r in routes] == list(range(len(expected)))     # first in, first out
    assert made.num_waiting == len(lengths) - len(expected)


# (the sentence, engines, lengths, (decode engine, "Z" or "high") of each request that gets one)
DECODE = [
    ("the global queue is drained, each to the group with the least total tok_e",
     [de(0, tok=300, group=7), de(1, tok=60, group=2), de(2, tok=40, group=2)], [100, 50, 120, 90],
     [1, 2, 2, 0]),
    ("... total: an idle engine does not make a busy group a free one",
     [de(0, tok=500, group=1), de(1, group=1), de(2, tok=400, group=2)], [10], [2]),
    ("... ties to the lowest group", [de(0, group=3), de(1, group=1)], [10], [1]),
    ("... all of it, also what has to wait there", [de(0, group=1, free=99), de(1, group=2)],
     [100, 100, 50, 100], [None, 1, None, 1]),
    ("normal (tok_e + len <= Z) first", [de(0, tok=100, seq=5), de(1, tok=400, seq=1)], [60],
     [0]),                          # Z = 1.05 (60 + 500) / 2 = 294
    ("... Z counts R, the head requests", [de(0, tok=100, seq=5), de(1, tok=120, seq=1)],
     [60, 60, 60, 60], [1, 1, 0, 0]),       # Z = 1.05 (240 + 220) / 2 = 241.5
    ("... of these min seq_e, whatever their load", [de(0, seq=3), de(1, tok=20, seq=2)],
     [50, 50, 50, 50], [1, 0, 0, 1]),       # Z = 115.5; at the end both are high
    ("... ties to the lowest id", [de(3), de(1)], [50, 50], [1, 3]),
    ("else high: min tok_e", [de(0, tok=900, seq=0), de(1, tok=890, seq=9)], [300], [1]),
    ("among DEs with enough free HBM", [de(0, free=99), de(1, tok=500, seq=9)], [100], [1]),
    ("... exactly enough is enough", [de(0, free=100)], [100], [0]),
    ("R = head requests that fit the sum of free HBM",
     # 100 + 100 fit 250, the third does not: Z = 1.05 (200 + 240) / 2 = 231, engine 1 stays high.
     [de(0, seq=8, free=125), de(1, tok=240, free=125)], [100, 100, 100], [0, 1, None]),
    ("none fits: the fetch ends", [de(0, free=150)], [100, 200, 10], [0, None, None]),
    ("... in this group; another goes on", [de(0, group=1, free=10), de(1, tok=200, group=2)],
     [100, 150, 100], [None, None, 1]),
]


@pytest.mark.parametrize("sentence, engines, lengths, expected", DECODE,
                         ids=[row[0] for row in DECODE])
def test_decode_engines(sentence, engines, lengths, expected):
    made = given(lengths, beta=ROOM)
    made.observe([], engines)
    got = {r.request_id: r.decode_engine for r in made.fetch([pe(9)], engines)}
    assert [got.get(number) for number in range(len(lengths))] == expected


def test_z_is_105_percent_of_the_mean_load():
    """2 x 100 in R, 800 in two engines: Z = 1.05 x 1000 / 2 = 525."""
    engines = [de(0, seq=9, tok=375), de(1, tok=425)]
    routes = given([100, 100]).fetch([pe(0)], engines)
    assert [r.decode_engine for r in routes] == [1, 0]      # 425 + 100 = Z; then 525 + 100 > Z
    assert "fewest requests (0) below Z = 525 tokens" in routes[0].reason
    routes = given([101, 99]).fetch([pe(0)], engines)
    assert [r.decode_engine for r in routes] == [0, 1]      # 526 > Z


@pytest.mark.parametrize("sentence, pe_read, de_read, expected", [
    ("the side with the shorter reading queue", 40, 50, PE),
    ("the side with the shorter reading queue", 50, 40, DE),
    ("... the PE when they are equal", 40, 40, PE),
])
def test_read_paths(sentence, pe_read, de_read, expected):
    made = given([100], hits=64)
    route, = made.fetch([pe(0, read=pe_read)], [de(0, read=de_read)])
    assert route.path == expected == choose_path(pe_read, de_read)
    assert route.parts[0].node_id == (0 if expected == PE else 100)
    assert f"reading queues of {pe_read} (PE) and {de_read} (DE)" in route.reason


def test_a_reading_queue_counts_what_was_decided_before():
    made = given([100] * 5, hits=64)
    assert [r.path for r in made.fetch([pe(0)], [de(0)])] == [PE, DE, PE, DE, PE]
    made.submit(request(9, hits=64))                # its PE is known, its DE not yet
    assert made.fetch([pe(0, read=500, last_route=5)], []) == []
    made.submit(request(10, hits=64))
    assert [r.path for r in made.fetch([pe(1, read=9)], [de(0, read=500)])] == [PE, PE]


def test_basic_reads_at_the_prefill_side_whatever_the_queues_say():
    route, = given([100], hits=64, policy="pe", alpha=ROOM).fetch([pe(0, read=9999)], [de(0)])
    assert route.path == PE


def test_a_rule_in_front_says_how_much_is_worth_loading():
    class Rule:
        def for_request(self, request, policy, pe, de, others, busy_s):
            self.seen = policy, pe.node_id, de.node_id, [n.node_id for n in others], busy_s
            return SimpleNamespace(num_tokens=self.tokens, reason=Reason("load {}", self.tokens))

    rule = Rule()
    for rule.tokens, path in (64, PE), (0, "none"):
        made = given([100], hits=96, recompute=rule)
        made.observe([], [de(1, group=1, tok=9, lend_tokens=5), de(2, group=1, tok=9)])
        route, = made.fetch([pe(0, tok=200)], [de(0)])
        assert (route.path, route.num_load_tokens) == (path, rule.tokens)
        assert rule.seen == (made.policy, 0, 100, [101], 1.0)       # 200 of beta, 1000, in 5 s
        assert str(route.reason).startswith(f"load {rule.tokens}; ")
    rule.tokens = 97
    made = given([100], hits=96, recompute=rule)
    assert made.fetch([pe(0)], [de(0)]) == [] and "0 to 96" in str(made.rejections()[0].error)


def test_the_rule_of_the_library_recomputes_what_a_busy_nic_would_bring_too_late():
    rule = LoadOrRecompute(lambda cached, new: 0.0, linear_s_per_token=0.001, block_tokens=32)
    loads = [given([100], hits=96, recompute=rule).fetch(
        [pe(0, read=queue, snic_tokens_per_s=10_000)],
        [de(0, read=queue, snic_tokens_per_s=10_000)])[0].num_load_tokens for queue in (0, 10_000)]
    assert loads == [96, 0]                             # reading 96 takes 10 ms, or 1 s and 10 ms


def test_any_policy_will_do():
    routes = given([100] * 3, hits=64, policy=RoundRobin()).fetch([pe(0)], [de(0)])
    assert len({r.path for r in routes}) == 2


def test_a_reason_is_plain_data_that_renders_when_asked():
    made = given([100, 100], hits=64)
    first, second = made.fetch([pe(0, tok=10, read=5)], [de(0, tok=7)])
    assert str(first.reason).endswith(
        "; PE: short reading queue (5 tokens), least load of 1 (10 tokens)"
        "; DE: fewest requests (0) below Z = 217 tokens")
    assert pickle.loads(pickle.dumps([first, second])) == [first, second]
    assert first.reason == first.reason != second.reason and (first.number, second.number) == (1, 2)
