"""What a step cannot go below: its matrix products alone, nothing in between.

Operands lie as the libraries like them, results go to memory that is there, and the quicker of PyTorch's two routes on
a CPU is taken. Where it has no instructions for a dtype the products are float32's, as everybody's are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from laga_core.kernels import products

Step = Callable[[], object]
_ROWS, _MATRICES = 512, 4  # of a tile


def attention(seq: int, heads: int, dim: int, dim_v: int, dtype: torch.dtype) -> Step:
    """Forward and backward of causal attention, the masked half left out and scores formed again in backward."""
    rows = min(_ROWS, seq)
    tiles = heads * (seq // rows) ** 2 // (2 * _MATRICES)
    scores, by_value = [(dim, rows)] * 2 + [(dim_v, rows)], [(rows, dim_v)] * 2
    sizes = [*scores, *by_value, *[(rows, dim)] * 2]
    return _multiply([(_MATRICES, rows, inner, columns) for inner, columns in sizes], tiles, dtype)


def projections(tokens: int, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> Step:
    """Forward and backward of linear maps of ``sizes`` ``(features in, features out)``."""
    each = [((1, tokens, n, m), (1, tokens, m, n), (1, m, tokens, n)) for n, m in sizes]
    return _multiply([shape for three in each for shape in three], 1, dtype)


def both(*steps: Step) -> Step:
    """One after the other."""
    return lambda: [step() for step in steps]


def _multiply(shapes: Sequence[tuple[int, int, int, int]], times: int, dtype: torch.dtype) -> Step:
    """Products ``[count, rows, inner] [count, columns, inner]^T``, each so many ``times``."""
    if products.slow(torch.empty(0, dtype=dtype)):
        dtype = torch.float32
    operands = [
        (torch.randn(count, rows, inner, dtype=dtype), torch.randn(count, columns, inner, dtype=dtype))
        for count, rows, inner, columns in shapes
    ]
    outs = [torch.bmm(a, b.mT) for a, b in operands]

    def by_bmm() -> None:
        for _ in range(times):
            for (a, b), out in zip(operands, outs, strict=True):
                torch.bmm(a, b.mT, out=out)

    def by_onednn() -> None:
        for _ in range(times):
            for a, b in operands:
                for x, y in zip(a, b, strict=True):
                    torch.ops.mkldnn._linear_pointwise(x, y, None, "none", [], "")

    return min((by_bmm, by_onednn), key=_seconds) if torch.backends.mkldnn.is_available() else by_bmm


def _seconds(step: Step) -> float:
    step()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
