"""Draws the figures of policies.md, as SVG, from the library's own decisions.

`python docs/policy_figures.py` writes them into docs/figures. Nothing is random, and nothing but
kvio and the standard library is needed; a test compares the files with what this would write.
"""
from html import escape
from pathlib import Path

from kvio.layout import BlockLayout
from kvio.loader.plan import NIC_READ, NIC_WRITE, Part, chunk_steps
from kvio.scheduler import (AttentionModel, Lane, LoadOrRecompute, NodeState, PrefillWork,
                            pack_prefill)
from kvio.scheduler.fill import level
from kvio.scheduler.paths import policy

FOLDER = Path(__file__).parent / "figures"
BLOCK = 64
INK, GREY, PALE = "#222", "#999", "#ddd"
COLOURS = ["#2b6cb0", "#dd6b20", "#2f855a", "#b83280", "#6b46c1", "#b7791f"]


class Drawing:
    """A picture of `width` x `height` pixels on white."""

    def __init__(self, width, height, title):
        self.width, self.height = width, height
        self.parts = [f"<title>{escape(title)}</title>"]
        self.box(0, 0, width, height, "#fff")

    def box(self, x, y, width, height, fill, stroke="none"):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                          f'height="{height:.1f}" fill="{fill}" stroke="{stroke}"/>')

    def line(self, points, stroke=INK, width=1.0, dashed=False, arrow=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        extra = ' stroke-dasharray="4 3"' if dashed else ""
        extra += ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{stroke}" '
                          f'stroke-width="{width:g}"{extra}/>')

    def dot(self, x, y, fill):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}"/>')

    def text(self, x, y, words, anchor="start", fill=INK, size=12):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" '
                          f'font-size="{size}">{escape(words)}</text>')

    def __str__(self):
        tip = (f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
               f'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INK}"/>'
               '</marker></defs>')
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" '
            f'height="{self.height}" viewBox="0 0 {self.width} {self.height}" '
            'font-family="sans-serif">', tip, *self.parts, "</svg>"]) + "\n"


def storage_nics(name, title):
    """Two requests, A of 24 blocks and then B of 12, over four nodes of which two are idle."""
    nodes = [NodeState(0, 8 * BLOCK), NodeState(1, 2 * BLOCK),
             *(NodeState(i, 0, lend_tokens=1 << 30) for i in (2, 3))]
    waiting = [node.read_queue_tokens / BLOCK for node in nodes]
    made, bars = policy(name), []
    for request, blocks in enumerate((24, 12)):
        others = sorted(nodes[2:], key=lambda node: node.read_queue_tokens)
        for part in made.choose(blocks * BLOCK, BLOCK, nodes[0], nodes[1], others).parts:
            start = nodes[part.node_id].read_queue_tokens / BLOCK
            nodes[part.node_id].add(part)
            bars.append((request, part, start, start + part.num_tokens / BLOCK))
    picture = Drawing(640, 210, title)
    picture.text(10, 20, title, size=13)
    left, scale, top = 110, 14.5, 34
    for row, (label, queue) in enumerate(zip(
            ("PE's node", "DE's node", "node 2, idle", "node 3, idle"), waiting, strict=True)):
        y = top + row * 30
        picture.text(left - 8, y + 16, label, "end")
        picture.line([(left, y + 26), (left + 36 * scale, y + 26)], PALE)
        if queue:
            picture.box(left, y + 2, queue * scale, 22, PALE, "#fff")
    for request, part, start, end in bars:
        y = top + part.node_id * 30
        picture.box(left + start * scale, y + 2, (end - start) * scale, 22, COLOURS[request],
                    "#fff")
        if end - start >= 2:
            picture.text(left + (start + end) / 2 * scale, y + 17,
                         f"{'AB'[request]} {end - start:.0f}", "middle", "#fff")
    for request in (0, 1):
        end = max(end for which, _, _, end in bars if which == request)
        x = left + end * scale
        picture.line([(x, top - 4), (x, top + 122 + 14 * request)], COLOURS[request], 1.5,
                     dashed=True)
        picture.text(x - 4, top + 134 + 14 * request, f"{'AB'[request]} is there: {end:.0f}",
                     "end", COLOURS[request])
    picture.text(left, top + 168, "time, in blocks that a storage NIC reads; grey: waits already",
                 fill=GREY, size=11)
    return picture


def push():
    """What moves for one layer when the DE has read the first 3 blocks, the PE the last 2."""
    layout = BlockLayout(1, BLOCK, 64)
    parts = (Part("de", (0, 3 * BLOCK)), Part("pe", (3 * BLOCK, 5 * BLOCK)))
    picture = Drawing(640, 250, "Pull and push")
    for row, pushed in enumerate((False, True)):
        y = 20 + row * 120
        steps = chunk_steps(layout, parts, 5 * BLOCK, (5 * BLOCK, 6 * BLOCK), push=pushed)
        inputs = [s for s in steps if s.target == "pe_hbm" and s.kind in (NIC_READ, NIC_WRITE)]
        picture.text(10, y, "push: the owner writes" if pushed else "pull: the PE reads", size=13)
        places = {}
        for at, (place, blocks) in enumerate((("de_buffer", 3), ("pe_hbm", 6), ("pe_buffer", 2))):
            x = 30 + at * 215
            places[place] = x
            wide = 24 if place == "pe_hbm" else 30          # one after the other, or scattered
            for i in range(blocks):
                lost = i == 5
                mine = COLOURS[0] if place == "de_buffer" or place == "pe_hbm" and i < 3 else \
                    COLOURS[1]
                picture.box(x + i * wide, y + 52, 22 if wide == 30 else 24, 22,
                            PALE if lost else mine, "#fff")
            picture.text(x, y + 92, {"de_buffer": "DE buffer (blocks lie anywhere)",
                                     "pe_hbm": "PE HBM (one after the other)",
                                     "pe_buffer": "PE buffer"}[place], fill=GREY, size=11)
        for step in inputs:
            source, wide = places[step.source], 24
            first = step.tokens[0] // BLOCK
            count = (step.tokens[1] - step.tokens[0]) // BLOCK
            end_x = places["pe_hbm"] + (first + count / 2) * wide
            begin_x = source + count * 15
            picture.line([(begin_x, y + 50), (begin_x, y + 34), (end_x, y + 34), (end_x, y + 50)],
                         arrow=True)
            words = (f"{step.side.upper()}: NIC write, {count} blocks gathered"
                     if step.kind == NIC_WRITE else f"{step.side.upper()}: NIC reads, {count}")
            picture.text((begin_x + end_x) / 2, y + 28, words, "middle", size=11)
    return picture


