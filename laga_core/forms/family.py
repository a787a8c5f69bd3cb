"""Laga made a family: heads × context, less to send, less to keep.

Every member gathers the latent and up-projects it where it is needed, as Laga does; with all options at their defaults
this is :func:`laga_core.forms.laga.laga`. The sp = U·R ranks lie as :mod:`laga_core.parallel.topology` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from ..config import MLAConfig, divisors
from ..parallel import (
    Topology,
    begin_gather,
    degree,
    gather_sequence,
    heads_to_sequence,
    sequence_to_heads,
    split_degree,
    topology,
)
from ..rotary import Rotary
from .laga import laga
from .projections import Attend, Projections, own_heads
from .rebuild import Own, Rebuild, attend, attend_and_forget


def family(
    mla: Projections,
    hidden: Tensor,
    rotary: Rotary,
    attention: Attend,
    group: ProcessGroup | None,
    *,
    context: int,
    layout: str,
    query: str,
    recompute: bool,
    head_chunk: int | None,
    overlap: bool,
) -> Tensor:
    """``[batch, seq/sp, hidden]`` to ``[batch, seq/sp, heads, v]``.

    ``context`` = R: queries stay split over R groups of ranks, between which only the latent crosses. ``layout`` says
    how the tokens lie over them (:mod:`laga_core.sharding`; the caller's ``attention`` follows it).
    ``query="latent"``: the query's latent is gathered with the key's, and up-projected for this rank's heads.
    ``recompute``: backward keeps the gathered latents and rebuilds the rest, ``head_chunk`` heads at a time.
    ``overlap``: the latent is on its way while the queries are projected and exchanged.
    """
    if context == 1 and query == "heads" and not (recompute or head_chunk or overlap):
        return laga(mla, hidden, rotary, attention, group)
    ranks = topology(group, context)
    # What the down-projections keep for backward is cheaper to make again from the hidden state.
    project = partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if recompute else _call
    q, latent = _exchange(mla, hidden, rotary, ranks, project, query, overlap)

    rank = 0 if group is None else dist.get_rank(group)
    first = rank // degree(ranks.within) * q.shape[1]  # of the tokens whose queries are here
    if attention.causal and not attention.tokens.in_order:
        latent = latent[:, attention.tokens.sorting.to(latent.device)]
    up = own_heads(mla.up_projection(), ranks.within)  # [heads/U, nope + v, kv_lora]
    up_q = own_heads(mla.query_up_projection(), ranks.within) if query == "latent" else None  # [heads/U, .., q_lora]
    plan = Rebuild(mla.config, attention, first, q.shape[1], head_chunk or len(up))
    if recompute:
        rows = rank * hidden.shape[1]  # the first of this rank's own tokens

        def own() -> tuple[Tensor | None, Tensor]:
            return mla.query_latent(hidden) if query == "latent" else None, torch.cat(
                mla.latent(hidden, rotary), dim=-1
            )

        return attend_and_forget(plan, q, latent, up, up_q, ranks.within, Own(own, rows, rows + hidden.shape[1]))
    return heads_to_sequence(attend(plan, q, latent, up, up_q), ranks.within)


def _exchange(
    mla: Projections,
    hidden: Tensor,
    rotary: Rotary,
    ranks: Topology,
    project: Callable[..., Any],
    query: str,
    overlap: bool,
) -> tuple[Tensor, Tensor]:
    """All that is sent before attention: q ``[batch, seq/R, heads/U, nope + rope]``, or its latent
    ``[batch, seq/R, q_lora]``, and the key's latent ``[batch, seq, kv_lora + rope]``."""
    latent = torch.cat(project(mla.latent, hidden, rotary), dim=-1)  # [batch, seq/sp, kv_lora + rope]
    across = degree(ranks.across)
    # Counterparts first, then inside the node: so each shard crosses between nodes once.
    hop = ranks.within if ranks.across is None else ranks.across
    pending = begin_gather(latent, hop) if overlap and hop is not None else None
    if query == "latent":
        q = project(mla.query_latent, hidden)  # [batch, seq/sp, q_lora]
    else:
        q = sequence_to_heads(mla.query(hidden, rotary), ranks.within)
    if pending is not None and across == 1:
        latent = pending.result()  # [batch, seq, kv_lora + rope]
        return (gather_sequence(q, ranks.within) if query == "latent" else q), latent

    shards = gather_sequence(latent, ranks.across) if pending is None else pending.result()
    shards = shards.unflatten(1, (across, -1)).transpose(1, 2).flatten(2)  # [batch, seq/sp, R * (kv_lora + rope)]
    gathered = torch.cat((q, shards), dim=-1) if query == "latent" else shards
    gathered = gather_sequence(gathered, ranks.within)
    q_latent, shards = gathered.split([gathered.shape[-1] - shards.shape[-1], shards.shape[-1]], dim=-1)
    if across > 1:
        q_latent = q_latent.contiguous()  # so that the shards, copied next, do not stay alive through it
    latent = shards.unflatten(-1, (across, -1)).transpose(1, 2).flatten(1, 2)  # [batch, seq, kv_lora + rope]
    return (q_latent if query == "latent" else q), latent


def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def check_family(config: MLAConfig, sp: int, options: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless these options of the family fit the configuration and each other."""
    context, heads = options["context"], config.num_attention_heads
    if context == 1:
        config.check_degree(sp)
    within = split_degree(sp, context)
    if heads % within:
        fitting = [sp // each for each in reversed(divisors(math.gcd(sp, heads)))]
        raise ValueError(
            f"{heads} heads cannot be split evenly over sp/context = {within} ranks (sp={sp}, context={context}); "
            f"choose context among {fitting}"
        )
    if options["query"] == "latent" and config.q_lora_rank is None:
        raise ValueError("query='latent' needs a query latent, but q_lora_rank is None; use query='heads'")
    chunk = options["head_chunk"]
    if chunk is not None and chunk > heads // within:
        raise ValueError(f"head_chunk={chunk} is more than the {heads // within} heads of a rank; choose 1 to that")
