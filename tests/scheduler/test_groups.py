"""Groups that fetch by themselves, reports that are late, engines that vanish, a scheduler that
starts anew."""
import pytest
from test_scheduler_rules import de, given, pe, request

from kvio.errors import InvalidArgument, RequestTooLong
from kvio.scheduler import DE, PE, Request, Scheduler


def ids(routes):
    return [route.request_id for route in routes]


# -- groups

def test_each_group_fetches_for_itself():
    made = given([100] * 4)
    made.observe([], [de(0, group=1), de(1, group=2)])
    assert made.fetch([pe(0, group=5)], []) == []       # nobody has a DE yet
    assert ids(made.fetch([], [de(0, group=1)])) == [0, 2]
    assert ids(made.fetch([], [de(1, group=2)])) == [1, 3]
    assert made.num_waiting == 0


def test_a_half_request_counts_as_load_of_its_engine():
    made = given([100], beta=99)
    assert made.fetch([pe(0)], [de(0, free=10)]) == []
    made.submit(request(1))
    assert made.fetch([pe(0)], []) == []                # overloaded by the half one
    routes = made.fetch([pe(1)], [de(0)])
    assert [(r.request_id, r.prefill_engine) for r in routes] == [(0, 0), (1, 1)]


def test_hbm_is_promised_to_a_half_request():
    made = given([100, 100])
    assert made.fetch([], [de(0, free=150)]) == []      # has 0, which lacks a PE
    assert ids(made.fetch([pe(0)], [de(0, free=150)])) == [0]


def test_an_engine_gets_something_only_when_it_reports():
    made = given([100, 100])
    made.observe([pe(0), pe(1)], [de(0), de(1)])
    assert {(r.prefill_engine, r.decode_engine) for r in made.fetch([pe(1)], [de(1)])} == {(1, 1)}


def test_a_group_that_joins_takes_its_share_of_what_waits():
    made = given([100] * 6)
    assert made.fetch([pe(0)], [de(0, group=1, free=0)]) == []
    assert ids(made.fetch([], [de(1, group=2)])) == [3, 4, 5]
    assert ids(made.fetch([], [de(0, group=1)])) == [0, 1, 2]


# -- late reports

def test_a_late_report_is_not_mistaken_for_an_idle_engine():
    made = given([100] * 3, beta=250)
    assert len(made.fetch([pe(0)], [de(0, free=350)])) == 3
    made.submit(request(3))
    # These were made before the routes came; then when route 2 had come; then after all.
    assert made.fetch([pe(0, last_route=0)], [de(0, free=350, last_route=0)]) == []
    assert made.fetch([pe(0, tok=200, seq=2, last_route=2)], []) == []
    assert made.fetch([pe(0, tok=100, seq=1, last_route=3)], [de(0, free=99, last_route=3)]) == []
    assert ids(made.fetch([], [de(0, free=100, last_route=3)])) == [3]


def test_a_reading_queue_is_late_like_the_rest():
    made = given([100], hits=64)
    assert made.fetch([pe(0)], [de(0)])[0].path == PE
    made.submit(request(1, hits=64))
    route, = made.fetch([pe(0, last_route=0)], [de(0, last_route=0, read=63)])
    assert "reading queues of 64 (PE) and 63 (DE)" in route.reason


def test_what_routes_take_of_a_buffer_counts_until_a_report_does():
    made = given([100, 100, 100], hits=64, policy="split", block_tokens=8)
    reports = [pe(0, cnic_tokens_per_s=1)], [de(0, free_buffer_tokens=170)]
    paths = [route.path for route in made.fetch(*reports)]
    assert paths == ["split", "split", DE]              # 170, 71 and then no tokens are free

    def path(number, free, last_route):
        made.submit(request(number, hits=64))
        return made.fetch([pe(0, cnic_tokens_per_s=1, last_route=3)], [
            de(0, free_buffer_tokens=free, last_route=last_route)])[0].path
    assert path(3, 259, 1) == DE                        # less the second and the third
    assert path(4, 64, 4) == "split" and path(5, 164, 4) == "split"     # less the fifth: 65
    assert path(6, 163, 5) == "split" and path(7, 163, 5) == DE


