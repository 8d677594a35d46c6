"""The scheduler against the rules of the paper, restated here in their plainest form."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio.errors import InvalidArgument
from kvio.scheduler import (DE, PE, EngineReport, PrefillWork, Request, Scheduler, assign_groups,
                            choose_decode, choose_path, choose_prefill, pack_prefill)


def request(number, prompt=100, cached=64, new=28):
    return Request(number, prompt, cached, new)


def engine(number, **figures):
    return EngineReport(number, 10 + number, **figures)


def test_prefill_takes_short_queues_first_then_the_least_load():
    engines = [engine(0, num_tokens=10, read_queue_tokens=500),     # long queue, least load
               engine(1, num_tokens=300, read_queue_tokens=100),    # short, more load
               engine(2, num_tokens=200, read_queue_tokens=100),    # short, less load
               engine(3, num_tokens=1001, read_queue_tokens=0)]     # overloaded
    chosen, after = choose_prefill([request(i) for i in range(3)], engines, alpha=100, beta=1000)
    assert [c.engine_id for c in chosen] == [2, 1, 2]   # 200 -> 328; 300 -> 428; 328
    assert {e.engine_id: e.num_tokens for e in after} == {0: 10, 1: 428, 2: 456, 3: 1001}
    assert "short reading queue" in chosen[0].reason


def test_prefill_goes_to_long_queues_when_no_short_one_is_left_and_then_stops():
    engines = [engine(0, num_tokens=900, read_queue_tokens=0),
               engine(1, num_tokens=950, read_queue_tokens=900)]
    chosen, _ = choose_prefill([request(i) for i in range(5)], engines, alpha=100, beta=1000)
    assert [c.engine_id for c in chosen] == [0, 1]      # both are overloaded afterwards
    assert "long" in chosen[1].reason


def test_ties_go_to_the_lowest_engine_id():
    engines = [engine(i) for i in (3, 1, 2)]
    chosen, _ = choose_prefill([request(0)], engines, 10, 10)
    assert chosen[0].engine_id == 1
    chosen, _ = choose_decode([request(0)], [engine(i, free_hbm_tokens=999) for i in (3, 1, 2)])
    assert chosen[0].engine_id == 1
    assert choose_path(5, 5) == PE and choose_path(5, 4) == DE and choose_path(4, 5) == PE


def test_groups_are_filled_by_their_total_load():
    requests = [request(i) for i in range(4)]           # 128 tokens each
    assert assign_groups(requests, {7: 300, 2: 100, 5: 200}) == [2, 5, 2, 7]
    with pytest.raises(InvalidArgument):
        assign_groups(requests, {})


def test_decode_prefers_fewest_requests_below_z_then_least_load():
    # Z = 1.05 * (2 * 128 + 100 + 1000) / 2 = 711.9
    engines = [engine(0, num_requests=9, num_tokens=100, free_hbm_tokens=500),
               engine(1, num_requests=1, num_tokens=1000, free_hbm_tokens=5000)]
    chosen, after = choose_decode([request(0), request(1)], engines)
    assert [c.engine_id for c in chosen] == [0, 0]      # engine 1 is above Z though less busy
    assert [e.free_hbm_tokens for e in after] == [244, 5000]
    high = [engine(0, num_tokens=5000, free_hbm_tokens=200),
            engine(1, num_tokens=10, free_hbm_tokens=0)]
    chosen, _ = choose_decode([request(0)], high)
    assert chosen[0].engine_id == 0 and "above Z" in chosen[0].reason


def test_decode_stops_at_the_first_request_that_fits_nowhere():
    big = Request(1, 5000, 0, 0)
    chosen, _ = choose_decode([request(0), big, request(2)],
                              [engine(0, free_hbm_tokens=400)])
    assert [c.request_id for c in chosen] == [0]        # 2 would fit, but it is not its turn


def test_decode_groups_are_chosen_first_and_do_not_hold_each_other_up():
    def decode(number, group, **figures):
        return EngineReport(number, 20 + number, group_id=group, **figures)

    made = Scheduler(10**9, 10**9)
    for i in range(4):
        made.submit(request(i))                         # 128 tokens each
    full = [decode(0, 1, num_tokens=150, free_hbm_tokens=0),
            decode(1, 2, num_tokens=400, free_hbm_tokens=999)]
    # Loads 150 and 400: to group 1 (278), 1 (406), 2 (528), 1. Group 1 has no room for any.
    assert [(r.request_id, r.decode_engine) for r in made.fetch([engine(0)], full)] == [(2, 1)]
    # Those that wait in group 1 count as its load: 150 + 3 * 128 against 528.
    made.submit(request(4))
    full[1] = decode(1, 2, num_tokens=528, free_hbm_tokens=871)
    assert [(r.request_id, r.decode_engine) for r in made.fetch([engine(0)], full)] == [(4, 1)]
    assert made.cancel(1) and made.num_waiting == 2
    roomy = [decode(0, 1, num_tokens=150, free_hbm_tokens=999), full[1]]
    assert [(r.request_id, r.decode_engine) for r in made.fetch([engine(0)], roomy)] == [
        (0, 0), (3, 0)]


def test_shorter_queue_alternates_within_one_fetch():
    made = Scheduler(alpha=10**9, beta=10**9)
    for i in range(4):
        made.submit(request(i))
    routes = made.fetch([engine(0)], [EngineReport(0, 20, free_hbm_tokens=10**6)])
    assert [r.path for r in routes] == [PE, DE, PE, DE]
    assert "reading queues of 64 (PE) and 0 (DE)" in routes[1].reason
    assert made.num_waiting == 0 and made.fetch([], []) == []


def test_basic_reads_at_the_prefill_side_whatever_the_queues_say():
    made = Scheduler(10**9, 10**9, policy="pe")
    made.submit(request(0))
    routes = made.fetch([engine(0, read_queue_tokens=10**6)],
                        [EngineReport(0, 20, free_hbm_tokens=10**6)])
    assert routes[0].path == PE


def test_a_request_with_one_engine_waits_for_the_other_and_counts_meanwhile():
    made = Scheduler(10**9, 10**9)
    made.submit(request(5))
    assert made.fetch([engine(0)], [EngineReport(0, 20, free_hbm_tokens=10)]) == []
    assert made.pending_load() == {(PE, 0): (1, 128)} and made.num_waiting == 1
    routes = made.fetch([engine(0, num_tokens=128)], [EngineReport(0, 20, free_hbm_tokens=200)])
    assert [(r.request_id, r.prefill_engine, r.decode_engine) for r in routes] == [(5, 0, 0)]


def test_cancel_and_double_submit():
    made = Scheduler(10**9, 10**9)
    made.submit(request(1))
    with pytest.raises(InvalidArgument):
        made.submit(request(1))
    assert made.cancel(1) and not made.cancel(1) and made.num_waiting == 0
    assert made.fetch([engine(0)], [engine(0, free_hbm_tokens=999)]) == []


@pytest.mark.parametrize("wrong", [
    lambda: Request(0, 64, 64, 1), lambda: Request(0, 64, -1, 1), lambda: Request(0, 0, 0, 1),
    lambda: Request(0, 64, 0, -1), lambda: EngineReport(0, 0, num_tokens=-1),
    lambda: Scheduler(1, 1, policy="fastest"), lambda: pack_prefill([], quota_s=0.3),
])
def test_bad_input_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        wrong()


def test_packing_takes_the_head_whole():
    work = [PrefillWork(3, 640, 70), PrefillWork(4, 0, 10)]
    assert pack_prefill(work) == [(3, 70)] and pack_prefill([]) == []


figures = st.builds(engine, st.integers(0, 30), num_requests=st.integers(0, 9),
                    num_tokens=st.integers(0, 2000), read_queue_tokens=st.integers(0, 500),
                    free_hbm_tokens=st.integers(0, 3000))
engines_lists = st.lists(figures, min_size=1, max_size=6, unique_by=lambda e: e.engine_id)
requests_lists = st.lists(st.integers(1, 900), max_size=12).map(
    lambda lengths: [Request(i, n, 0, 0) for i, n in enumerate(lengths)])


@given(requests_lists, engines_lists, st.integers(0, 500), st.integers(0, 2000))
def test_prefill_choices_follow_the_paper(requests, engines, alpha, beta):
    """A second, plain implementation that recomputes the classes for every request."""
    load = {e.engine_id: e.num_tokens for e in engines}
    queue = {e.engine_id: e.read_queue_tokens for e in engines}
    expected = []
    for r in requests:
        short = [e for e in load if queue[e] <= alpha and load[e] <= beta]
        long = [e for e in load if queue[e] > alpha and load[e] <= beta]
        if not short and not long:
            break
        best = sorted(short or long, key=lambda e: (load[e], e))[0]
        load[best] += r.num_tokens
        expected.append((r.request_id, best))
    chosen, _ = choose_prefill(requests, engines, alpha, beta)
    assert [(c.request_id, c.engine_id) for c in chosen] == expected


@given(requests_lists, engines_lists)
def test_decode_choices_follow_the_paper(requests, engines):
    room = sum(e.free_hbm_tokens for e in engines)
    head = []
    for r in requests:
        if sum(x.num_tokens for x in head) + r.num_tokens > room:
            break
        head.append(r)
    z = 1.05 * (sum(r.num_tokens for r in head) + sum(e.num_tokens for e in engines)) \
        / len(engines)
    state = {e.engine_id: [e.num_requests, e.num_tokens, e.free_hbm_tokens] for e in engines}
    expected = []
    for r in requests:
        fits = [e for e, (_, _, free) in state.items() if free >= r.num_tokens]
        normal = [e for e in fits if state[e][1] + r.num_tokens <= z]
        if not fits:
            break
        best = min(normal, key=lambda e: (state[e][0], e)) if normal else \
            min(fits, key=lambda e: (state[e][1], e))
        state[best] = [state[best][0] + 1, state[best][1] + r.num_tokens,
                       state[best][2] - r.num_tokens]
        expected.append((r.request_id, best))
    chosen, after = choose_decode(requests, engines)
    assert [(c.request_id, c.engine_id) for c in chosen] == expected
    assert all(e.free_hbm_tokens >= 0 for e in after)
