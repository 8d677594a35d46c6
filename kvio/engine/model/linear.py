"""Matrix products whose speed and, on request, whose bits do not depend on the number of rows.

Why the weights are cut into blocks. OpenBLAS repacks a whole weight matrix at every call with
2..16 rows, and that costs more than the product. Its AVX-512 kernels for small products
(m * n * k <= 10^6) do not pack, so with blocks of at most 288 x 384 a decode step of a few rows
only streams the weights once (1536 x 576 with 4 rows: 0.65 ms whole, 0.22 ms in blocks); prefill
loses about 5 %.

Why 288 deep. A deeper product is summed in pieces that differ from kernel to kernel. Up to 288
every AVX-512 kernel adds one product after another, so one row gives the same bits alone (padded
to two: one row alone would be a gemv) and among hundreds. AVX2 kernels do not behave so; exact mode
finds that out by a self-check, and computes 16-row tiles there.
"""
import functools

import numpy as np

MAX_DEPTH = 288         # of a weight block
MAX_WIDTH = 384
MAX_ROWS = 512          # in one product of exact mode: as many as the self-check covers
TILE = 16               # rows of a tile where rows are not invariant


class Linear:
    """y = x @ w for float32 rows x[n, depth]; w is kept as blocks [depth pieces][width pieces].

    weight: float32 [depth, width]. In exact mode the bits of a row of y depend on the row of x and
    its position alone: not on n, nor on the rows around it.
    """

    def __init__(self, weight, exact=False):
        self.depth, self.width = weight.shape
        self._exact = exact
        self._step = _divisor(self.width, MAX_WIDTH)
        depth = _divisor(self.depth, MAX_DEPTH)
        self._cuts = [slice(a, min(a + depth, self.depth)) for a in range(0, self.depth, depth)]
        self._blocks = [np.ascontiguousarray(       # each [num_blocks, depth, step]
            weight[cut].reshape(-1, self.width // self._step, self._step).transpose(1, 0, 2),
            np.float32) for cut in self._cuts]
        self._tiled = exact and not all(rows_invariant(*block.shape[1:])
                                        for block in self._blocks)

    def __call__(self, x, positions):
        """x[n, depth] at absolute `positions` (int[n], or any sequence of n) -> y[n, width]."""
        n = x.shape[0]
        if not self._exact or (2 <= n <= MAX_ROWS and not self._tiled):
            return self._product(x)
        y = np.empty((n, self.width), np.float32)
        if self._tiled:
            for a, b in _tile_cuts(positions):
                row = positions[a] % TILE
                tile = np.zeros((TILE, self.depth), np.float32)
                tile[row:row + b - a] = x[a:b]
                y[a:b] = self._product(tile)[row:row + b - a]
            return y
        for a in range(0, n, MAX_ROWS):
            rows = x[a:a + MAX_ROWS]
            padded = np.concatenate([rows, np.zeros_like(rows)]) if len(rows) == 1 else rows
            y[a:a + MAX_ROWS] = self._product(padded)[:len(rows)]
        return y

    def columns(self, ids):
        """The columns `ids` (int[n]) of w, as rows: float32 [n, depth]."""
        out = np.empty((len(ids), self.depth), np.float32)
        for cut, blocks in zip(self._cuts, self._blocks):
            out[:, cut] = blocks[ids // self._step, :, ids % self._step]
        return out

    def _product(self, x):
        y = np.empty((x.shape[0], self.width), np.float32)
        # one call: numpy walks the blocks in C, and BLAS writes each product into its columns
        np.matmul(x[:, self._cuts[0]], self._blocks[0], out=self._by_block(y))
        if len(self._cuts) > 1:
            part = np.empty_like(y)
            for cut, blocks in zip(self._cuts[1:], self._blocks[1:]):
                np.matmul(x[:, cut], blocks, out=self._by_block(part))
                y += part
        return y

    def _by_block(self, y):
        """y[n, width] seen as [num_blocks, n, step]."""
        return y.reshape(y.shape[0], -1, self._step).transpose(1, 0, 2)


@functools.lru_cache(maxsize=None)
def rows_invariant(depth, width):
    """Does this BLAS give a row the same bits in every product of 2..MAX_ROWS rows?

    An experiment on random numbers: every small row count, a sample of the larger ones, and several
    offsets, so that each row meets the main part and the remainder of a kernel.
    """
    rng = np.random.default_rng(depth * 1009 + width)
    x = rng.standard_normal((MAX_ROWS, depth), dtype=np.float32)
    w = rng.standard_normal((depth, width), dtype=np.float32)
    y = x @ w
    for rows in (*range(2, 36), 47, 64, 65, 97, 128, 200, 255, 256, 384, MAX_ROWS - 9):
        for a in (0, 1, 7):
            if not np.array_equal(x[a:a + rows] @ w, y[a:a + rows]):
                return False
    return True


def _divisor(n, limit):
    """The largest divisor of n up to `limit`; n itself where that would cut it too finely."""
    best = max(d for d in range(1, min(n, limit) + 1) if n % d == 0)
    return best if best * 8 >= min(n, limit) else n


def _tile_cuts(positions):
    """(a, b) row ranges of consecutive positions that stay within one tile."""
    n, cuts, a = len(positions), [], 0
    for i in range(1, n + 1):
        if i == n or positions[i] != positions[i - 1] + 1 or positions[i] % TILE == 0:
            cuts.append((a, i))
            a = i
    return cuts
