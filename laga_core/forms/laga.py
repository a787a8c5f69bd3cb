"""Laga (the paper's algorithm 1): gather the latent, rebuild keys and values here for this rank's heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..parallel import gather_sequence, heads_to_sequence, sequence_to_heads
from ..rotary import Rotary
from .projections import Attend, Projections, join_key, keys_and_values, local_heads


def laga(
    mla: Projections,
    hidden: Tensor,
    rotary: Rotary,
    attend: Attend,
    group: ProcessGroup | None,
) -> Tensor:
    """``[batch, seq/sp, hidden]`` to ``[batch, seq/sp, heads, v]``."""
    c = mla.config
    q = mla.query(hidden, rotary)  # [batch, seq/sp, heads, nope + rope]
    latent, k_rope = mla.latent(hidden, rotary)  # [.., seq/sp, kv_lora], [.., rope]

    q = sequence_to_heads(q, group)  # [batch, seq, heads/sp, nope + rope]
    gathered = gather_sequence(torch.cat((latent, k_rope), dim=-1), group)
    sizes = [c.kv_lora_rank, c.qk_rope_head_dim]
    latent, k_rope = gathered.split(sizes, dim=-1)  # [.., seq, kv_lora], [.., rope]

    up = local_heads(mla, group)  # [heads/sp, nope + v, kv_lora]
    k, v = keys_and_values(c, latent, up)  # [batch, seq, heads/sp, nope], [.., v]
    k = join_key(k, k_rope)  # [batch, seq, heads/sp, nope + rope]
    v = v.contiguous()  # or the product of k and v would stay alive through it
    out = attend(q, k, v)
    return heads_to_sequence(out, group)
