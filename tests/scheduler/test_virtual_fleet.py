"""Do splitting and helpers pay for everybody, not for the request alone? Fleets in virtual time.

Nothing is measured: `virtual_fleet` is a model, and what is compared are its own times.
"""
import random
from statistics import geometric_mean, mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_fleet import BLOCK, Fleet, Run, agents

from kvio.scheduler import AnyNode, AttentionModel, LoadOrRecompute, NodeState, Split
from kvio.scheduler.paths import policy

NUM_FLEETS, NUM_DRAWS = 24, 4


def fleet_of(seed, draw):
    """A fleet and the turns of its agents, somewhere between storage-bound and compute-bound."""
    rnd = random.Random(seed)
    num_prefill, num_decode = rnd.choice([(1, 1), (1, 2), (2, 1), (2, 4)])
    unequal, context, append = rnd.random() < 0.25, 17_000, 429
    rates = [10_000.0 * (rnd.choice([0.5, 1, 2]) if unequal else 1)
             for _ in range(num_prefill + num_decode)]
    load_to_compute = rnd.choice([0.2, 0.5, 1, 2, 4])           # of Basic
    fleet = Fleet(tuple(rates[:num_prefill]), tuple(rates[num_prefill:]),
                  append * 10_000 / context * load_to_compute, rnd.choice([0, 0.005, 0.03]))
    return fleet, agents(seed * 100 + draw, rnd.choice([1, 2, 4, 8, 16]), 10, context, append, 148,
                         rnd.choice([0, 0.3, 0.7]))


def times(policy_name, seed):
    """(makespan, mean JCT, mean read time) of a fleet, summed over draws: what a single draw
    gains or loses by who happens to be last is no property of a policy."""
    total = [0.0] * 3
    for draw in range(NUM_DRAWS):
        outcome = Run(*_args(policy_name, *fleet_of(seed, draw))).run()
        for i, value in enumerate((outcome.makespan_s, mean(outcome.jct_s), mean(outcome.read_s))):
            total[i] += value
    return total


def _args(policy_name, fleet, work):
    return fleet, policy_name, work


@pytest.fixture(scope="module")
def ratios():
    """policy: per fleet, times against those with the shorter queue."""
    base = [times("shorter_queue", seed) for seed in range(NUM_FLEETS)]
    return {name: [[mine / other for mine, other in zip(times(name, seed), base[seed], strict=True)]
                   for seed in range(NUM_FLEETS)]
            for name in ("split", "any_node", "pe", "round_robin")}


@pytest.mark.parametrize("name", ["split", "any_node"])
def test_never_later_than_with_the_shorter_queue_by_more_than_2_percent(ratios, name):
    assert max(makespan for makespan, _, _ in ratios[name]) <= 1.02
    assert max(jct for _, jct, _ in ratios[name]) <= 1.02


def test_on_average_splitting_pays_and_helpers_pay_more(ratios):
    jct = {name: geometric_mean(jct for _, jct, _ in rows) for name, rows in ratios.items()}
    read = {name: geometric_mean(read for _, _, read in rows) for name, rows in ratios.items()}
    assert jct["any_node"] < jct["split"] < 0.97 and read["any_node"] < read["split"] < 0.65
    assert jct["pe"] > 1.05 and read["round_robin"] > 1.1        # the model tells policies apart


@pytest.mark.parametrize("name, makespan, jct", [("split", 1.0, 1.05), ("any_node", 1.01, 1.06)])
def test_the_price_in_a_burst_of_requests_of_very_different_length(name, makespan, jct):
    """Where it does not pay: all at once, one turn each, heavy-tailed lengths. A long request
    that is split holds up both NICs, so short ones behind it cannot pass on the other side; all
    are done no later, but on average a little later. docs/policies.md says so."""
    fleet = Fleet((1e4,), (1e4, 1e4), 429 * 1e4 / 17_000 * 3, 0.01)
    ends = {"shorter_queue": [0, 0], name: [0, 0]}
    for seed in range(20):
        work = agents(seed, 32, 1, 34_000, 429, 148, spread=1.2)
        for each in ends:
            outcome = Run(fleet, each, work).run()
            ends[each][0] += outcome.makespan_s
            ends[each][1] += mean(outcome.jct_s)
    assert ends[name][0] <= makespan * ends["shorter_queue"][0]
    assert ends["shorter_queue"][1] < ends[name][1] <= jct * ends["shorter_queue"][1]


