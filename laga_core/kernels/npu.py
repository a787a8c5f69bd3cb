"""Ascend's fused attention, ``torch_npu.npu_fusion_attention``: memory-linear, and 192/128 goes in unpadded.

The limits checked here are those of its reference (Ascend op-plugin, docs/context/torch_npu-npu_fusion_attention.md).
``torch_npu`` is imported when the kernel is first used: without the CANN runtime it cannot be loaded.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch
from torch import Tensor

DEVICE = "npu"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_HEADS, _MAX_SEQUENCE = 256, 1 << 20
_MAX_DIM = 256  # documented to 768, but not shown to be right at absorbed MLA's 576/512
_RIGHT_DOWN_CAUSAL, _MASK = 3, 2048  # this sparse mode reads one small mask of a fixed size, whatever the sequence


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """See :func:`laga_core.kernels.attention`. Raises ``ValueError`` for what :func:`problem` names."""
    reason = problem(q, k, v)
    if reason:
        raise ValueError(f"kernel 'npu' cannot do this: {reason}; use kernel='tiled', or 'auto' to have one chosen")
    mask = {}
    if causal:
        mask = {"atten_mask": _causal_mask(q.device), "sparse_mode": _RIGHT_DOWN_CAUSAL}
        mask |= {"pre_tockens": k.shape[1], "next_tockens": 0}  # as the operator spells them
    operator = importlib.import_module("torch_npu").npu_fusion_attention
    return operator(q, k, v, head_num=q.shape[2], input_layout="BSND", scale=scale, **mask)[0]


def problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why the operator cannot take these tensors; ``None`` where it can. A shared key is its grouped-query case."""
    heads, dim, dim_v = q.shape[2], q.shape[3], v.shape[3]
    if q.device.type != DEVICE:
        return f"the tensors are on {q.device.type}, not on an Ascend NPU"
    if q.dtype not in _DTYPES:
        return f"it takes float16, bfloat16 and float32, not {str(q.dtype).removeprefix('torch.')}"
    if dim_v > dim:
        return f"the value's head size {dim_v} must not exceed the key's {dim}"
    if dim > _MAX_DIM:
        return f"head sizes {dim}/{dim_v} are above {_MAX_DIM}, where the operator has not been shown to be right"
    if heads > _MAX_HEADS:
        return f"it takes up to {_MAX_HEADS} heads, not {heads}"
    if max(q.shape[1], k.shape[1]) > _MAX_SEQUENCE:
        return f"it takes up to {_MAX_SEQUENCE} positions, not {max(q.shape[1], k.shape[1])}"
    return None


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu_(1)  # True: not seen
