"""Absorbed (the paper's B2, §3.2): gather the latent and attend in it, the up-projection folded into the query."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..kernels.products import matmul
from ..parallel import gather_sequence, heads_to_sequence, sequence_to_heads
from ..rotary import Rotary
from .projections import Attend, Projections, local_heads


def absorbed(
    mla: Projections,
    hidden: Tensor,
    rotary: Rotary,
    attend: Attend,
    group: ProcessGroup | None,
    *,
    score: str,
) -> Tensor:
    """``[batch, seq/sp, hidden]`` to ``[batch, seq/sp, heads, v]``.

    ``score="joint"`` forms one product over the latent and the rotary band together;
    ``"split"`` forms two score matrices and adds them, as the paper's memory
    implies.
    """
    c = mla.config
    q = mla.query(hidden, rotary)  # [batch, seq/sp, heads, nope + rope]
    latent, k_rope = mla.latent(hidden, rotary)  # [.., seq/sp, kv_lora], [.., rope]

    q = sequence_to_heads(q, group)  # [batch, seq, heads/sp, nope + rope]
    gathered = gather_sequence(torch.cat((latent, k_rope), dim=-1), group)
    key = gathered.unsqueeze(2)  # [batch, seq, 1, kv_lora + rope]
    up = local_heads(mla, group)  # [heads/sp, nope + v, kv_lora]
    up_k, up_v = up.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)

    q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
    q_absorbed = _each_head(q_nope, up_k)  # [batch, seq, heads/sp, kv_lora]
    value = key[..., : c.kv_lora_rank]  # [batch, seq, 1, kv_lora]
    if score == "joint":
        q_absorbed = torch.cat((q_absorbed, q_rope), dim=-1)  # [.., kv_lora + rope]
        accumulator = attend(q_absorbed, key, value)
    else:
        keys = (value, key[..., c.kv_lora_rank :])
        accumulator = attend((q_absorbed, q_rope), keys, value)
    out = _each_head(accumulator, up_v.transpose(1, 2))  # [batch, seq, heads/sp, v]
    return heads_to_sequence(out, group)


def _each_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``[batch, s, heads', n]`` by one ``[n, m]`` matrix a head: ``[heads', n, m]``."""
    rows = x.permute(2, 0, 1, 3).flatten(1, 2)  # [heads', batch * s, n], a view: backward keeps no copy
    product = matmul(rows, weight)  # [heads', batch * s, m]
    return product.unflatten(1, x.shape[:2]).permute(1, 2, 0, 3)  # [batch, s, heads', m]