def reads(policy_name, arrivals, rates):
    """When the last read ends, over a PE and a DE that read first in, first out."""
    made, free_s, now = policy(policy_name), [0.0, 0.0], 0.0
    for gap_s, blocks in arrivals:
        now += gap_s
        states = [NodeState(i, max(0.0, free_s[i] - now) * rates[i], rates[i]) for i in (0, 1)]
        for part in made.choose(blocks * BLOCK, BLOCK, *states, []).parts:
            node = part.node_id
            free_s[node] = max(free_s[node], now) + part.num_tokens / rates[node]
    return max(free_s)


arrivals = st.lists(st.tuples(st.sampled_from([0, 0, 1, 30, 200]), st.integers(1, 40)), min_size=1,
                    max_size=12)


@settings(deadline=None)
@given(arrivals, st.sampled_from(["shorter_queue", "round_robin", "pe"]))
def test_whatever_arrives_split_reads_all_of_it_first_but_for_a_block(arrivals, other):
    """It leaves no NIC idle while another has more than a block to read: so no policy over the
    same two NICs can have read more by any time."""
    assert reads(Split(0), arrivals, (1.0, 1.0)) <= reads(other, arrivals, (1.0, 1.0)) + BLOCK


class Never(LoadOrRecompute):
    def num_load_tokens(self, *args):
        return 0


class Always(LoadOrRecompute):
    def num_load_tokens(self, num_hit, *args):
        return num_hit


class Forgetful(Run):
    """An engine that reports as busy only what it could compute now."""

    def busy_s(self, pe):
        return max(0.0, self.compute_free_s[pe] - self.now_s)


def recompute_times(run, rule_type, load_to_compute, count):
    """Makespans over draws. Storage reads a token `load_to_compute` times as slowly as the engine
    computes it."""
    fleet, per_token = Fleet((1e4,), (1e4,), 0, 0.005), 1 / (1e4 * load_to_compute)
    rule = rule_type(AttentionModel(per_token / 40_000), per_token, BLOCK)
    return sum(run(fleet, Split(), agents(seed * 7 + 1, count, 6, 17_000, 429, 148, 0.5),
                   rule=rule).run().makespan_s for seed in range(4))


@pytest.mark.parametrize("load_to_compute", [0.1, 0.3, 1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("count", [1, 4, 16])
def test_load_or_recompute_is_no_worse_than_the_better_of_both(load_to_compute, count):
    ends = [recompute_times(Run, rule, load_to_compute, count)
            for rule in (LoadOrRecompute, Never, Always)]
    assert ends[0] <= 1.02 * min(ends[1:])
    if load_to_compute in (1.0, 3.0) and count == 16:       # both resources are used
        assert ends[0] < 0.8 * min(ends[1:])


def test_an_engine_is_busy_with_what_is_still_being_read_as_well():
    """Else a burst that loads fast is held up by requests that are computed again before it."""
    ends = [recompute_times(run, LoadOrRecompute, 0.1, 32) for run in (Run, Forgetful)]
    assert ends[1] > 1.2 * ends[0]


def test_helpers_are_asked_only_while_they_are_idle():
    """A busy fleet lends nothing: any_node then is split."""
    busy = [NodeState(i, 64 * (i + 1), 1.0, 1 << 30) for i in range(6)]
    for blocks in (1, 40, 500):
        mine = AnyNode().choose(blocks * BLOCK, BLOCK, *busy[:2], busy[2:])
        assert mine.parts == Split().choose(blocks * BLOCK, BLOCK, *busy[:2], []).parts
