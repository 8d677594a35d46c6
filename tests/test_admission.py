"""Nobody waits for ever: every interleaving of small clusters, over the product's own admission.

A request is a list of takes and gives, made from `buffer_order` as the engine makes it. The search
walks every order in which requests can go on; a state in which some wait and none can go on is a
deadlock. Two rules broken on purpose show that it finds them.
"""
import asyncio
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvio.engine.node import Buffer
from kvio.errors import InvalidArgument
from kvio.layout import BlockLayout
from kvio.loader import Budget, Part, buffer_order
from kvio.memory import BlockPool

LAYOUT = BlockLayout(1, 4, 8)
TAKE, GIVE = "take", "give"
PES, DES = (0, 1), (2, 3)                       # node ids of two prefill and two decode nodes


def parts_of(kind, pe, de):
    """(parts, side -> node): one block each; "any" lends the other node's storage NIC."""
    nodes, blocks = {"pe": pe, "de": de}, {
        "none": [], "pe": ["pe"], "de": ["de"], "split": ["de", "pe"], "any_pe": ["pe", "h0"],
        "any_de": ["de", "h0"], "all": ["de", "pe", "h0"]}[kind]
    if "h0" in blocks:
        nodes["h0"] = 1 - pe if kind == "any_pe" else 5 - de
    return tuple(Part(side, (4 * i, 4 * i + 4)) for i, side in enumerate(blocks)), nodes


def program(kind, pe, de, order=None, piecemeal=False):
    """What a request asks for and gives back, as the engine does: buffers before the first read,
    a workspace of PE HBM while it prefills, then the parts' buffers, then the DE's block by block
    as each is stored."""
    parts, nodes = parts_of(kind, pe, de)
    claims = buffer_order(LAYOUT, parts, 4 * len(parts) + 1, nodes.__getitem__)
    steps = []
    for claim in claims if order is None else order(claims):
        resource = "buffer", nodes[claim.side]
        steps += [(TAKE, resource, 1)] * claim.num_blocks if piecemeal else \
            [(TAKE, resource, claim.num_blocks)]
    steps += [(TAKE, ("hbm", pe), 1), (GIVE, ("hbm", pe), 1)]
    steps += [(GIVE, ("buffer", nodes[c.side]), c.num_blocks) for c in claims if c.side != "de"]
    steps += [(GIVE, ("buffer", de), 1)] * (len(parts) + 1)
    return tuple(steps)


def persisting(de):
    """A block that fills up in decode passes through the DE's buffer; its HBM was promised."""
    return (TAKE, ("buffer", de), 1), (GIVE, ("buffer", de), 1)


def deadlock(programs, capacities):
    """The first state from which nobody can go on, or None; and how many states there are."""
    start = (tuple((0, False) for _ in programs),
             tuple((name, Budget.of(count)) for name, count in sorted(capacities.items())))
    seen, open_states = {start}, [start]
    while open_states:
        state = open_states.pop()
        following = list(successors(state, programs))
        if not following and any(at < len(p) for (at, _), p in zip(state[0], programs)):
            return state, len(seen)
        for each in following:
            if each not in seen:
                seen.add(each)
                open_states.append(each)
    return None, len(seen)


def successors(state, programs):
    places, budgets = state
    for i, (at, waits) in enumerate(places):
        if waits or at == len(programs[i]):
            continue
        kind, name, count = programs[i][at]
        after, table = list(places), dict(budgets)
        if kind == TAKE:
            table[name], entered = table[name].ask(i, count)
            after[i] = at, True
        else:
            table[name], entered = table[name].give_back(count)
            after[i] = at + 1, False
        for owner in entered:
            after[owner] = after[owner][0] + 1, False
        yield tuple(after), tuple(sorted(table.items()))


KINDS = [program(kind, pe, de) for kind, pe, de in product(
    ("none", "pe", "de", "split", "any_pe", "any_de", "all"), PES, DES)]


def capacities(buffer, hbm=1):
    return {**{("buffer", node): buffer for node in (*PES, *DES)}, **{("hbm", pe): hbm
                                                                     for pe in PES}}


def test_every_pair_of_requests_beside_decode_gets_through():
    """Buffers that hold the largest request and no more: everything has to wait."""
    total = 0
    for pair in combinations_with_replacement(KINDS, 2):
        stuck, states = deadlock((*pair, *map(persisting, DES)), capacities(4))
        assert stuck is None, (pair, stuck)
        total += states
    assert total > 50_000                       # that it did search


