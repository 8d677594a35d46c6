"""What the copy benchmark found: rows, what must be reached, a table in markdown, and a plot."""
import statistics
from typing import NamedTuple

SPAN = "{1:.{p}f} [{0:.{p}f}, {2:.{p}f}]"


def quartiles(values):
    if len(values) < 2:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def span(measured, digits):
    """Quartiles, as the tables show them: the median, then both others in brackets."""
    return SPAN.format(*measured, p=digits)


class Row(NamedTuple):
    """A way in a case. Tuples are (lower quartile, median, upper quartile) over the rounds;
    `of_ceiling` is made of ratios within a round."""
    machine: str
    direction: str
    pattern: str
    block: int
    count: int
    way: str
    rounds: int
    submit_us: tuple            # a block; of one contiguous copy: a call
    gb_per_s: tuple
    of_ceiling: tuple
    cpu_ms: float
    note: str

    def cells(self):
        return [self.direction, f"{self.block >> 10} KiB × {self.count:,}", self.pattern, self.way,
                span(self.submit_us, 3), span(self.gb_per_s, 2), span(self.of_ceiling, 3),
                f"{self.cpu_ms:.3g}", str(self.rounds), self.note]


HEAD = ["", "blocks", "order", "way", "submission, µs a block", "GB/s", "of the ceiling", "CPU ms",
        "rounds", "note"]


def rates(samples, nbytes):
    return [nbytes / sample.seconds / 1e9 for sample in samples]


def rows_of(machine, case, ways, samples, ceiling):
    """A row for each way; `ceiling` is the name of the one that the others are held against."""
    top, rows = rates(samples[ceiling], case.nbytes), []
    for way in ways:
        mine = samples[way.name]
        reached = rates(mine, case.nbytes)
        rows.append(Row(
            machine, case.direction, case.pattern, case.block, case.count, way.name, len(mine),
            quartiles([sample.submit_ns / 1e3 / way.calls for sample in mine]),
            quartiles(reached), quartiles([a / b for a, b in zip(reached, top)]),
            1e3 * statistics.median(sample.cpu_seconds for sample in mine), way.note()))
    return rows


class Claim(NamedTuple):
    """What must be reached, and what was. `wanted` None: only shown. `counts` False: what it ran
    on has no speed (a fake driver)."""
    what: str
    wanted: tuple | None        # (">=" or "<=", number)
    measured: tuple
    unit: str
    rounds: int
    counts: bool = True
    note: str = ""

    @property
    def verdict(self):
        if not self.counts:
            return "fake driver: no speed"
        if self.wanted is None:
            return ""
        relation, limit = self.wanted
        median = self.measured[1]
        return "met" if (median >= limit if relation == ">=" else median <= limit) else "MISSED"

    def cells(self):
        wanted = "" if self.wanted is None else f"{'≥' if self.wanted[0] == '>=' else '≤'} " \
            f"{self.wanted[1]:g} {self.unit}"
        return [self.what, wanted.strip(), f"{span(self.measured, 3)} {self.unit}".strip(),
                self.verdict, str(self.rounds), self.note]


AGAIN, SWEEP = " (again)", " SMs"        # how ways end that are no lines of a plot
NOT_DRAWN = AGAIN, SWEEP
CLAIM_HEAD = ["figure", "wanted", "measured", "", "rounds", "note"]


def ratio(a, b):
    """Quartiles of b's time over a's, round by round: over 1 where a is the faster one."""
    return quartiles([there.seconds / here.seconds for here, there in zip(a, b)])


def table(head, lines):
    """Markdown, padded so that it can be read as it stands."""
    widths = [max(map(len, column)) for column in zip(head, *lines)]
    rule = ["-" * width for width in widths]
    return ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in [head, rule, *lines]]


class CopyReport:
    """All that one session found. With a path the tables so far are there at any time: a session
    that is stopped loses nothing."""

    def __init__(self, path=None):
        self.path, self.rows, self.claims, self.notes = path, [], [], {}

    def add(self, rows):
        self.rows += rows
        self._write_tables()

    def claim(self, claim):
        self.claims.append(claim)
        self._write_tables()

    def note(self, name, why):
        """What could not be run, and why; each is told once."""
        self.notes.setdefault(name, why)

    def lines(self):
        """The report as lines of markdown."""
        lines = []
        for machine in dict.fromkeys(row.machine for row in self.rows):
            lines += [f"Copies on {machine}. Medians [quartiles] over the rounds; GB is 10⁹ bytes; "
                      "CPU of the whole process, all threads.", ""]
            lines += table(HEAD, [row.cells() for row in self.rows if row.machine == machine])
            lines.append("")
        if self.claims:
            lines += ["What must be reached:", "",
                      *table(CLAIM_HEAD, [claim.cells() for claim in self.claims]), ""]
        lines += [f"{name}: {why}" for name, why in self.notes.items()]
        return lines

    def finish(self):
        """The plot, beside the tables, where matplotlib is installed."""
        if self.path is not None and self.rows:
            try:
                self.plot(self.path.with_suffix(".svg"))
            except ImportError as missing:
                self.note("no plot", missing)
            self._write_tables()

    def _write_tables(self):
        if self.path is not None:
            self.path.write_text("\n".join(self.lines()) + "\n", encoding="utf-8")

    def plot(self, path):
        """GB/s and submission over the block size: of each size the largest count, one line a way;
        the ceiling dashed."""
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        curves = self._curves()
        panels = list(dict.fromkeys((machine, direction) for machine, direction, _ in curves))
        if not panels:
            return
        sizes = sorted({row.block / 1024 for rows in curves.values() for row in rows})
        figure, axes = pyplot.subplots(2, len(panels), squeeze=False, sharex=True,
                                       figsize=(6.4 * len(panels), 7.5), layout="constrained")
        colours = {way: f"C{i % 10}" for i, way in enumerate(
            way for way in dict.fromkeys(way for _, _, way in curves))}
        for (machine, direction, way), rows in curves.items():
            column = axes[:, panels.index((machine, direction))]
            is_ceiling = way.startswith("ceiling")
            style = {"linestyle": "--" if is_ceiling else "-", "marker": "o", "markersize": 3,
                     "color": "black" if is_ceiling else colours[way], "label": way}
            blocks = [row.block / 1024 for row in rows]
            column[0].plot(blocks, [row.gb_per_s[1] for row in rows], **style)
            if not is_ceiling:
                column[1].plot(blocks, [row.submit_us[1] for row in rows], **style)
        for (machine, direction), column in zip(panels, axes.T):
            column[0].set_title(f"{direction}: {machine}", fontsize=9)
            column[0].set_ylabel("GB/s")
            column[1].set_ylabel("submission, µs a block")
            column[1].set_yscale("log")
            column[1].set_xlabel("block, KiB")
            column[0].set_xscale("log", base=2)
            column[1].set_xticks(sizes, [f"{size:g}" for size in sizes])
            column[0].set_ylim(bottom=0)
            column[0].legend(fontsize=6)
        figure.savefig(path)
        pyplot.close(figure)

    def _curves(self):
        """{(machine, direction, way): rows by block size}, of scattered blocks."""
        largest = {}
        for row in self.rows:
            key = row.machine, row.direction, row.way, row.block
            if row.pattern == "scattered" and not row.way.endswith(NOT_DRAWN) and \
                    (key not in largest or row.count > largest[key].count):
                largest[key] = row
        curves = {}
        for (machine, direction, way, _), row in largest.items():
            curves.setdefault((machine, direction, way), []).append(row)
        return {key: sorted(rows, key=lambda row: row.block) for key, rows in curves.items()}
