"""What does not make sense is refused with a sentence, and nothing has changed."""
import math

import numpy as np
import pytest
from test_scheduler_rules import de, given, pe, request

from kvio.errors import InvalidArgument, KvioError, RequestTooLong
from kvio.scheduler import DE, PE, EngineReport, Push, ReadChoice, Request, Scheduler
from kvio.scheduler import Part as _Part
from kvio.scheduler.quota import AttentionModel
from kvio.scheduler.recompute import LoadOrRecompute


@pytest.mark.parametrize("wrong, message", [
    (lambda: Request(0, 64, 64, 1), "one token at least is computed"),      # all hits, no append
    (lambda: Request(0, 64, 65, 1), "num_cached_tokens < num_prompt_tokens"),
    (lambda: Request(0, 64, -1, 1), "num_cached_tokens must be an int, at least 0, not -1"),
    (lambda: Request(0, 0, 0, 1), "num_cached_tokens < num_prompt_tokens"),
    (lambda: Request(0, 64, 0, -1), "max_new_tokens"),
    (lambda: Request(-1, 64, 0, 1), "request_id"),
    (lambda: Request("a", 64, 0, 1), "request_id must be an int"),
    (lambda: Request(0, 64.0, 0, 1), "num_prompt_tokens must be an int, at least 0, not 64.0"),
    (lambda: Request(0, 64, True, 1), "num_cached_tokens"),
    (lambda: Request(0, 64, 0, math.nan), "max_new_tokens"),
    (lambda: Request(0, 64, 0, None), "max_new_tokens"),
    (lambda: pe(-1), "engine_id"), (lambda: EngineReport(0, -1), "node_id"),
    (lambda: pe(0, tok=-1), "num_tokens must be an int, at least 0, not -1"),
    (lambda: pe(0, tok=math.nan), "num_tokens must be an int, at least 0, not nan"),
    (lambda: pe(0, tok=1.0), "num_tokens"), (lambda: pe(0, seq=True), "num_requests"),
    (lambda: pe(0, read=-5), "read_queue_tokens"), (lambda: de(0, free=-1), "free_hbm_tokens"),
    (lambda: pe(0, group="a"), "group_id"), (lambda: pe(0, last_route=-1), "last_route"),
    (lambda: pe(0, last_route=1.5), "last_route"), (lambda: de(0, hbm_tokens=-1), "hbm_tokens"),
    (lambda: de(0, hbm_tokens=False), "hbm_tokens"), (lambda: pe(0, incarnation=-1), "incarnation"),
    (lambda: pe(0, lend_tokens=-1), "lend_tokens"),
    (lambda: pe(0, snic_tokens_per_s=-1), "snic_tokens_per_s must be a number"),
    (lambda: pe(0, snic_tokens_per_s=math.nan), "snic_tokens_per_s"),
    (lambda: pe(0, snic_tokens_per_s=math.inf), "snic_tokens_per_s"),
    (lambda: pe(0, snic_tokens_per_s="fast"), "snic_tokens_per_s"),
    (lambda: pe(0, lend_tokens_per_s=-0.1), "lend_tokens_per_s"),
    (lambda: pe(0, lend_tokens_per_s=math.nan), "lend_tokens_per_s"),
    (lambda: pe(0, cnic_tokens_per_s=-1), "cnic_tokens_per_s must be a number, 0 to inf"),
    (lambda: pe(0, cnic_tokens_per_s=None), "cnic_tokens_per_s"),
    (lambda: de(0, free_buffer_tokens=-1), "free_buffer_tokens must be an int, at least 0"),
    (lambda: de(0, free_buffer_tokens=0.5), "free_buffer_tokens"),
    (lambda: pe(0, request_ids=7), "request_ids"), (lambda: pe(0, request_ids=["a"]), "request id"),
    (lambda: Scheduler(-1, 1), "alpha"), (lambda: Scheduler(1, math.nan), "beta"),
    (lambda: Scheduler(1, 1, policy="fastest"), "policy"),
    (lambda: Scheduler(1, 1, block_tokens=0), "block_tokens"),
    (lambda: Scheduler(1, 1, recompute=1), "recompute"),
    (lambda: Scheduler(1, 1, block_tokens=64, recompute=LoadOrRecompute(AttentionModel(1e-9))),
     "recompute cuts hits at every 1 tokens, which is inside a block of 64"),
    (lambda: Scheduler(1, 1).submit("a"), "submit takes a Request"),
    (lambda: Scheduler(1, 1).fetch(None, []), "two lists"),
    (lambda: Scheduler(1, 1).fetch([1], []), "EngineReports, not 1"),
    (lambda: Scheduler(1, 1).lose("fe", 0), "a side is 'pe' or 'de', not 'fe'"),
    (lambda: Scheduler(1, 1).lose_group(None, 0), "a side"),
    (lambda: Scheduler(1, 1).lose(DE, "de0"), "engine_id"),
    (lambda: Scheduler(1, 1).lose_group(DE, []), "group_id"),
])
def test_bad_input_is_refused(wrong, message):
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        wrong()