def quota():
    """Batches of one prefill engine: attention time of each, by request."""
    model = AttentionModel(per_pair_s=4e-9, per_token_s=1e-7)
    contexts = [60_000, 3_000, 30_000, 1_000, 45_000, 8_000]
    ready = [PrefillWork(i, cached, 1800) for i, cached in enumerate(contexts)]
    picture = Drawing(640, 250, "Compute quota")
    for column, quota_s in enumerate((None, 0.3)):
        left, base, scale = 50 + column * 310, 205, 330
        queue, batches = list(ready), []
        while queue:
            batch = pack_prefill(queue, quota_s, model if quota_s else None)
            times = []
            for request, new in batch:
                head = queue.pop(0)
                times.append((request, model(head.num_cached_tokens, new)))
                if new < head.num_new_tokens:
                    queue.insert(0, PrefillWork(request, head.num_cached_tokens + new,
                                                head.num_new_tokens - new))
            batches.append(times)
        for i, times in enumerate(batches):
            y, x = base, left + i * 40
            for request, seconds in times:
                y -= seconds * scale
                picture.box(x, y, 34, seconds * scale, COLOURS[request], "#fff")
        picture.line([(left - 6, base), (left + 250, base)])
        picture.line([(left - 6, base - 0.3 * scale), (left + 250, base - 0.3 * scale)], INK, 1,
                     dashed=True)
        picture.text(left - 8, base - 0.3 * scale + 4, "0.3 s", "end", size=11)
        sums = [sum(seconds for _, seconds in times) for times in batches]
        full = sums[:-1] if quota_s else sums
        picture.text(left, 20, "quota 0.3 s: cut by binary search" if quota_s else
                     "no quota: one request a batch", size=13)
        picture.text(left, base + 18, f"max / avg {max(full) / (sum(full) / len(full)):.2f}"
                     + (" but for the last" if quota_s else ""), size=12)
    picture.text(50, 242, "attention time of successive batches; one colour a request", fill=GREY,
                 size=11)
    return picture


def recompute():
    """Finish of a prefill by how much of a hit of 320 blocks is loaded."""
    model = AttentionModel(per_pair_s=2e-9)
    rule = LoadOrRecompute(model, linear_s_per_token=1e-4, block_tokens=BLOCK)
    hit, miss = 320 * BLOCK, 400
    cases = [("both sides are free: all", [Lane(0, 30_000.0), Lane(0, 30_000.0)], 0.0),
             ("long reading queue: none", [Lane(3.1, 30_000.0)], 0.0),
             ("slow store, busy engine: what is free", [Lane(0, 6_000.0)], 1.4)]
    picture = Drawing(640, 280, "Load or recompute")
    left, base, across, up = 50, 235, 560 / hit, 190 / 6.6
    for number, (label, lanes, busy_s) in enumerate(cases):
        ends = [(n, max(level(lanes, n), busy_s) + model(n, hit + miss - n)
                 + rule.linear_s_per_token * (hit + miss - n)) for n in range(0, hit + 1, BLOCK)]
        picture.line([(left + n * across, base - s * up) for n, s in ends], COLOURS[number], 2)
        best = rule.choose(hit, miss, lanes, busy_s)
        picture.dot(left + best.num_tokens * across, base - best.finish_s * up, COLOURS[number])
        picture.box(left + 225, 15 + number * 18, 10, 10, COLOURS[number])
        picture.text(left + 240, 25 + number * 18, f"{label} ({best.num_tokens // BLOCK} blocks)")
    picture.line([(left, 30), (left, base), (left + 560, base)])
    for seconds in range(1, 7):
        picture.text(left - 8, base - seconds * up + 4, f"{seconds} s", "end", size=11)
    for blocks in range(0, 321, 80):
        picture.text(left + blocks * BLOCK * across, base + 16, str(blocks), "middle", size=11)
    picture.text(left, base + 36, "blocks of the hit that are loaded; up: when the prefill ends",
                 fill=GREY, size=11)
    return picture


def figures() -> dict:
    """File name -> SVG text."""
    titles = {"pe": "pe: the prefill side reads",
              "round_robin": "round_robin: the sides take turns",
              "shorter_queue": "shorter_queue: the side with the shorter reading queue",
              "split": "split: both sides, finishing together",
              "any_node": "any_node: idle nodes lend their storage NIC"}
    made = {f"policy_{name}.svg": storage_nics(name, title) for name, title in titles.items()}
    made |= {"policy_push.svg": push(), "quota.svg": quota(), "recompute.svg": recompute()}
    return {name: str(picture) for name, picture in made.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, svg in figures().items():
        (FOLDER / file_name).write_text(svg, encoding="utf-8")
