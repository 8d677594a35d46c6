"""cuda_plan.c and cuda_choose.c, which need no driver, called from Python.

Copies are tuples (target, source, nbytes); rectangles, samples and costs are ctypes structures.
"""
import ctypes
from pathlib import Path

import cbuild

ROOT = Path(__file__).resolve().parents[2]
LOOP, BATCH, STRIDED, KERNEL = range(4)
H2H, H2D, D2H, D2D = range(4)
WAYS = ["loop", "batch", "strided", "kernel"]
PIECE_NBYTES = 16384                    # CUDA_PIECE_NBYTES
U32, U64, F64 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_double


class Copy(ctypes.Structure):
    _fields_ = [(name, U64) for name in ("target", "source", "nbytes")]


class Rect(ctypes.Structure):
    _fields_ = [(name, U64) for name in (
        "target", "source", "width", "rows", "slices", "target_pitch", "source_pitch",
        "target_step", "source_step")]


class Place(ctypes.Structure):
    _fields_ = [("at", U32), ("nbytes", U64)]


class Cost(ctypes.Structure):
    _fields_ = [("fixed_ns", F64), ("copy_ns", F64), ("row_ns", F64), ("byte_ns", F64),
                ("there", U32)]


class Shape(ctypes.Structure):
    _fields_ = [("kind", U32), ("copies", U32), ("rects", U32), ("rows", U32), ("nbytes", U64),
                ("aligned", ctypes.c_bool)]


class Sample(ctypes.Structure):
    _fields_ = [("calls", U32), ("rows", U32), ("width", U64)]


def array_of(copies):
    return (Copy * max(1, len(copies)))(*copies)


def tuples(array, count):
    return [(each.target, each.source, each.nbytes) for each in array[:count]]


class Plan:
    """The functions of both files, built into a library in `folder`."""

    def __init__(self, folder):
        sources = [ROOT / "kvio" / "_ext" / name for name in ("cuda_plan.c", "cuda_choose.c")]
        self.lib = ctypes.CDLL(cbuild.shared_library(
            Path(folder) / "libcuda_plan.so", sources, f"-I{ROOT}/include",
            f"-I{ROOT}/kvio/_ext", "-D_GNU_SOURCE", "-fvisibility=default"))
        self.lib.cuda_predict_ns.restype = F64
        self.lib.cuda_cost_of.restype = Cost
        self.lib.cuda_is_aligned.restype = ctypes.c_bool
        self.samples = list((Sample * 4).in_dll(self.lib, "cuda_samples"))[:3]
        self.strided_samples = list((Sample * 4).in_dll(self.lib, "cuda_strided_samples"))

    def coalesce(self, copies):
        array = array_of(copies)
        return tuples(array, self.lib.cuda_coalesce(array, len(copies)))

    def rects(self, copies, max_pitch, room=None):
        """The rectangles; None: there are more than `room` (len(copies)), and no more than that
        were written."""
        room = len(copies) if room is None else room
        out = (Rect * (room + 1))()
        out[room].width = 0xA5A5
        made = self.lib.cuda_rects(array_of(copies), len(copies), U64(max_pitch), out, room)
        assert made <= room and out[room].width == 0xA5A5
        return out[:made] if made or not copies else None

    def split(self, copies, room):
        """Lists of at most `room` pieces, one a call, until all is done."""
        array, place, out, calls = array_of(copies), Place(), (Copy * (room + 1))(), []
        while place.at < len(copies):
            out[room].nbytes = 0xA5A5
            made = self.lib.cuda_split(array, len(copies), ctypes.byref(place), out, room)
            assert made <= room and out[room].nbytes == 0xA5A5
            calls.append(tuples(out, made))
        return calls

    def is_aligned(self, copies):
        return self.lib.cuda_is_aligned(array_of(copies), len(copies))

    def choose(self, costs, shape):
        return self.lib.cuda_choose((Cost * 4)(*costs), ctypes.byref(shape))

    def predict_ns(self, cost, way, shape):
        return self.lib.cuda_predict_ns(ctypes.byref(cost), way, ctypes.byref(shape))

    def rule_of_thumb(self, there):
        """Costs where the ways of `there` can be taken."""
        costs = (Cost * 4)(*(Cost(there=way in there) for way in range(4)))
        self.lib.cuda_rule_of_thumb(costs)
        return list(costs)

    def cost_of(self, way, times):
        return self.lib.cuda_cost_of(way, (F64 * 4)(*times))

    def fewest(self, times):
        """`times`: pairs, one for each number of SMs."""
        flat = [ns for pair in times for ns in pair]
        return self.lib.cuda_fewest((F64 * len(flat))(*flat), len(times))


def places_of(rect):
    """What a rectangle copies, row by row, as cuMemcpy2DAsync and cuMemcpy3DAsync define it."""
    height = [step // pitch if rect.slices > 1 else 0 for step, pitch in
              ((rect.target_step, rect.target_pitch), (rect.source_step, rect.source_pitch))]
    return [(rect.target + (z * height[0] + y) * rect.target_pitch,
             rect.source + (z * height[1] + y) * rect.source_pitch, rect.width)
            for z in range(rect.slices) for y in range(rect.rows)]
