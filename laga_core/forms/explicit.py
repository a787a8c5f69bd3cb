"""Explicit (the paper's B1, §3.2): build per-head keys and values, send them through all-to-alls."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from ..parallel import gather_sequence, heads_to_sequence, sequence_to_heads
from ..rotary import Rotary
from .projections import Attend, Projections, join_key, keys_and_values


def explicit(
    mla: Projections, hidden: Tensor, rotary: Rotary, attend: Attend, group: ProcessGroup | None, *, key_rope: str
) -> Tensor:
    """``[batch, seq/sp, hidden]`` to ``[batch, seq/sp, heads, v]``.

    ``key_rope="replicated"`` sends the rotary key once for each head, as the paper counts; ``"headless"`` gathers it.
    """
    q = mla.query(hidden, rotary)  # [batch, seq/sp, heads, nope + rope]
    latent, k_rope = mla.latent(hidden, rotary)  # [batch, seq/sp, kv_lora], [batch, seq/sp, rope]
    k, v = keys_and_values(mla, latent, mla.up_projection())  # [batch, seq/sp, heads, nope], [.., v]

    q = sequence_to_heads(q, group)  # [batch, seq, heads/sp, nope + rope]
    if key_rope == "replicated":
        k = sequence_to_heads(join_key(k, k_rope), group)
    else:
        k = join_key(sequence_to_heads(k, group), gather_sequence(k_rope, group))
    v = sequence_to_heads(v, group)  # [batch, seq, heads/sp, v]

    out = attend(q, k, v)
    return heads_to_sequence(out, group)
