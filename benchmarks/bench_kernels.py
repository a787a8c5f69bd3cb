"""``tiled`` against the attention call that one would write: causal, 8 heads of 192/128, forward and backward.

Each side gets the layout it is at home in. PyTorch's call is left as a user would write it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from laga_core.kernels import attention

from . import floor
from .harness import Comparison, faster, smaller

HEADS, DIM, DIM_V = 8, 192, 128
WANTED = {torch.float32: 2.0, torch.bfloat16: 4.0}


def compare() -> Iterator[Comparison]:
    for seq, repeats in ((2048, 9), (8192, 3)):
        for dtype, at_least in WANTED.items():
            name = f"seq {seq}, {str(dtype).removeprefix('torch.')}"
            if _free_bytes() < 6 * HEADS * seq * seq * 4:
                print(f"{name}: not enough free memory for PyTorch's side")
                continue
            ours, theirs = _tiled(seq, dtype), _sdpa(seq, dtype)
            yield smaller(f"tiled, SDPA: peak extra memory, {name}", ours, theirs, at_most=0.25)
            least = floor.attention(seq, HEADS, DIM, DIM_V, dtype)
            took = f"tiled, SDPA: time, {name}"
            yield faster(took, ours, theirs, least, at_least=at_least, repeats=repeats, seconds=40)


def _tiled(seq: int, dtype: torch.dtype) -> Callable[[], object]:
    q, k, v, dout = _tensors(dtype, lambda dim: (1, seq, HEADS, dim))
    return lambda: torch.autograd.grad(
        attention(q, k, v, scale=DIM**-0.5, causal=True, kernel="tiled"), (q, k, v), dout
    )


def _sdpa(seq: int, dtype: torch.dtype) -> Callable[[], object]:
    q, k, v, dout = _tensors(dtype, lambda dim: (1, HEADS, seq, dim))
    return lambda: torch.autograd.grad(scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), dout)


def _tensors(dtype: torch.dtype, shape: Callable[[int], tuple[int, ...]]) -> list[Tensor]:
    q, k, v, dout = (torch.randn(shape(dim), dtype=dtype) for dim in (DIM, DIM, DIM_V, DIM_V))
    return [*(x.requires_grad_() for x in (q, k, v)), dout]


def _free_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 1 << 62
