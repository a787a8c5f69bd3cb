"""What nothing can be quicker than: a step's matrix products alone, on operands that lie in cache, nothing in between.

Where the CPU has no instructions for a dtype the products are float32's, as everybody's are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from laga_core.kernels import products

Step = Callable[[], object]
_ROWS, _MATRICES = 512, 4  # of a tile


def attention(seq: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Step:
    """Forward and backward of causal attention, the masked half left out and scores formed again in backward."""
    rows = min(_ROWS, seq)
    wide, narrow, scores = ((_MATRICES, rows, n) for n in (dim, dim_v, rows))
    tiles = heads * (seq // rows) ** 2 // (2 * _MATRICES)

    q, k, v, dout, p = (torch.randn(n, dtype=_multiplied(dtype)) for n in (wide, wide, narrow, narrow, scores))
    pairs = ((q, k.mT), (p, v), (q, k.mT), (dout, v.mT), (p.mT, dout), (p, k), (p.mT, q))
    outs = [torch.bmm(a, b) for a, b in pairs]
    return lambda: [torch.bmm(a, b, out=out) for _ in range(tiles) for (a, b), out in zip(pairs, outs, strict=True)]


def projections(tokens: int, sizes: Iterable[tuple[int, int]], dtype: torch.dtype) -> Step:
    """Forward and backward of linear maps of ``sizes`` ``(features in, features out)``."""
    of = [
        tuple(torch.randn(shape, dtype=_multiplied(dtype)) for shape in ((tokens, n), (m, n), (tokens, m)))
        for n, m in sizes
    ]
    return lambda: [(x @ weight.T, dout @ weight, dout.T @ x) for x, weight, dout in of]


def both(*steps: Step) -> Step:
    """One after the other."""
    return lambda: [step() for step in steps]


def _multiplied(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if products.slow(torch.empty(0, dtype=dtype)) else dtype
