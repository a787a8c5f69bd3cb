"""Scaled dot-product attention for any head sizes: one call, several kernels, and the choice among them.

On CUDA the vendor's kernel is PyTorch's ``scaled_dot_product_attention``. Among those it picks from, the
memory-efficient one takes a value narrower than the key, 192/128 and 576/512, on any GPU, and cuDNN's takes 192/128 on
Hopper and Blackwell (PyTorch's ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``). FlexAttention would take them
as well (pytorch/pytorch#134043). It is left out: it is compiled for every new shape, its default tiles do not fit into
shared memory at 576/512, and what it offers beyond the others, masks of any kind, is not needed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import eager, npu, sdpa, tiled

Parts = Tensor | tuple[Tensor, ...]
Kernel = Callable[..., Tensor]

KERNELS: dict[str, Kernel] = {
    "eager": eager.attend,
    "tiled": tiled.attend,
    "sdpa": sdpa.attend,
    "npu": npu.attend,
}
PROBLEMS: dict[str, Callable[[Tensor, Tensor, Tensor], str | None]] = {"npu": npu.problem}
"""Of kernels that do not take every query, key and value: why not these, ``None`` where they do."""

_log = logging.getLogger(__name__)
_said: set[str] = set()


class Choice(NamedTuple):
    """What ``kernel="auto"`` runs, and why in words."""

    kernel: str
    reason: str


def check_kernel(name: str) -> None:
    """Raise ``ValueError`` listing the known kernels unless ``name`` is one, or ``"auto"``."""
    if not isinstance(name, str) or name not in (*KERNELS, "auto"):
        raise ValueError(f"unknown kernel {name!r}; known: {', '.join(KERNELS)}, auto")


def attention(
    q: Parts,
    k: Parts,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    kernel: str = "eager",
    explain: Callable[[str], object] | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` for each head.

    q ``[batch, s_q, heads, dim]``, k ``[batch, s_k, kv_heads, dim]``, v ``[batch, s_k, kv_heads, dim_v]`` with
    kv_heads equal to heads, or 1 for a key and value shared by all heads; returns ``[batch, s_q, heads, dim_v]``.
    Causal masking is aligned at the end: query i sees keys up to ``i + s_k - s_q``. q and k may be tuples of parts
    whose products are summed: the eager kernel forms them one by one, the others join the parts first.

    ``kernel="auto"`` takes :func:`choose`'s; ``explain`` is called with that choice in words (``explain=print``), and
    each new choice is logged once.

    Raises ``ValueError`` for an unknown kernel, shapes that do not fit together, or a kernel that cannot do the sizes.
    """
    check_kernel(kernel)
    _check_shapes(q, k, v, causal)
    if kernel == "eager":
        return eager.attend(q, k, v, scale=scale, causal=causal)
    q, k = _joined(q), _joined(k)
    if kernel == "auto":
        choice = choose(q, k, v, causal=causal)
        kernel = choice.kernel
        sentence = f"attention kernel: {kernel} ({choice.reason})"
        if explain is not None:
            explain(sentence)
        if sentence not in _said:
            _said.add(sentence)
            _log.info(sentence)
    return KERNELS[kernel](q, k, v, scale=scale, causal=causal)


def choose(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Choice:
    """The kernel for these tensors: the device's own where it takes them in linear memory, otherwise ``tiled``."""
    device, sizes = q.device.type, f"{q.shape[3]}/{v.shape[3]}"
    if device == npu.DEVICE:
        problem = npu.problem(q, k, v)
        return Choice("tiled", problem) if problem else Choice("npu", f"the NPU's fused attention takes {sizes}")
    if device == "cpu":
        return Choice("tiled", "on a CPU it is the fastest in linear memory")
    backend = sdpa.fused_backend(q, k, v, causal=causal)
    if backend is None:
        return Choice("tiled", f"no fused kernel of PyTorch on {device} takes head sizes {sizes} in {q.dtype}")
    return Choice("sdpa", f"PyTorch's {backend} kernel takes head sizes {sizes} on {device}")


def _joined(parts: Parts) -> Tensor:
    return torch.cat(parts, dim=-1) if isinstance(parts, tuple) else parts


def _check_shapes(q: Parts, k: Parts, v: Tensor, causal: bool) -> None:
    q_parts, k_parts = (x if isinstance(x, tuple) else (x,) for x in (q, k))
    shapes = ", ".join(f"{name} {[list(x.shape) for x in xs]}" for name, xs in (("q", q_parts), ("k", k_parts)))
    shapes = f"{shapes}, v {list(v.shape)}"
    tensors = (*q_parts, *k_parts, v)
    if not q_parts or len(q_parts) != len(k_parts) or any(x.dim() != 4 for x in tensors):
        raise ValueError(f"attention takes q, k and v of four dimensions, [batch, s, heads, dim], got {shapes}")
    batch, s_q, heads, _ = q_parts[0].shape
    s_k, kv_heads = v.shape[1:3]
    same = all(x.shape[:3] == (batch, s_q, heads) for x in q_parts) and all(
        x.shape[:3] == (batch, s_k, kv_heads) for x in (*k_parts, v)
    )
    if not same or any(a.shape[3] != b.shape[3] for a, b in zip(q_parts, k_parts, strict=True)):
        raise ValueError(f"attention: shapes do not fit together: {shapes}")
    if kv_heads not in (1, heads):
        raise ValueError(f"attention: k and v need {heads} heads or 1, got {kv_heads} ({shapes})")
    if any(0 in x.shape for x in tensors):
        raise ValueError(f"attention: an empty tensor among {shapes}")
    if causal and s_q > s_k:
        raise ValueError(f"causal attention needs at least as many keys as queries, got {s_q} queries and {s_k} keys")
    if any(x.dtype != v.dtype or x.device != v.device for x in tensors):
        raise ValueError(f"attention: dtypes and devices differ: {[(str(x.dtype), str(x.device)) for x in tensors]}")


__all__ = ["KERNELS", "PROBLEMS", "Choice", "Kernel", "Parts", "attention", "check_kernel", "choose"]
