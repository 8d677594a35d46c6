"""A small model in virtual time that policies are tried on: nobody here measures anything.

Storage NICs are queues that read first in, first out at their rate; a request's hits are there
when the last of its parts has been read. Then its prefill engine computes the miss tokens, one
request after the other in the order in which they are ready, and decoding takes a while. Agents
take turns: the next turn begins when the one before has been answered. Requests go to the PE and
the DE with the fewest unfinished tokens (lowest index first); the path is the policy's.
"""
import heapq
import itertools
import random
from dataclasses import dataclass

from kvio.scheduler.paths import NodeState, policy

BLOCK = 64


@dataclass(frozen=True)
class Fleet:
    """Rates in tokens/s, one entry a node. `known_*`: what is reported (wrong by a factor)."""

    prefill_rates: tuple
    decode_rates: tuple
    compute_tokens_per_s: float
    decode_s_per_token: float
    lend_tokens: int = 1 << 40
    lend_tokens_per_s: float = float("inf")
    wrong_by: tuple = ()            # factor on the real rate of each node that reports lack


def agents(seed, count, turns, context, append, gen, spread):
    """Turns (hit blocks, miss tokens, generated tokens) of each agent; contexts grow."""
    rnd, made = random.Random(seed), []
    for _ in range(count):
        scale = rnd.lognormvariate(0, spread)
        have, turns_ = int(context * scale * rnd.random()), []
        for _ in range(max(1, int(turns * rnd.uniform(0.5, 1.5)))):
            miss = max(1, int(append * rnd.lognormvariate(0, spread)))
            out = max(1, int(gen * rnd.lognormvariate(0, spread)))
            turns_.append((have // BLOCK, miss + have % BLOCK, out))
            have += miss + out
        made.append(turns_)
    return made


@dataclass
class Outcome:
    makespan_s: float               # when the last agent is done
    jct_s: list                     # when each agent is done, since it began
    read_s: list                    # of each request with hits: until they are there
    node_tokens: list               # read by each node


class Run:
    def __init__(self, fleet, policy_name, work, start_s=None, rule=None):
        self.fleet, self.policy, self.work, self.rule = fleet, policy(policy_name), work, rule
        self.rates = (*fleet.prefill_rates, *fleet.decode_rates)
        self.real = [rate * wrong for rate, wrong in
                     itertools.zip_longest(self.rates, fleet.wrong_by, fillvalue=1.0)]
        self.num_prefill, count = len(fleet.prefill_rates), len(self.rates)
        self.free_s, self.loads = [0.0] * count, [0] * count
        self.compute_free_s = [0.0] * count
        self.reading_s = [0.0] * count                      # computing that waits for its hits
        self.queued = [[] for _ in range(count)]            # (finish, tokens) of reads
        self.backlog = [0.0] * count
        self.outcome = Outcome(0.0, [0.0] * len(work), [], [0] * count)
        self.start_s = start_s or [0.0] * len(work)
        self.events, self.order = [], itertools.count()

    def at(self, time_s, function, *args):
        heapq.heappush(self.events, (time_s, next(self.order), function, args))

    def run(self) -> Outcome:
        for agent, start_s in enumerate(self.start_s):
            self.at(start_s, self.turn, agent, 0)
        while self.events:
            self.now_s, _, function, args = heapq.heappop(self.events)
            function(*args)
        self.outcome.makespan_s = self.now_s
        return self.outcome

    def state(self, node):
        queue = self.queued[node]
        while queue and queue[0][0] <= self.now_s:
            self.backlog[node] -= heapq.heappop(queue)[1]
        return NodeState(node, round(self.backlog[node]), self.rates[node],
                         self.fleet.lend_tokens, self.fleet.lend_tokens_per_s)

    def busy_s(self, pe):
        """The computing that an engine has been given."""
        return max(0.0, self.reading_s[pe]) + max(0.0, self.compute_free_s[pe] - self.now_s)

    def turn(self, agent, number):
        blocks, miss, out = self.work[agent][number]
        nodes = range(len(self.rates))
        pe = min(nodes[:self.num_prefill], key=lambda i: (self.loads[i], i))
        de = min(nodes[self.num_prefill:], key=lambda i: (self.loads[i], i))
        states = [self.state(i) for i in nodes]
        others = sorted((states[i] for i in nodes if i not in (pe, de)),
                        key=lambda s: s.read_queue_tokens / s.snic_tokens_per_s)
        hits, parts = blocks * BLOCK, ()
        if hits and self.rule is not None:
            hits = self.rule.num_load_tokens(
                hits, miss, self.policy.lanes(states[pe], states[de], others),
                self.busy_s(pe))
            miss += blocks * BLOCK - hits
        if hits:
            parts = self.policy.choose(hits, BLOCK, states[pe], states[de], others).parts
            assert parts[-1].tokens[1] == hits
        ready_s = self.now_s
        for part in parts:
            ready_s = max(ready_s, self.read(part.node_id, part.num_tokens))
        if parts:
            self.outcome.read_s.append(ready_s - self.now_s)
        for i in (pe, de):
            self.loads[i] += hits + miss
        cost_s = miss / self.fleet.compute_tokens_per_s if self.rule is None else \
            self.rule.attention(hits, miss) + self.rule.linear_s_per_token * miss
        self.reading_s[pe] += cost_s
        self.at(ready_s, self.compute, agent, number, pe, de, hits + miss, out, cost_s)

    def read(self, node, tokens):
        self.free_s[node] = max(self.now_s, self.free_s[node]) + tokens / self.real[node]
        heapq.heappush(self.queued[node], (self.free_s[node], tokens))
        self.backlog[node] += tokens
        self.outcome.node_tokens[node] += tokens
        return self.free_s[node]

    def compute(self, agent, number, pe, de, tokens, out, cost_s):
        self.reading_s[pe] -= cost_s
        self.compute_free_s[pe] = max(self.now_s, self.compute_free_s[pe]) + cost_s
        self.at(self.compute_free_s[pe], self.decode, agent, number, pe, de, tokens, out)

    def decode(self, agent, number, pe, de, tokens, out):
        self.loads[pe] -= tokens
        self.at(self.now_s + out * self.fleet.decode_s_per_token, self.done, agent, number, de,
                tokens)

    def done(self, agent, number, de, tokens):
        self.loads[de] -= tokens
        if number + 1 < len(self.work[agent]):
            self.turn(agent, number + 1)
        else:
            self.outcome.jct_s[agent] = self.now_s - self.start_s[agent]
