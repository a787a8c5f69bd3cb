"""Matrix products in half precision, also on a CPU that has no instructions for them.

There PyTorch multiplies bfloat16 and float16 number by number, up to a hundred times slower than float32. So there the
operands are widened, one matrix at a time, multiplied in float32, and the result is rounded once, as the instructions
would do it. What is kept for backward stays as it is. Anywhere else these are PyTorch's own products.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_ASK = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def on_cpu(x: Tensor) -> bool:
    """Whether ``x`` is on a CPU; asked here alone, so that a simulation can answer for the device it stands for."""
    return x.device.type == "cpu"


def slow(x: Tensor) -> bool:
    """Whether products in the dtype of ``x`` are quicker in float32: half precision on a CPU without instructions."""
    return on_cpu(x) and x.dtype in _ASK and not has_instructions(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x w^T``: ``[..., n]`` by ``[m, n]`` to ``[..., m]``."""
    if not slow(x):
        return nn.functional.linear(x, weight)
    return matmul(x.reshape(-1, x.shape[-1]), weight.T).view(*x.shape[:-1], len(weight))


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a b``: ``[..., n, k]`` by ``[..., k, m]`` with the same leading dimensions."""
    return _Widened.apply(a, b) if slow(a) else a @ b


class Linear(nn.Linear):
    """``nn.Linear`` by :func:`linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        out = linear(x, self.weight)
        return out if self.bias is None else out + self.bias


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product(a, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wants_a, wants_b = ctx.needs_input_grad
        return _product(dout, b.mT) if wants_a else None, _product(a.mT, dout) if wants_b else None


@torch.autocast("cpu", enabled=False)
def _product(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(*a.shape[:-1], b.shape[-1])
    _multiply(out, a, b)
    return out


def _multiply(out: Tensor, a: Tensor, b: Tensor) -> None:
    if out.dim() > 2:
        for each in zip(out, a, b, strict=True):
            _multiply(*each)
    else:
        wide = torch.promote_types(a.dtype, torch.float32)
        out.copy_(torch.mm(a.to(wide), b.to(wide)))


@cache
def has_instructions(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies a half-precision dtype: as oneDNN says, by which PyTorch does."""
    return torch.backends.mkldnn.is_available() and bool(getattr(torch.ops.mkldnn, _ASK[dtype])())