def test_ints_and_numbers_of_numpy_are_fine():
    made = Scheduler(np.int64(50), np.uint32(1000))
    made.submit(Request(np.int32(0), np.int64(99), np.uint8(64), np.int16(1)))
    report = pe(np.int64(0), tok=np.uint64(5), snic_tokens_per_s=np.float32(2),
                last_route=np.int8(0), lend_tokens_per_s=3)
    route, = made.fetch([report], [de(0)])
    assert (type(route.request_id), type(report.num_tokens)) == (int, int)
    assert report.snic_tokens_per_s == 2.0 and "(5 tokens)" in route.reason


@pytest.mark.parametrize("smallest", [Request(0, 1, 0, 0), Request(0, 1, 0, 1),
                                      Request(0, 2, 1, 0)])
def test_one_token_zero_hits_all_but_one(smallest):
    made = Scheduler(50, 1000)
    made.submit(smallest)
    route, = made.fetch([pe(0)], [de(0, free=smallest.num_tokens)])
    assert route.path == ("pe" if smallest.num_cached_tokens else "none")
    assert route.num_load_tokens == smallest.num_cached_tokens
    assert smallest.num_cached_tokens or str(route.reason).startswith("nothing to read; PE: ")


# -- ids

def test_an_id_that_waits_is_refused_and_the_first_is_served_once():
    made = given([100])
    with pytest.raises(InvalidArgument, match="request 0 is queued already"):
        made.submit(request(0, 50))
    route, = made.fetch([pe(0)], [de(0)])
    assert "Z = 52" not in route.reason and made.num_waiting == 0
    assert made.fetch([pe(0)], [de(0)]) == []


@pytest.mark.parametrize("prefill, decode, message", [
    ([pe(0), pe(0)], [], "reports twice"),
    ([], [de(0, group=1), de(1), de(0, group=2)], "decode engine 0 was of node 100 and group 0"),
    ([], [de(5, group=1), EngineReport(5, 7, group_id=2)], "twice"),    # an id in two groups
    ([pe(0, group=3)], [], "now it says node 0 and group 3"),
    ([EngineReport(0, 7)], [], "now it says node 7"),
    ([EngineReport(5, 0, group_id=2)], [], "in one group"),             # a node in two groups
    ([EngineReport(5, 100)], [], "node 100 is in the pe group 0, but it is in the de group 0"),
    ([EngineReport(5, 50), EngineReport(6, 50, group_id=1)], [], "in one group"),
    ([EngineReport(5, 50)], [EngineReport(5, 50)], "in one group"),     # of both sides, all new
])
def test_reports_that_contradict_are_refused_and_change_nothing(prefill, decode, message):
    made, same = given([100, 200]), given([100, 200])
    for scheduler in (made, same):
        scheduler.observe([pe(0)], [de(0)])
    with pytest.raises(InvalidArgument, match=message):
        made.fetch([pe(9), *prefill], [de(9), *decode])
    reports = [pe(0, tok=7)], [de(0, free=250)]
    assert made.fetch(*reports) == same.fetch(*reports) != []


def test_the_same_number_of_a_group_or_an_engine_on_both_sides_is_two():
    made = given([100, 100])
    made.fetch([pe(0, group=1)], [de(0, group=1, free=100)])
    assert made.lose_group("pe", 1) == [1] and made.lose("pe", 0) == []
    assert len(made.fetch([pe(1)], [de(0, group=1)])) == 1


# -- too long

def test_a_request_longer_than_any_hbm_is_refused_at_once_when_that_is_known():
    made = Scheduler(50, 1000)
    made.observe([], [de(0, hbm_tokens=400), de(1, hbm_tokens=500)])
    with pytest.raises(RequestTooLong, match="request 1 needs 501 tokens .* engine has 500"):
        made.submit(request(1, 501))
    assert made.num_waiting == 0 and issubclass(RequestTooLong, (KvioError, ValueError))
    made.submit(request(1, 500))
    assert len(made.fetch([pe(0)], [de(0, hbm_tokens=400), de(1, hbm_tokens=500)])) == 1


def test_or_it_is_rejected_as_soon_as_it_is_known_and_blocks_nobody():
    made = given([501, 100])
    assert [r.request_id for r in made.fetch([pe(0)], [de(0, hbm_tokens=500)])] == [1]
    (request_id, error), = made.rejections()
    assert (request_id, type(error), made.num_waiting) == (0, RequestTooLong, 0)


def test_a_group_that_cannot_hold_it_is_not_chosen_though_it_has_the_least_load():
    made = given([300])
    route, = made.fetch([pe(0)], [de(0, group=1, hbm_tokens=200),
                                  de(1, tok=500, group=2, hbm_tokens=400)])
    assert route.decode_engine == 1


def test_without_engines_requests_wait():
    made = given([100])
    assert made.fetch([], []) == [] and made.fetch([pe(0)], []) == []
    assert made.lose_group(DE, 3) == [] and made.lose(DE, 3) == [] and made.num_waiting == 1
    assert len(made.fetch([], [de(0)])) == 1


# -- policies of the caller's own

class Policy:
    def __init__(self, answer):
        self.answer = answer

    def choose(self, num_tokens, block_tokens, pe, de, others):
        return self.answer(num_tokens, pe, de, list(others))


