"""Causal attention of a run of new tokens over one layer's working cache."""
import numpy as np

GROUP = 64              # queries handled together; they share a number of keys, a multiple of it
EXACT_TILE = 4          # queries in one matrix product of exact mode

_FUTURE = np.triu(np.full((GROUP, GROUP), -np.inf, np.float32), 1)


def attend(q, position, kv, exact):
    """Attention of queries at positions `position`.. over the keys and values up to each.

    q: float32 [n, num_heads, head_dim], rotated and scaled. kv: float32 [capacity, 2,
    num_kv_heads, head_dim], capacity a multiple of 64. Rows past the last query are masked, yet
    must be finite. Returns float32 [n, num_heads * head_dim].

    Queries are cut at absolute multiples of 64 and keys padded to the same border. In exact mode
    the products are cut again, at multiples of 4, and filled up with zeros, so a position meets the
    same shapes whether it is decoded, or prefilled alone or among others.
    """
    n = q.shape[0]
    out = np.empty((n, q.shape[1] * q.shape[2]), np.float32)
    a = 0
    while a < n:
        first = position + a
        b = min(n, a + GROUP - first % GROUP)
        if exact:
            low = first // EXACT_TILE * EXACT_TILE
            high = -(-(position + b) // EXACT_TILE) * EXACT_TILE
            rows = np.zeros((high - low, *q.shape[1:]), np.float32)
            rows[first - low:position + b - low] = q[a:b]
            y = _attend_group(rows, low, kv, EXACT_TILE)
            out[a:b] = y[first - low:position + b - low]
        else:
            out[a:b] = _attend_group(q[a:b], first, kv, b - a)
        a = b
    return out


def _attend_group(q, first, kv, tile):
    """Queries q[rows, heads, head_dim] at `first`.., within one group; rows a multiple of tile."""
    rows, heads, dim = q.shape
    groups = kv.shape[2]
    num_tiles, share = rows // tile, heads // groups
    keys = (first // GROUP + 1) * GROUP
    # [tiles, kv heads, share * tile, dim]: the query heads of one kv head are rows of one product
    q = q.reshape(num_tiles, tile, groups, share, dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(num_tiles, groups, share * tile, dim)
    s = np.matmul(q, kv[:keys, 0].transpose(1, 2, 0))
    s = s.reshape(num_tiles, groups, share, tile, keys)
    mask = _FUTURE[first % GROUP:first % GROUP + rows].reshape(num_tiles, 1, 1, tile, GROUP)
    s[..., keys - GROUP:] += mask
    s -= s.max(-1, keepdims=True)
    np.exp(s, out=s)
    total = s.sum(-1)
    y = np.matmul(s.reshape(num_tiles, groups, share * tile, keys),
                  kv[:keys, 1].transpose(1, 0, 2))
    y = y.reshape(num_tiles, groups, share, tile, dim)
    y /= total[..., None]
    return y.transpose(0, 3, 1, 2, 4).reshape(rows, heads * dim)
