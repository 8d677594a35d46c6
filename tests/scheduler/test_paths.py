"""Read-path policies: each rule as a table of examples, then against brute force."""
import itertools
from math import inf, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvio.analysis.links import ClusterShape, utilisation
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.loader import read_plan
from kvio.scheduler.fill import Lane, fill, fill_some, finish_s, level
from kvio.scheduler.paths import (POLICIES, AnyNode, Basic, NodeState, Push, ReadChoice,
                                  RoundRobin, ShorterQueue, Split, policy, spare_rate)
from kvio.scheduler.reason import Reason

BLOCK = 64


def nodes(*queues, rates=None):
    """The PE's node, the DE's, then others, with queues in blocks."""
    rates = rates or [1.0] * len(queues)
    return [NodeState(i, queue * BLOCK, rate, lend_tokens=1 << 30)
            for i, (queue, rate) in enumerate(zip(queues, rates, strict=True))]


def choose(name, blocks, *queues, rates=None):
    """{side: blocks} and the choice itself."""
    pe, de, *others = nodes(*queues, rates=rates)
    others.sort(key=lambda node: node.read_queue_tokens)        # who comes free first first
    choice = policy(name).choose(blocks * BLOCK, BLOCK, pe, de, others)
    return {part.side: part.num_tokens // BLOCK for part in choice.parts}, choice


# -- the paper's sentences, and what kvio adds to them

@pytest.mark.parametrize("blocks, pe, de, side, why", [
    (8, 10, 20, "pe", "640 (PE) and 1280 (DE)"),        # "the side with the shorter reading queue"
    (8, 20, 10, "de", "1280 (PE) and 640 (DE)"),
    (8, 10, 10, "pe", "640 (PE) and 640 (DE)"),         # a tie: the PE's
    (999, 1, 2, "pe", "64 (PE) and 128 (DE)"),          # what is read now does not count
])
def test_shorter_queue(blocks, pe, de, side, why):
    shares, choice = choose("shorter_queue", blocks, pe, de)
    assert shares == {side: blocks} and why in choice.reason and not choice.push


def test_shorter_queue_counts_tokens_as_the_paper_does_whatever_the_rates_are():
    assert choose("shorter_queue", 8, 10, 20, rates=(1.0, 100.0))[0] == {"pe": 8}


@pytest.mark.parametrize("blocks, pe, de, share", [     # x = clip((L + q_D - q_P) / 2, 0, L)
    (10, 0, 0, {"de": 5, "pe": 5}),
    (10, 4, 0, {"de": 7, "pe": 3}),
    (10, 0, 4, {"de": 3, "pe": 7}),
    (10, 10, 0, {"de": 10}),                            # the PE would finish no earlier
    (10, 0, 10, {"pe": 10}),
    (10, 30, 0, {"de": 10}), (10, 0, 30, {"pe": 10}),
    (9, 0, 0, {"de": 5, "pe": 4}),                      # a tie: the DE's need not be sent to it
    (1, 0, 0, {"de": 1}), (1, 0, 5, {"pe": 1}),
])
def test_split_over_equal_nics_finishes_together(blocks, pe, de, share):
    shares, choice = choose(Split(min_gain=0), blocks, pe, de)
    assert shares == share
    if len(share) == 2:
        assert choice.parts[0].side == "de" and "equal finish" in choice.reason


@pytest.mark.parametrize("blocks, pe, de, rates, share", [
    (12, 0, 0, (1.0, 2.0), {"de": 8, "pe": 4}),
    (12, 0, 0, (2.0, 1.0), {"de": 4, "pe": 8}),
    (12, 6, 0, (1.0, 2.0), {"de": 12}),                 # 12 / 2 = 6 / 1
    (12, 3, 0, (1.0, 2.0), {"de": 10, "pe": 2}),
    (12, 0, 0, (1e9, 1.0), {"pe": 12}),
])
def test_split_over_unequal_nics(blocks, pe, de, rates, share):
    assert choose(Split(min_gain=0), blocks, pe, de, rates=rates)[0] == share


@pytest.mark.parametrize("queue, share", [
    (0, {"de": 5, "pe": 5}),            # alone 10, together 5
    (90, {"de": 5, "pe": 5}),           # alone 100, together 95: exactly 5 %
    (91, {"de": 10}),                   # alone 101, together 96: less
])
def test_split_is_left_where_it_gains_less_than_5_percent(queue, share):
    shares, choice = choose("split", 10, queue, queue)
    assert shares == share
    if len(share) == 1:
        assert "0.95 of the time of one" in choice.reason


def test_split_that_is_left_takes_the_side_that_finishes_first():
    assert choose("split", 10, 100, 95)[0] == {"de": 10}
    assert choose("split", 10, 95, 100)[0] == {"pe": 10}
    assert choose("split", 10, 500, 600, rates=(1.0, 2.0))[0] == {"de": 10}


@pytest.mark.parametrize("free, cnic, rates, share", [
    (9, 1.0, (1, 1), {"de": 10}),                       # waits, and the return takes what is saved
    (0, 0.5, (1, 1), {"de": 10}),
    (10, 1.0, (1, 1), {"de": 5, "pe": 5}),              # the DE's buffer has room
    (None, 1.0, (1, 1), {"de": 5, "pe": 5}),            # it always has
    (9, 1.01, (1, 1), {"de": 5, "pe": 5}),              # the return takes less than is saved
    (9, 1.0, (1, 0.5), {"de": 3, "pe": 7}),             # of a slow storage NIC much is saved
])
def test_split_is_left_where_the_buffer_is_full_and_the_return_slow(free, cnic, rates, share):
    pe, de = nodes(0, 0, rates=rates)
    de.free_buffer_tokens = None if free is None else free * BLOCK
    pe.cnic_tokens_per_s = cnic
    for each in "split", "any_node":
        choice = policy(each).choose(10 * BLOCK, BLOCK, pe, de, [])
        assert {part.side: part.num_tokens // BLOCK for part in choice.parts} == share
        assert ("room for" in choice.reason) == (share == {"de": 10})


def test_a_lone_request_is_read_in_half_the_time():
    for blocks in (2, 3, 50, 511):
        shares, _ = choose("split", blocks, 0, 0)
        assert max(shares.values()) == (blocks + 1) // 2


def test_round_robin_takes_turns_whatever_the_queues_say():
    made = policy("round_robin")
    seen = [choose(made, 4, queue, 0)[0] for queue in (100, 0, 100, 0)]
    assert seen == [{"pe": 4}, {"de": 4}, {"pe": 4}, {"de": 4}]
    assert made.lanes(*nodes(7, 3), []) == [Lane(7 * 64, 1.0)]     # whose turn it is; unchanged
    assert choose(made, 4, 0, 0)[0] == {"pe": 4}
    assert choose("round_robin", 4, 0, 0)[0] == {"pe": 4}           # each has turns of its own


def test_basic_reads_at_the_prefill_side():
    assert choose("pe", 4, 1000, 0)[0] == {"pe": 4}


@pytest.mark.parametrize("inner", [None, Basic(), RoundRobin(), Split(), AnyNode(), "split"])
def test_push_is_any_policy_with_the_owners_writing(inner):
    plain, _ = choose(policy("shorter_queue" if inner is None else inner), 100, 3, 1, 0, 0)
    if isinstance(inner, RoundRobin):
        inner = RoundRobin()
    shares, choice = choose(Push(inner), 100, 3, 1, 0, 0)
    assert choice.push and shares == plain and str(choice.reason).startswith("pushed; ")
    assert Push(inner).lanes(*nodes(3, 1), []) == policy(inner or "shorter_queue").lanes(
        *nodes(3, 1), [])


# -- helpers

@pytest.mark.parametrize("blocks, queues, options, share", [
    (40, (0, 0, 0, 0), {}, {"de": 10, "pe": 10, "h0": 10, "h1": 10}),
    (40, (0, 0, 0, 0), {"max_helpers": 1}, {"de": 14, "pe": 13, "h0": 13}),
    (40, (0, 0, 0, 0), {"max_helpers": 0}, {"de": 20, "pe": 20}),
    (40, (0, 0, 1, 0), {}, {"de": 14, "pe": 13, "h0": 13}),         # who has work does not help
    (40, (10, 10, 0, 0), {}, {"de": 5, "pe": 5, "h0": 15, "h1": 15}),
    (40, (99, 99, 0, 0), {}, {"h0": 20, "h1": 20}),
    (24, (0, 0, 0, 0), {}, {"de": 8, "pe": 8, "h0": 8}),            # 8 blocks at least
    (20, (0, 0, 0, 0), {}, {"de": 6, "pe": 6, "h0": 8}),            # exact: 8 beats 10 and 10
    (8, (0, 0, 0, 0), {}, {"de": 4, "pe": 4}),
    (40, (0, 0, 9, 9), {"max_wait": 0.5}, {"de": 16, "pe": 16, "h0": 8}),
    (40, (0, 0, 9, 9), {"max_wait": 0.4}, {"de": 20, "pe": 20}),    # 9 of 20 is more than that
    (40, (0, 0, 0), {"min_gain": 0.34}, {"de": 20, "pe": 20}),      # 14 instead of 20 is too little
    (40, (0, 0, 0), {"min_gain": 0.29}, {"de": 14, "pe": 13, "h0": 13}),
])
def test_any_node(blocks, queues, options, share):
    shares, choice = choose(AnyNode(**options), blocks, *queues)
    assert shares == share
    helpers = [part.node_id for part in choice.parts if part.side.startswith("h")]
    assert helpers == sorted(helpers) and not set(helpers) & {0, 1}


def test_helpers_lend_no_more_than_they_have():
    """What they lend, less room for a request of their own that is as long as this one."""
    pe, de, small, slow, poor, none = nodes(0, 0, 0, 0, 0, 0)
    small.lend_tokens = (87 + 9) * BLOCK + 63
    slow.lend_tokens_per_s = 0.5                # of 1 token/s that its storage NIC reads
    poor.lend_tokens = (87 + 8) * BLOCK - 1     # below the least share of 8 blocks
    none.lend_tokens_per_s = 0
    choice = AnyNode().choose(87 * BLOCK, BLOCK, pe, de, [small, slow, poor, none])
    assert {part.node_id: part.num_tokens // BLOCK for part in choice.parts} == {
        0: 31, 1: 32, 2: 9, 3: 15}              # 2 * 31.2 + 9 + 15.6 = 87, in whole blocks


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("spare, share", [
    (inf, {"de": 15, "pe": 15, "h0": 15, "h1": 15}),
    (2.0, {"de": 15, "pe": 15, "h0": 15, "h1": 15}),
    (1.5, {"de": 18, "pe": 17, "h0": 17, "h1": 8}), (1.0, {"de": 20, "pe": 20, "h0": 20}),
    (0.0, {"de": 30, "pe": 30})])
def test_what_helpers_read_has_to_pass_the_nics_of_pe_and_de(side, spare, share):
    four = nodes(0, 0, 0, 0)
    four[side].lend_tokens_per_s = spare
    choice = AnyNode().choose(60 * BLOCK, BLOCK, *four[:2], four[2:])
    assert {part.side: part.num_tokens // BLOCK for part in choice.parts} == share


@pytest.mark.parametrize("num_prefill, num_decode", [(1, 1), (1, 2), (2, 1), (2, 4), (1, 7)])
@pytest.mark.parametrize("snic_ratio", [1.0, 2.0, 0.5])
def test_spare_is_what_the_analysis_leaves_of_the_compute_nics(num_prefill, num_decode, snic_ratio):
    shape = ClusterShape(8, snic_ratio, 500e9, 50e9)
    capacity = 8 * shape.cnic_bytes_per_s
    used = utilisation(shape, num_prefill, num_decode)
    for side in ("pe", "de"):
        most = max(used[f"{side.upper()} CNIC {way}"] for way in ("read", "write"))
        assert spare_rate(side, num_prefill, num_decode, 50e9, capacity) == pytest.approx(
            max(0.0, (1 - most) * capacity))
    assert spare_rate("de", 1, 1, 1.0, 2.0) == 0 and spare_rate("de", 1, 1, 1.0, inf) == inf


def test_what_is_decided_counts_for_the_next_request():
    pe, de, helper = nodes(0, 0, 0)
    for part in AnyNode().choose(60 * BLOCK, BLOCK, pe, de, [helper]).parts:
        {0: pe, 1: de, 2: helper}[part.node_id].add(part)
    assert [n.read_queue_tokens for n in (pe, de, helper)] == [20 * BLOCK] * 3
    assert [n.lend_tokens for n in (pe, de, helper)] == [1 << 30, 1 << 30, (1 << 30) - 20 * BLOCK]


# -- bad input

@pytest.mark.parametrize("name", POLICIES)
def test_a_dead_nic_gets_nothing(name):
    everywhere = (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)
    seen = [choose(name, 16, 0, 0, rates=rates)[0] for rates in everywhere]
    assert seen == [{} if name == "pe" else {"de": 16}, {"pe": 16}, {}]
    _, choice = choose(name, 16, 0, 0, rates=(0.0, 0.0))
    assert choice.parts == () and "computed again" in choice.reason
    assert policy(name).lanes(*nodes(0, 0, rates=(0.0, 0.0)), []) == []


def test_helpers_read_for_two_dead_nics_as_much_as_they_lend():
    pe, de, *others = nodes(0, 0, 4, 0, rates=(0.0, 0.0, 1.0, 1.0))
    choice = AnyNode().choose(20 * BLOCK, BLOCK, pe, de, others)
    assert [(p.side, p.num_tokens // BLOCK) for p in choice.parts] == [("h0", 8), ("h1", 12)]
    others[0].lend_tokens, others[1].lend_tokens = 3 * BLOCK, 5 * BLOCK
    choice = AnyNode().choose(20 * BLOCK, BLOCK, pe, de, others)
    assert [(p.side, p.num_tokens // BLOCK) for p in choice.parts] == [("h0", 3), ("h1", 5)]
    assert AnyNode().lanes(pe, de, others) == [Lane(4 * 64, 1.0, 3 * 64), Lane(0, 1.0, 5 * 64)]
    choice = AnyNode(max_helpers=0).choose(20 * BLOCK, BLOCK, pe, de, others)
    assert choice.parts == ()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("queue, rate", [(nan, 1.0), (-1, 1.0), (inf, 1.0), (None, 1.0),
                                         ("many", 1.0), (0, nan), (0, -1.0), (0, inf), (0, None)])
def test_figures_that_mean_nothing_are_refused(name, queue, rate):
    good, bad = NodeState(0), NodeState(7, queue, rate)
    with pytest.raises(InvalidArgument, match="node 7 reports"):
        policy(name).choose(64, 64, bad, good, [])
    with pytest.raises(InvalidArgument, match="node 7 reports"):
        policy(name).lanes(bad, good, [])


@pytest.mark.parametrize("wrong", [
    lambda: Split().choose(63, 64, *nodes(0, 0), []),
    lambda: Split().choose(0, 64, *nodes(0, 0), []),
    lambda: Split().choose("64", 64, *nodes(0, 0), []),
    lambda: Basic().choose(64, None, *nodes(0, 0), []),
    lambda: Basic().choose(64, 0, *nodes(0, 0), []), lambda: Split(1.0), lambda: Split(nan),
    lambda: Split("little"), lambda: AnyNode(-1), lambda: AnyNode(4, 0),
    lambda: AnyNode(max_wait=2), lambda: policy("fastest"),
    lambda: policy(None), lambda: policy(Split), lambda: Push(7),
    lambda: spare_rate("h0", 1, 1, 1.0, 1.0), lambda: spare_rate("pe", 0, 1, 1.0, 1.0),
    lambda: spare_rate("pe", 1, 1, nan, 1.0), lambda: spare_rate("pe", 1, 1, 1.0, -1.0),
])
def test_bad_input_is_refused(wrong):
    with pytest.raises(InvalidArgument):
        wrong()


def test_engines_of_one_node_have_one_nic():
    both = NodeState(3, 0)
    for name in ("split", "any_node"):
        choice = policy(name).choose(640, 64, both, both, [])
        assert [(part.side, part.tokens) for part in choice.parts] == [("de", (0, 640))]
        assert policy(name).lanes(both, both, []) == [Lane(0.0, 1.0)]


def test_a_policy_of_ones_own():
    class Mine:
        def choose(self, num_tokens, block_tokens, pe, de, others):
            return ReadChoice((), "never loads")

    mine = Mine()
    assert policy(mine) is mine and Push(mine).inner is mine


def test_reasons_are_put_in_words_when_asked():
    inner = Reason("{} tokens", 5)
    outer = Reason("pushed; {}", inner)
    assert str(outer) == f"{outer}" == "pushed; 5 tokens" and "5 tok" in outer
    assert outer == Reason("pushed; {}", Reason("{} tokens", 5)) != inner
    assert len({outer, Reason("pushed; {}", inner)}) == 1 and outer != "pushed; 5 tokens"
    assert repr(inner) == "Reason('5 tokens')"


# -- invariants, and brute force

queues = st.integers(0, 2000)
rates = st.sampled_from([0.0, 0.5, 1.0, 1.0, 3.0, 1e4])
states = st.builds(NodeState, st.just(0), queues, rates,
                   st.one_of(st.integers(0, 3000), st.just(1 << 40)),
                   st.sampled_from([0.0, 0.25, 1.0, inf]))
clusters = st.lists(states, min_size=2, max_size=6).map(
    lambda found: [NodeState(i, n.read_queue_tokens, n.snic_tokens_per_s, n.lend_tokens,
                             n.lend_tokens_per_s) for i, n in enumerate(found)])
policies = st.sampled_from([
    "pe", "round_robin", "shorter_queue", "split", "any_node", "push", Split(0), Split(0.5),
    AnyNode(2, 1, 0), AnyNode(9, 3, 0.2, 0.9), Push(Split()), Push(AnyNode(max_wait=0.5))])


@settings(deadline=None)
@given(policies, clusters, st.integers(1, 60), st.sampled_from([1, 16, 64]))
def test_parts_cover_the_hits_once_in_whole_blocks_the_des_first(name, cluster, blocks, tokens):
    pe, de, *others = cluster
    before = [NodeState(**vars(node)) for node in cluster]
    choice = policy(name).choose(blocks * tokens, tokens, pe, de, others)
    assert cluster == before                            # a policy decides, it does not count
    read = choice.parts[-1].tokens[1] if choice.parts else 0
    alive = [n for n in cluster if n.snic_tokens_per_s > 0]
    assert read == blocks * tokens or not {pe.node_id, de.node_id} & {n.node_id for n in alive} \
        or name == "pe" and pe not in alive
    read_plan(BlockLayout(2, tokens, 8), choice.parts, read, 1)     # refuses whatever is amiss
    places = {"pe": 0, "de": 1}
    used = [part.node_id for part in choice.parts]
    assert len(set(used)) == len(used) and set(used) <= {n.node_id for n in alive}
    for part in choice.parts:
        node = cluster[part.node_id]
        assert part.node_id == places.get(part.side, part.node_id)
        if part.side not in places:
            assert part.node_id > 1 and part.num_tokens <= node.lend_tokens
            assert node.lend_tokens_per_s > 0
    assert isinstance(str(choice.reason), str)


def end(node, blocks, tokens=BLOCK):
    return (node.read_queue_tokens + blocks * tokens) / node.snic_tokens_per_s if blocks else 0.0


@settings(deadline=None)
@given(queues, queues, st.sampled_from([0.5, 1.0, 3.0, 7.3]), st.sampled_from([0.5, 1.0, 2.0]),
       st.integers(1, 40))
def test_split_is_the_best_of_all_shares(pe_queue, de_queue, pe_rate, de_rate, blocks):
    pe, de = NodeState(0, pe_queue, pe_rate), NodeState(1, de_queue, de_rate)
    choice = Split(0).choose(blocks * BLOCK, BLOCK, pe, de, [])
    shares = {part.side: part.num_tokens // BLOCK for part in choice.parts}
    ends = [end(pe, shares.get("pe", 0)), end(de, shares.get("de", 0))]
    assert max(ends) == pytest.approx(min(
        max(end(pe, count), end(de, blocks - count)) for count in range(blocks + 1)))
    if len(shares) == 2:
        assert abs(ends[0] - ends[1]) <= BLOCK / min(pe_rate, de_rate) * (1 + 1e-9)


lanes = st.builds(Lane, st.sampled_from([0.0, 0.0, 1.0, 2.5, 7.0]),
                  st.sampled_from([0.5, 1.0, 2.0, 3.7]), st.sampled_from([inf, inf, 0, 2, 3.9, 5]))


def compositions(total, rooms):
    for counts in itertools.product(*(range(min(total, room) + 1) for room in rooms)):
        if sum(counts) == total:
            yield counts


def room(lane):
    return 99 if lane.max_tokens == inf else int(lane.max_tokens)


@settings(deadline=None)
@given(st.lists(lanes, min_size=1, max_size=4), st.integers(0, 7))
def test_filling_is_the_best_of_all_shares(lanes, blocks):
    counts = fill(lanes, blocks, 1)
    possible = [finish_s(lanes, c, 1) for c in compositions(blocks, map(room, lanes))]
    assert all(count <= room(lane) for count, lane in zip(counts, lanes, strict=True))
    if possible:
        assert sum(counts) == blocks
        assert finish_s(lanes, counts, 1) == pytest.approx(min(possible))
    else:
        assert counts == [room(lane) for lane in lanes]


@settings(deadline=None)
@given(st.lists(lanes, min_size=1, max_size=5), st.integers(0, 120).map(lambda n: n / 4))
def test_the_level_is_where_the_lanes_have_read_it_all(lanes, tokens):
    top = level(lanes, tokens)

    def read(by):
        return sum(min(lane.max_tokens, max(0.0, by - lane.start_s) * lane.tokens_per_s)
                   for lane in lanes)

    if top == inf:
        assert read(1e9) < tokens
    else:
        assert read(top) == pytest.approx(tokens)
        assert tokens == 0 or read(top * 0.99) < tokens


@settings(max_examples=200, deadline=None)
@given(st.lists(lanes.map(lambda lane: lane._replace(max_tokens=inf)), min_size=1, max_size=2),
       st.lists(lanes, max_size=3), st.integers(1, 7), st.integers(1, 3), st.integers(0, 3))
def test_choosing_helpers_is_the_best_of_all_choices(own, helpers, blocks, least, most):
    found, counts, end_s = fill_some(own, helpers, blocks, 1, least_blocks=least,
                                     max_helpers=most)
    best = inf, 99
    for number in range(most + 1):
        for some in itertools.combinations(range(len(helpers)), number):
            these = [*own, *(helpers[i] for i in some)]
            for shares in compositions(blocks, map(room, these)):
                if all(share >= least for share in shares[len(own):]):
                    best = min(best, (round(finish_s(these, shares, 1), 9), number))
    assert (round(end_s, 9), len(found)) == best
    assert sum(found.values()) + sum(counts) == blocks
    assert all(least <= count <= room(helpers[i]) for i, count in found.items())
