"""Attention as one writes it first: the whole score matrix, a softmax in the input's dtype, a product.

It holds one score matrix ``[batch, heads, s_q, s_k]`` for backward and three at the peak, as the paper's eager memory
shows. Operands are handed to the products contiguous and head-major, so that no library copies them out of sight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .products import matmul


def attend(
    q: Tensor | tuple[Tensor, ...], k: Tensor | tuple[Tensor, ...], v: Tensor, *, scale: float, causal: bool
) -> Tensor:
    """See :func:`laga_core.kernels.attention`; a tuple of q and k parts gives the sum of their score products."""
    q_parts, k_parts = (x if isinstance(x, tuple) else (x,) for x in (q, k))
    products = [_scores(q_part, k_part, scale) for q_part, k_part in zip(q_parts, k_parts, strict=True)]
    scores = sum(products[1:], products[0])  # [batch, heads, s_q, s_k]
    if causal:
        future = _future(scores)
        scores.masked_fill_(future, float("-inf"))
    probabilities = scores.softmax(dim=-1)
    return _weighted_values(probabilities, v)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    heads = q.shape[2]
    k = k.transpose(1, 2).contiguous()  # [batch, kv_heads, s_k, dim]
    q = (q * scale).transpose(1, 2).contiguous()  # [batch, heads, s_q, dim]
    if k.shape[1] == heads:
        return matmul(q, k.transpose(-1, -2))
    # One shared key: fold the heads into the rows of a single product rather than copy the key for each.
    product = matmul(q.flatten(1, 2), k.squeeze(1).transpose(-1, -2))  # [batch, heads * s_q, s_k]
    # As matmul itself does: a plain view could not be masked in place without two more score matrices in backward.
    return torch.ops.aten._unsafe_view(product, [*q.shape[:3], k.shape[2]])


def _weighted_values(probabilities: Tensor, v: Tensor) -> Tensor:
    heads = probabilities.shape[1]
    v = v.transpose(1, 2).contiguous()  # [batch, kv_heads, s_k, dim_v]
    if v.shape[1] == heads:
        out = matmul(probabilities, v)
    else:
        out = matmul(probabilities.flatten(1, 2), v.squeeze(1)).unflatten(1, (heads, -1))
    return out.transpose(1, 2)  # [batch, s_q, heads, dim_v]


def _future(scores: Tensor) -> Tensor:
    s_q, s_k = scores.shape[-2:]
    return torch.ones(s_q, s_k, dtype=torch.bool, device=scores.device).triu_(s_k - s_q + 1)