def test_a_report_that_is_older_than_another_is_ignored():
    made = given([100])
    made.fetch([pe(0)], [de(0)])
    made.submit(request(1))
    made.observe([pe(0, tok=2000, last_route=1)], [])
    assert made.fetch([pe(0, last_route=0)], [de(0)]) == [] and made.num_late_reports == 1


# -- engines that vanish

@pytest.mark.parametrize("side", [PE, DE])
def test_half_requests_of_a_lost_engine_go_back_to_their_place(side):
    made = given([100] * 3)
    if side == PE:
        made.fetch([pe(0)], [de(0, free=0)])
    else:
        made.fetch([], [de(0, free=250), de(1, free=0)])
    assert made.lose(side, 0) == ([0, 1, 2] if side == PE else [0, 1])
    assert made.lose(side, 0) == []                     # it is not known any more
    assert ids(made.fetch([pe(1)], [de(1)])) == [0, 1, 2]


def test_an_engine_that_vanishes_between_report_and_assignment_gets_nothing():
    made = given([100])
    made.observe([pe(0)], [de(0)])
    made.lose(PE, 0)
    assert made.fetch([pe(0)], [de(0)]) == []           # its report was on its way
    assert made.num_late_reports == 1
    made.lose(DE, 0)
    assert ids(made.fetch([pe(0, incarnation=1)], [de(0, incarnation=1)])) == [0]


def test_an_engine_that_starts_anew_has_lost_what_it_had():
    made = given([100, 100], beta=99)
    assert made.fetch([pe(0)], [de(0, free=0)]) == []   # 0 has PE 0
    made.observe([pe(0, incarnation=3)], [])
    assert made.fetch([pe(1)], []) == []
    assert [(r.request_id, r.prefill_engine) for r in made.fetch([], [de(0)])] == [(0, 1)]


def test_the_queue_of_a_lost_group_goes_to_others_in_order_of_submission():
    made = given([100] * 4)
    made.observe([], [de(0, group=1), de(1, group=2, free=0)])
    made.fetch([pe(0)], [de(1, group=2, free=0)])       # 1 and 3 wait in group 2
    made.observe([], [de(0, group=1, free=0)])
    assert made.lose_group(DE, 2) == [] and made.lose_group(DE, 2) == []
    assert ids(made.fetch([], [de(0, group=1, free=250)])) == [0, 1]
    assert ids(made.fetch([], [de(0, group=1)])) == [2, 3]


def test_later_halves_make_way_for_an_earlier_request_that_lost_its_group():
    """Else each would wait for what the other has: 0 for HBM that 1 was promised, 1 for the PE
    that 0 has overloaded."""
    made = given([200, 100], beta=99)
    made.observe([], [de(0, group=1), de(1, group=2, tok=1)])
    assert made.fetch([], [de(0, group=1, free=200), de(1, group=2, tok=1, free=250)]) == []
    assert made.lose_group(DE, 1) == [0]                # 1 keeps DE 1, for now
    assert ids(made.fetch([pe(0)], [de(1, group=2, free=250)])) == [0]
    assert ids(made.fetch([pe(0)], [de(1, group=2, tok=200, free=100)])) == [1]


def test_later_halves_make_way_for_an_earlier_request_that_lost_its_pe():
    made = given([100, 100], beta=50)
    assert made.fetch([pe(0), pe(1)], [de(0, free=0)]) == []
    assert made.lose(PE, 0) == [0, 1]                   # 0 had it; 1 is behind
    assert [(r.request_id, r.prefill_engine) for r in made.fetch([pe(1)], [de(0)])] == [(0, 1)]


def test_a_request_that_is_too_long_for_what_is_left_moves_or_is_rejected():
    made = given([900, 100, 500])
    big = {"hbm_tokens": 1000, "group": 1}
    small = {"hbm_tokens": 400, "group": 1}
    other = {"hbm_tokens": 600, "group": 2}
    made.fetch([pe(0)], [de(0, free=0, **big), de(1, free=0, **small)])
    made.observe([], [de(2, free=0, tok=9999, **other)])
    assert made.lose(DE, 0) == []
    assert ids(made.fetch([], [de(1, **small), de(2, **other)])) == [1, 2]
    (request_id, error), = made.rejections()
    assert request_id == 0 and isinstance(error, RequestTooLong) and made.rejections() == []
    assert "needs 900 tokens" in str(error) and "has 600" in str(error) and made.num_waiting == 0


