"""A kernel for simulation only: what any fused kernel keeps and returns, and nothing besides.

FlashAttention and its like keep q, k, v, their output and one float32 a row. What a vendor's needs on top while it runs
(padded heads, float32 sums of dq, a copy of shared keys for each head) differs from one to the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """See :func:`laga_core.kernels.attention`; nothing is computed."""
    return _Fused.apply(q, k, v)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:3], v.shape[-1])
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk = torch.empty_like(k, memory_format=torch.contiguous_format)
        dv = torch.empty_like(v, memory_format=torch.contiguous_format)
        return dq, dk, dv