def test_a_policy_that_answers_nonsense_costs_the_request_and_no_other():
    def answer(num_tokens, pe, de, others):
        side, node = ("h0", 77) if num_tokens == 3 else ("pe", pe.node_id)
        return ReadChoice((_Part(side, (0, num_tokens), node),), "mine")

    made = Scheduler(50, 1000, policy=Policy(answer))
    for number, hits in enumerate([2, 3, 4]):
        made.submit(Request(number, 9, hits, 0))
    assert [r.request_id for r in made.fetch([pe(0)], [de(0)])] == [0, 2]
    (request_id, error), = made.rejections()
    assert request_id == 1 and "let node 77 read, which is not known" in str(error)
    assert made.num_waiting == 0


@pytest.mark.parametrize("answer", [
    lambda tokens, pe, de: None, lambda tokens, pe, de: ReadChoice((7,), "mine"),
    lambda tokens, pe, de: ReadChoice(None, "mine"),
    lambda tokens, pe, de: [_Part(PE, (0, tokens), pe)],
    lambda tokens, pe, de: ReadChoice((_Part(PE, (0, tokens + 64), pe),), "more than there is"),
    lambda tokens, pe, de: ReadChoice((_Part(PE, (64, tokens), pe),), "not from token 0 on"),
    lambda tokens, pe, de: ReadChoice((_Part(PE, (0, 70), pe),), "no whole blocks"),
    lambda tokens, pe, de: ReadChoice((_Part(DE, (0, 64), de), _Part(PE, (0, 128), pe)), "twice"),
    lambda tokens, pe, de: ReadChoice((_Part(DE, (0, 64), de), _Part(PE, (128, 192), pe)), "gap"),
    lambda tokens, pe, de: ReadChoice((_Part(PE, (0, 64), pe), _Part(DE, (64, 128), de)), "order"),
    lambda tokens, pe, de: ReadChoice((_Part(PE, (0, 64), de),), "another's node"),
    lambda tokens, pe, de: ReadChoice((_Part("h0", (0, 64), pe),), "no third node"),
    lambda tokens, pe, de: ReadChoice((_Part("h0", (0, 64), 5), _Part("h1", (64, 128), 5)), "one"),
])
def test_parts_that_no_plan_can_be_made_of_are_refused(answer):
    for policy in (lambda own: own, Push):
        made = Scheduler(50, 1000, block_tokens=64, policy=policy(Policy(
            lambda tokens, pe, de, others: answer(tokens, pe.node_id, de.node_id))))
        made.submit(Request(0, 200, 192, 0))
        try:
            assert made.fetch([pe(0)], [de(0), de(5, tok=9)]) == []
        except (AttributeError, TypeError):         # `Push` could not even look into the answer
            pass
        (request_id, error), = made.rejections()
        assert request_id == 0 and type(error) is InvalidArgument and made.num_waiting == 0
        assert "policy" in str(error)


def test_a_policy_that_fails_is_heard_and_nothing_is_lost():
    def answer(num_tokens, pe, de, others):
        return ReadChoice((_Part("pe", (0, 2 // (num_tokens - 3)), pe.node_id),), "mine")

    made = Scheduler(50, 1000, policy=Policy(answer))
    for number, hits in enumerate([4, 3, 5]):
        made.submit(Request(number, 9, hits, 0))
    with pytest.raises(ZeroDivisionError):
        made.fetch([pe(0)], [de(0)])
    assert [r.request_id for r in made.fetch([], [])] == [0, 2]
    assert [r.request_id for r in made.rejections()] == [1] and made.num_waiting == 0


def test_helpers_are_offered_in_the_order_in_which_they_come_free():
    seen = []

    def answer(num_tokens, pe, de, others):
        seen.append([(node.node_id, node.lend_tokens) for node in others])
        return ReadChoice((_Part("h0", (0, num_tokens), others[0].node_id),), "a helper")

    made = Scheduler(50, 1000, policy=Policy(answer))
    for number in range(3):
        made.submit(Request(number, 101, 100, 0))
    made.observe([], [de(1, tok=999, read=300, snic_tokens_per_s=2, lend_tokens=90, group=1),
                      de(2, tok=999, read=120, lend_tokens=150, group=1),
                      de(3, tok=999, snic_tokens_per_s=0, lend_tokens=7, group=2)])     # a dead NIC
    routes = made.fetch([pe(0)], [de(0)])
    assert seen == [[(102, 150), (101, 90), (103, 7)], [(101, 90), (102, 50), (103, 7)],
                    [(102, 50), (103, 7)]]              # what lends nothing is not asked
    assert [r.path for r in routes] == ["any"] * 3
    # 101 lent for the second, 102 for the others: reports that count the first.
    made.observe([], [de(1, tok=999, lend_tokens=500, last_route=1, group=1),
                      de(2, tok=999, lend_tokens=500, last_route=1, group=1)])
    made.submit(Request(9, 101, 100, 0))
    made.fetch([pe(0)], [de(0)])
    assert sorted(seen[-1]) == [(101, 400), (102, 400), (103, 7)]
