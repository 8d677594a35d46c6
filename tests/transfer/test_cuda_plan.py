"""Plan and choice of the provider cuda, without a driver: nothing lost, nothing twice, no way that
is not there and none that is dearer by its own figures."""
import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuda_plan
from cuda_plan import (BATCH, D2D, D2H, H2D, H2H, KERNEL, LOOP, PIECE_NBYTES, STRIDED, Cost, Shape,
                       places_of)

MAX_PITCH = 2**31 - 1
HOST, DEVICE = 0x7F00_0000_0000, 0x7FFF_F000_0000
TOP = 2**64

pytestmark = pytest.mark.needs("compiler")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    return cuda_plan.Plan(tmp_path_factory.mktemp("plan"))


# -- segments

def bounded(copies):
    """No piece ends behind the address space; that is what the region tables are for."""
    copies = [(t % TOP, s % TOP, n) for t, s, n in copies]
    return [(t, s, n) for t, s, n in copies if max(t, s) + n <= TOP]


@st.composite
def runs(draw):
    """Pieces at strides: ascending, descending, touching, overlapping; slices, grids."""
    pick = st.sampled_from
    width = draw(pick([1, 16, 512, 4096, 73728]))
    pitches = st.tuples(*[pick([width, width, 2 * width, 3 * width + 1, 8 * width, -width,
                                width - 1, 2**30, 2**31, 2**32])] * 2)
    bases = st.tuples(pick([0, 64, DEVICE, TOP - 2**20]), pick([0, HOST, 2**63, TOP - 2**16]))
    (t, s), (tp, sp), (ts, ss) = draw(bases), draw(pitches), draw(pitches)
    rows, slices = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    if draw(st.booleans()):             # a step that a box can have
        ts, ss = tp * (rows + draw(st.integers(-1, 3))), sp * (rows + draw(st.integers(-1, 3)))
    return bounded((t + z * ts + y * tp, s + z * ss + y * sp, width)
                   for z in range(slices) for y in range(rows))


@st.composite
def scattered(draw):
    """Blocks by ids in any order, some empty: a layer of a BlockPool and of a LayerPool."""
    width = draw(st.sampled_from([0, 1, 512, 4096]))
    ids = draw(st.lists(st.integers(0, 40), max_size=30))
    stride = draw(st.integers(1, 5)) * max(width, 1)
    some_empty = st.sampled_from([width] * 9 + [0])
    return [(DEVICE + i * width, HOST + block * stride, draw(some_empty))
            for i, block in enumerate(ids)]


SEGMENTS = st.lists(st.one_of(runs(), scattered()), max_size=4).map(
    lambda parts: [copy for part in parts for copy in part])


def merged(copies):
    """`cuda_coalesce` by its definition."""
    out = []
    for t, s, n in copies:
        if n == 0:
            continue
        if out and (out[-1][0] + out[-1][2], out[-1][1] + out[-1][2]) == (t, s):
            out[-1] = (*out[-1][:2], out[-1][2] + n)
        else:
            out.append((t, s, n))
    return out


# -- pieces

@given(SEGMENTS)
@example([(TOP - 16, 0, 16), (0, 16, 16)])          # nothing comes after the last address
@example([(0, TOP - 16, 16), (16, 0, 16)])
def test_pieces_that_touch_on_both_sides_become_one(plan, copies):
    assert plan.coalesce(copies) == merged(copies)


@given(SEGMENTS, st.integers(1, 7))
@settings(max_examples=50)
def test_the_kernel_gets_every_byte_once_in_pieces_of_its_size(plan, copies, room):
    calls = plan.split(copies, room)
    assert all(len(pieces) == room for pieces in calls[:-1])
    pieces = [piece for pieces in calls for piece in pieces]
    assert all(0 < n <= PIECE_NBYTES for _, _, n in pieces)
    assert merged(pieces) == merged(copies)


def test_a_large_copy_is_split_to_the_byte(plan):
    sizes = [PIECE_NBYTES, 1, PIECE_NBYTES + 16, 0, 5 * PIECE_NBYTES - 1]
    copies = [(i << 40, (i + 9) << 40, n) for i, n in enumerate(sizes)]
    pieces = [piece for pieces in plan.split(copies, 3) for piece in pieces]
    assert len(pieces) == 1 + 1 + 2 + 0 + 5 and merged(pieces) == merged(copies)


@given(SEGMENTS)
def test_aligned_is_what_16_divides(plan, copies):
    assert plan.is_aligned(copies) == all(number % 16 == 0 for copy in copies for number in copy)


# -- rectangles