def test_three_requests_over_one_decode_node_get_through():
    some = [program(kind, pe, 2) for kind, pe in product(("pe", "split", "any_pe", "all"), PES)]
    for three in combinations_with_replacement(some, 3):
        stuck, _ = deadlock(three, capacities(4))
        assert stuck is None, (three, stuck)


def test_the_search_finds_two_orders():
    """One request takes the DE's buffer first, the other its own: the classical circle."""
    one = program("pe", 0, 2)
    other = program("pe", 0, 2, order=lambda claims: claims[::-1])
    small = {**capacities(2), ("buffer", 0): 1}
    assert deadlock((one, one), small)[0] is None
    assert deadlock((one, other), small)[0] is not None


def test_the_search_finds_half_holders():
    """Block by block instead of all at once: two requests hold half of what each needs."""
    whole, parted = program("de", 0, 2), program("de", 0, 2, piecemeal=True)
    assert deadlock((whole, whole), capacities(2))[0] is None
    assert deadlock((parted, parted), capacities(2))[0] is not None


# ---- the budget

@given(st.integers(1, 6), st.lists(st.tuples(st.sampled_from("agw"), st.integers(0, 9)),
                                   max_size=40))
def test_a_budget_is_first_come_first_served_and_never_exceeded(capacity, script):
    budget, held, asked, entered, gone = Budget.of(capacity), {}, [], [], set()
    for owner, (kind, number) in enumerate(script):
        if kind == "a":
            asked.append((owner, number % capacity + 1))
            budget, let_in = budget.ask(*asked[-1])
        elif kind == "g" and held:
            budget, let_in = budget.give_back(held.pop(list(held)[number % len(held)]))
        elif kind == "w" and budget.waiting:
            leaver = budget.waiting[number % len(budget.waiting)][0]
            gone.add(leaver)
            budget, let_in = budget.withdraw(leaver)
        else:
            continue
        held.update((each, dict(asked)[each]) for each in let_in)
        entered += let_in
        assert sum(held.values()) + budget.free == capacity and budget.free >= 0
        assert not budget.waiting or budget.waiting[0][1] > budget.free     # nobody waits idly
    order = [owner for owner, _ in asked if owner not in gone]
    assert entered == [owner for owner, _ in asked if owner in set(entered)]
    assert order[:len(entered)] == entered


@pytest.mark.parametrize("wrong", [
    lambda b: b.ask(1, 5), lambda b: b.ask(1, 0), lambda b: b.give_back(1),
    lambda b: b.give_back(-1)])
def test_a_budget_refuses_what_could_never_be(wrong):
    with pytest.raises(InvalidArgument):
        wrong(Budget.of(4))


def test_claims_follow_the_nodes_and_cover_the_prompt():
    parts = Part("de", (0, 8)), Part("pe", (8, 12)), Part("h0", (12, 20))
    claims = buffer_order(LAYOUT, parts, 25, {"pe": 1, "h0": 0, "de": 2}.__getitem__)
    assert [tuple(claim) for claim in claims] == [
        ("h0", "h0_buffer", 3, 5), ("pe", "pe_buffer", 2, 3), ("de", "de_buffer", 0, 7)]


@given(st.lists(st.tuples(st.sampled_from("arc"), st.integers(0, 9)), max_size=30))
def test_the_engine_s_buffer_gives_each_block_to_one_holder(script):
    """Asks, releases and cancellations, also of a turn that was granted in the same instant."""
    async def main():
        with BlockPool(LAYOUT, 5) as pool:
            buffer, tasks, out = Buffer(pool), [], []
            for kind, number in script:
                if kind == "a":
                    tasks.append(asyncio.ensure_future(buffer.acquire(number % 5 + 1)))
                elif kind == "c" and tasks:
                    tasks[number % len(tasks)].cancel()
                elif kind == "r" and out:
                    buffer.release(out.pop(number % len(out)))
                if number % 2:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    for task in [task for task in tasks if task.done()]:
                        tasks.remove(task)
                        if not task.cancelled():
                            out.append(task.result())
                    held = [int(i) for ids in out for i in ids]
                    assert len(held) == len(set(held))
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(result, BaseException):
                    out.append(result)
            for ids in out:
                buffer.release(ids)
            assert pool.num_free == 5 and buffer.num_waiting == 0
            assert buffer.num_most_held <= 5
    asyncio.run(main())
