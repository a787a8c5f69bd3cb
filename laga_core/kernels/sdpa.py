"""PyTorch's own ``scaled_dot_product_attention``, which picks a fused kernel where it has one for the sizes.

It always gives the right answer, but holds the whole score matrix where no fused kernel fits: on a CPU whenever the
head sizes of key and value differ, as MLA's 192/128 do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """See :func:`laga_core.kernels.attention`."""
    q, k, v, mask, aligned = _arguments(q, k, v, causal)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=aligned, scale=scale)
    return out.transpose(1, 2)  # [batch, s_q, heads, dim_v]


def fused_backend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> str | None:
    """The fused kernel :func:`attend` would run, by name; ``None`` where it would hold the whole score matrix."""
    q, k, v, mask, aligned = _arguments(q, k, v, causal)
    choice = SDPBackend(torch._fused_sdp_choice(q, k, v, attn_mask=mask, is_causal=aligned))
    return None if choice in (SDPBackend.MATH, SDPBackend.ERROR) else choice.name.lower()


def _arguments(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
    heads, s_q, s_k = q.shape[2], q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, s, dim]
    k, v = (x.expand(-1, heads, -1, -1) for x in (k, v))
    if not causal or s_q == s_k:
        return q, k, v, None, causal
    # PyTorch aligns is_causal at the first position; ours at the last.
    mask = torch.ones(s_q, s_k, dtype=torch.bool, device=q.device).tril_(s_k - s_q)
    return q, k, v, mask, False
