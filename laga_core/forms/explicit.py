"""Explicit (the paper's B1, §3.2): build per-head keys and values, send them through all-to-alls."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..parallel import degree, gather_sequence, heads_to_sequence, sequence_to_heads
from ..rotary import Rotary
from .projections import Attend, Projections, join_key, keys_and_values


def explicit(
    mla: Projections,
    hidden: Tensor,
    rotary: Rotary,
    attend: Attend,
    group: ProcessGroup | None,
    *,
    key_rope: str,
    packed: bool,
) -> Tensor:
    """``[batch, seq/sp, hidden]`` to ``[batch, seq/sp, heads, v]``.

    ``key_rope="replicated"`` sends the rotary key once for each head, as the paper
    counts; ``"headless"`` sends it once to each rank. ``packed``: query, key and
    value (and the rotary key) share one all-to-all.
    """
    c = mla.config
    q = mla.query(hidden, rotary)  # [batch, seq/sp, heads, nope + rope]
    latent, k_rope = mla.latent(hidden, rotary)  # [.., seq/sp, kv_lora], [.., rope]
    up = mla.up_projection()
    k, v = keys_and_values(c, latent, up)  # [batch, seq/sp, heads, nope], [.., v]
    shared = key_rope == "headless"
    if not shared:
        k = join_key(k, k_rope)  # [batch, seq/sp, heads, nope + rope]

    if packed:
        q, k, v, *rest = _exchange([q, k, v], [k_rope] if shared else [], group)
        k = join_key(k, *rest) if shared else k.contiguous()
        q, v = q.contiguous(), v.contiguous()  # or all that arrived would stay alive
    else:
        q = sequence_to_heads(q, group)  # [batch, seq, heads/sp, nope + rope]
        k = sequence_to_heads(k, group)
        if shared:
            k = join_key(k, gather_sequence(k_rope, group))
        v = sequence_to_heads(v, group)  # [batch, seq, heads/sp, v]

    out = attend(q, k, v)
    return heads_to_sequence(out, group)


def _exchange(split: list[Tensor], shared: list[Tensor], group: ProcessGroup | None) -> list[Tensor]:
    """One all-to-all for several tensors: ``split`` ``[batch, seq/sp, heads, dim]`` over heads, ``shared``
    ``[batch, seq/sp, dim]`` to every rank. They arrive as views of one ``[batch, seq, ...]``."""
    sp = degree(group)
    parts = [x.unflatten(2, (sp, -1)).flatten(3) for x in split]  # [batch, seq/sp, sp, heads/sp * dim]
    parts += [x.unsqueeze(2).expand(-1, -1, sp, -1) for x in shared]
    packed = sequence_to_heads(torch.cat(parts, dim=-1), group).squeeze(2)
    arrived = packed.split([x.shape[-1] for x in parts], dim=-1)
    return [x.unflatten(-1, (-1, y.shape[-1])) for x, y in zip(arrived, split, strict=False)] + list(
        arrived[len(split) :]
    )