def check_rects(rects, copies, max_pitch):
    """They say what `copies` does, within what the driver takes."""
    assert sorted(itertools.chain(*map(places_of, rects))) == sorted(copies)
    for rect in rects:
        for pitch, step in ((rect.target_pitch, rect.target_step),
                            (rect.source_pitch, rect.source_step)):
            assert rect.width <= pitch and (rect.rows == 1 or pitch <= max_pitch)
            assert step == 0 if rect.slices == 1 else (
                step % pitch == 0 and step // pitch >= rect.rows > 1)
        assert (rect.rows, rect.target_pitch) != (1, 0) and rect.rows * rect.slices > 0


@given(SEGMENTS, st.sampled_from([0, 4096, 2**20, MAX_PITCH]))
@example([(i * 4096, i * 8192, n) for i, n in enumerate([512, 512, 256, 512])], MAX_PITCH)
@example([(z * 4096 + y * 64, z * 4096 + y * 64, 32 - (z == y == 1)) for z in range(3)
          for y in range(3)], MAX_PITCH)            # equal strides, and one piece is shorter
@settings(max_examples=400)
def test_rectangles_are_exactly_the_pieces(plan, copies, max_pitch):
    copies = [copy for copy in copies if copy[2]]
    rects = plan.rects(copies, max_pitch)
    check_rects(rects, copies, max_pitch)
    for room in {0, len(rects) // 2, len(rects) - 1, len(rects)} - {-1}:
        again = plan.rects(copies, max_pitch, room)
        assert again is None if room < len(rects) else list(map(bytes, again)) == list(
            map(bytes, rects))


@given(runs())
def test_one_regular_run_needs_no_more_than_its_shorter_side(plan, copies):
    rects = plan.rects(copies, MAX_PITCH)
    check_rects(rects, copies, MAX_PITCH)
    strides = {(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(copies)}
    if len(strides) == 1 and all(copies[0][2] <= number <= MAX_PITCH
                                 for number in strides.copy().pop()):
        assert len(rects) == 1


LAYERS, LAYER_NBYTES = 30, 73728                     # 72 KiB, as in the paper
STRIDE = LAYERS * LAYER_NBYTES + 4096


def layer_blocks(ids, layers, by_block=False):
    """Layer Blocks of a BlockPool's `ids` -> a LayerPool from its block 0 on."""
    pairs = [(layer, i) for layer in layers for i in range(len(ids))]
    if by_block:
        pairs = [(layer, i) for i in range(len(ids)) for layer in layers]
    return [(DEVICE + (layer * 1024 + i) * LAYER_NBYTES,
             HOST + ids[i] * STRIDE + layer * LAYER_NBYTES, LAYER_NBYTES) for layer, i in pairs]


@pytest.mark.parametrize("ids, layers, by_block, expected", [
    (range(511), [3], False, 1),                    # one layer of a run
    (range(511), range(LAYERS), False, LAYERS),     # all layers, layer by layer
    (range(511), range(LAYERS), True, LAYERS),      # block by block: a grid, cut the better way
    (range(7), range(LAYERS), True, 7),
    ([*range(9), 100, *range(200, 300)], [0], False, 3),    # runs, and a block alone
    ([5, 3, 1, 60], [0], False, 3),                 # descending: only 1 -> 60 is a stride
    ([8 * group + i for group in range(20) for i in range(4)], [0], False, 1),   # a box
    ([group * group + i for group in range(5, 25) for i in range(4)], [0], False, 10),
    ([0], [0], False, 1),
    ([], [0], False, 0),
])
def test_rectangles_of_pools(plan, ids, layers, by_block, expected):
    copies = layer_blocks(list(ids), layers, by_block)
    rects = plan.rects(copies, MAX_PITCH)
    check_rects(rects, copies, MAX_PITCH)
    assert len(rects) == expected


def test_heads_of_every_token_of_every_block_are_one_box(plan):
    """A rank's heads: rows of a token on both sides, blocks a whole number of tokens apart."""
    copies = [(DEVICE + (block * 64 + token) * 2048, HOST + (block * 80 + token) * 512, 512)
              for block in range(6) for token in range(64)]
    (box,) = plan.rects(copies, MAX_PITCH)
    check_rects([box], copies, MAX_PITCH)
    assert (box.rows, box.slices, box.source_step // 512) == (64, 6, 80)


def test_a_box_whose_slices_are_no_whole_number_of_rows_apart_is_cut(plan):
    copies = [(DEVICE + z * 10_000 + y * 700, HOST + z * 9_999 + y * 800, 600)
              for z in range(5) for y in range(3)]
    rects = plan.rects(copies, MAX_PITCH)
    check_rects(rects, copies, MAX_PITCH)
    assert len(rects) == 3                           # rows of 5 slices, not 5 of 3 rows
    # Slices that go down: to the driver their height would be near 2**64.
    copies = [(DEVICE - z * 4096 + y * 64, HOST - z * 4096 + y * 64, 32)
              for z in range(5) for y in range(3)]
    rects = plan.rects(copies, MAX_PITCH)
    check_rects(rects, copies, MAX_PITCH)
    assert len(rects) == 5


# -- the choice

NS = st.floats(0, 1e9, allow_nan=False)
COSTS = st.lists(st.builds(Cost, NS, NS, NS, st.floats(0, 10), st.integers(0, 1)),
                 min_size=4, max_size=4)
SHAPES = st.builds(Shape, st.integers(0, 3), st.integers(1, 16384), st.integers(0, 16384),
                   st.integers(1, 16384), st.integers(1, 2**40), st.booleans())


def can(costs, shape, way):
    if way == KERNEL and (not shape.aligned or shape.kind == H2H):
        return False
    if way == STRIDED and not shape.rects:      # it was not worth looking for them
        return False
    return way == LOOP or bool(costs[way].there)


@given(COSTS, SHAPES)
@settings(max_examples=500)
def test_the_way_chosen_is_there_and_the_cheapest(plan, costs, shape):
    way = plan.choose(costs, shape)
    assert can(costs, shape, way)
    mine = plan.predict_ns(costs[way], way, shape)
    for other in filter(lambda other: can(costs, shape, other), (LOOP, BATCH, STRIDED, KERNEL)):
        theirs = plan.predict_ns(costs[other], other, shape)
        assert mine <= theirs or (other == KERNEL and theirs >= 0.8 * mine)
        assert way != KERNEL or other == KERNEL or mine < 0.8 * theirs


def test_a_prediction_is_its_four_figures(plan):
    cost, shape = Cost(1000, 10, 3, 0.5), Shape(H2D, 7, 2, 7, 4096, True)
    for way in (LOOP, BATCH, KERNEL):
        assert plan.predict_ns(cost, way, shape) == 1000 + 7 * 10 + 2048
    assert plan.predict_ns(cost, STRIDED, shape) == 1000 + 2 * 10 + 7 * 3 + 2048


@pytest.mark.parametrize("copies, rects, expected", [
    (1, 1, LOOP), (4, 4, LOOP), (5, 5, BATCH), (16384, 16384, BATCH), (2, 1, STRIDED),
    (511, 1, STRIDED), (511, 30, BATCH), (6, 2, STRIDED)])
def test_the_rule_where_nothing_was_measured(plan, copies, rects, expected):
    shape = Shape(H2D, copies, rects, copies, copies * 4096, True)
    assert plan.choose(plan.rule_of_thumb({LOOP, BATCH, STRIDED, KERNEL}), shape) == expected
    without = plan.choose(plan.rule_of_thumb({LOOP, STRIDED}), shape)
    assert without == (STRIDED if 1.5 * rects < copies else LOOP)
    assert plan.choose(plan.rule_of_thumb({LOOP}), shape) == LOOP


# -- from times

def times_of(plan, cost, way):
    samples = plan.strided_samples if way == STRIDED else plan.samples
    return [plan.predict_ns(cost, way, Shape(
        D2H, sample.calls, sample.calls, sample.calls * sample.rows,
        sample.calls * sample.rows * sample.width, True)) for sample in samples]


@given(st.integers(0, 3), st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e3),
       st.floats(0, 1))
def test_times_that_follow_the_formula_give_it_back(plan, way, fixed, copy, row, byte):
    cost = Cost(fixed, copy, row if way == STRIDED else 0, byte)
    found = plan.cost_of(way, times_of(plan, cost, way))
    for name in ("fixed_ns", "copy_ns", "row_ns", "byte_ns"):
        scale = 1 if name != "byte_ns" else 1e-6
        assert math.isclose(getattr(found, name), getattr(cost, name), rel_tol=1e-6, abs_tol=scale)
    assert found.there == 1


@given(st.integers(0, 3), st.lists(st.floats(0, 1e9), min_size=4, max_size=4))
def test_whatever_the_times_no_figure_is_below_0(plan, way, times):
    cost = plan.cost_of(way, times)
    assert min(cost.fixed_ns, cost.copy_ns, cost.row_ns, cost.byte_ns) >= 0
    assert math.isfinite(plan.predict_ns(cost, way, Shape(D2D, 511, 511, 511, 2**30, True)))


@pytest.mark.parametrize("times, expected", [
    ([(400, 400), (200, 200), (100, 100), (100, 100)], 2),
    ([(400, 100), (200, 100), (100, 100)], 2),              # the worse direction decides
    ([(105, 100), (100, 100)], 0),                          # within 5 %
    ([(106, 100), (100, 100)], 1),
    ([(100, 200), (120, 100)], 1),      # none is near the best both ways: the most SMs
    ([(7, 7)], 0),
])
def test_the_fewest_sms_that_are_about_as_fast(plan, times, expected):
    assert plan.fewest(times) == expected
