"""The collectives of sequence parallelism, wrapped for autograd (paper §5.2).

Shards are contiguous pieces of the sequence in rank order. Every function takes any strides, any batch size and any
floating dtype its backend moves; at degree 1 (or ``group=None``) it returns its input as it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .ledger import note


def degree(group: ProcessGroup | None) -> int:
    """Ranks in the group; 1 without one."""
    return 1 if group is None else dist.get_world_size(group)


def sequence_to_heads(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-to-all: ``[batch, seq/sp, heads, dim]`` to ``[batch, seq, heads/sp, dim]``; backward is the inverse."""
    return x if degree(group) == 1 else _SequenceToHeads.apply(x, group)


def heads_to_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-to-all: ``[batch, seq, heads/sp, dim]`` to ``[batch, seq/sp, heads, dim]``; backward is the inverse."""
    return x if degree(group) == 1 else _HeadsToSequence.apply(x, group)


def gather_sequence(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """All-gather: ``[batch, seq/sp, dim]`` to ``[batch, seq, dim]``; backward is a reduce-scatter."""
    return x if degree(group) == 1 else _GatherSequence.apply(x, group)


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_heads(x, group, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_sequence(grad, ctx.group, "backward"), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sequence(x, group, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_heads(grad, ctx.group, "backward"), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


def _scatter_heads(x: Tensor, group: ProcessGroup, direction: str) -> Tensor:
    sp = degree(group)
    parts = x.unflatten(2, (sp, -1))  # [batch, seq/sp, sp, heads/sp, dim]
    parts = parts.permute(2, 0, 1, 3, 4).contiguous()  # [sp, batch, seq/sp, heads/sp, dim]
    parts = _all_to_all(parts, group, direction)  # the same shape, now one part of the sequence from each rank
    return parts.transpose(0, 1).flatten(1, 2)  # [batch, seq, heads/sp, dim]


def _scatter_sequence(x: Tensor, group: ProcessGroup, direction: str) -> Tensor:
    sp = degree(group)
    parts = x.unflatten(1, (sp, -1))  # [batch, sp, seq/sp, heads/sp, dim]
    parts = parts.transpose(0, 1).contiguous()  # [sp, batch, seq/sp, heads/sp, dim]
    parts = _all_to_all(parts, group, direction)  # the same shape, now one part of the heads from each rank
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)  # [batch, seq/sp, heads, dim]


def _all_to_all(parts: Tensor, group: ProcessGroup, direction: str) -> Tensor:
    sent = parts.nbytes // degree(group) * (degree(group) - 1)
    note("all_to_all", direction, wire_bytes=sent, paper_bytes=2 * sent)
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    sp, batch = degree(group), x.shape[0]
    note("all_gather", "forward", wire_bytes=(sp - 1) * x.nbytes, paper_bytes=x.nbytes)
    gathered = x.new_empty(sp * batch, *x.shape[1:])
    dist.all_gather_single(gathered, x.contiguous(), group=group)
    return gathered.unflatten(0, (sp, batch)).transpose(0, 1).flatten(1, 2)  # [batch, seq, dim]


def _reduce_scatter(grad: Tensor, group: ProcessGroup) -> Tensor:
    sp = degree(group)
    shards = grad.unflatten(1, (sp, -1)).transpose(0, 1).flatten(0, 1).contiguous()  # [sp * batch, seq/sp, dim]
    own = shards.new_empty(grad.shape[0], *shards.shape[1:])
    note("reduce_scatter", "backward", wire_bytes=(sp - 1) * own.nbytes, paper_bytes=own.nbytes)
    dist.reduce_scatter_single(own, shards, group=group)
    return own
