"""Scaled dot-product attention for any head sizes: one call, several kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from . import eager

Parts = Tensor | tuple[Tensor, ...]
Kernel = Callable[..., Tensor]

KERNELS: dict[str, Kernel] = {"eager": eager.attend}


def check_kernel(name: str) -> None:
    """Raise ``ValueError`` listing the known kernels unless ``name`` is one."""
    if name not in KERNELS:
        raise ValueError(f"unknown kernel {name!r}; known: {', '.join(KERNELS)}")


def attention(q: Parts, k: Parts, v: Tensor, *, scale: float, causal: bool, kernel: str = "eager") -> Tensor:
    """``softmax(scale * q k^T) v`` for each head.

    q ``[batch, s_q, heads, dim]``, k ``[batch, s_k, kv_heads, dim]``, v ``[batch, s_k, kv_heads, dim_v]`` with
    kv_heads equal to heads, or 1 for a key and value shared by all heads; returns ``[batch, s_q, heads, dim_v]``.
    Causal masking is aligned at the end: query i sees keys up to ``i + s_k - s_q``. q and k may be tuples of parts
    whose products are summed, which only the eager kernel takes.

    Raises ``ValueError`` for an unknown kernel, shapes that do not fit together, or a kernel that cannot do the sizes.
    """
    check_kernel(kernel)
    return KERNELS[kernel](q, k, v, scale=scale, causal=causal)