# -- cancel

def test_cancel_wherever_the_request_is():
    made = given([100] * 4)
    assert made.cancel(0) and not made.cancel(0)        # in both queues
    made.fetch([pe(0)], [de(0, free=150)])              # 1 is routed
    assert not made.cancel(1)
    assert made.cancel(2)                               # has a PE, waits in a group
    assert ids(made.fetch([pe(0)], [de(0, free=150)])) == [3]
    made.submit(request(5))
    made.fetch([], [de(0, free=100)])
    assert made.cancel(5) and made.num_waiting == 0     # has a DE, waits for a PE
    made.submit(request(6))
    assert ids(made.fetch([pe(0)], [de(0, free=100)])) == [6]


def test_a_cancelled_half_is_no_load_any_more():
    made = given([100], beta=50)
    made.fetch([pe(0)], [de(0, free=0)])
    made.cancel(0)
    made.submit(request(1))
    assert ids(made.fetch([pe(0)], [de(0)])) == [1]


# -- a scheduler that starts anew

def test_a_new_scheduler_learns_who_holds_what_and_assigns_nothing_twice():
    old = given([100] * 4)
    first = old.fetch([pe(0)], [de(0, free=250)])       # 0 and 1; 2 and 3 wait
    assert ids(first) == [0, 1]
    held = [route.request_id for route in first]
    made = Scheduler(50, 1000)
    made.observe([pe(0, tok=200, seq=2, last_route=2, request_ids=held)],
                 [de(0, tok=200, seq=2, free=50, last_route=2, request_ids=held)])
    for number in range(4):
        if number in held:
            with pytest.raises(InvalidArgument, match=f"request {number} is held by an engine"):
                made.submit(request(number))
        else:
            made.submit(request(number))
    assert made.fetch([pe(0, tok=200, seq=2, last_route=2)], []) == []
    routes = made.fetch([], [de(0, free=250, last_route=2)])
    assert ids(routes) == [2, 3] and [r.number for r in routes] == [3, 4]   # numbered on


def test_a_request_that_turns_out_to_be_held_is_taken_out_of_the_queue():
    made = given([100, 100])
    assert ids(made.fetch([pe(0, request_ids=[0])], [de(0)])) == [1]
    (request_id, error), = made.rejections()
    assert request_id == 0 and isinstance(error, InvalidArgument)


def test_engines_that_say_what_they_hold_hold_their_routes_from_the_beginning():
    made = given([100])
    made.fetch([pe(0, request_ids=[])], [de(0)])
    with pytest.raises(InvalidArgument, match="held"):
        made.submit(request(0))
    made.observe([pe(0, request_ids=[], last_route=0)], [])     # made before the route came
    with pytest.raises(InvalidArgument, match="held"):
        made.submit(request(0))
    made.observe([pe(0, request_ids=[], last_route=1)], [])     # done
    made.submit(request(0))
    made.fetch([pe(0, request_ids=[], last_route=1)], [de(0)])
    made.lose(PE, 0)                                    # gone, and what it held with it
    made.submit(request(0))


# -- nobody waits for ever

def test_small_requests_do_not_overtake_a_large_one():
    """It waits until enough of what went before it is done, and no longer."""
    made, running, routed = Scheduler(10**9, 10**9), {}, []
    for turn in range(20):
        if turn == 3:
            made.submit(request(1000, 900))
        for number in range(3 * turn, 3 * turn + 3):
            made.submit(request(number, 100))
        used = sum(running.values())
        for route in made.fetch([pe(0)], [de(0, tok=used, seq=len(running), free=1000 - used,
                                             hbm_tokens=1000)]):
            routed.append(route.request_id)
            running[route.request_id] = 900 if route.request_id == 1000 else 100
        running.pop(min(running), None)                 # one a turn is done
    assert routed == [*range(9), 1000, *range(9, len(routed) - 1)] and len(routed) > 10
