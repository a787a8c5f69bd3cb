"""The collectives of sequence parallelism, wrapped for autograd (paper §5.2).

Shards are contiguous pieces of the sequence in rank order. Every function takes any strides, any batch size and any
floating dtype its backend moves; at degree 1 (or ``group=None``) it returns its input as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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
        return scatter_heads(x, group, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_sequence(grad, ctx.group, "backward"), None


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return scatter_sequence(x, group, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_heads(grad, ctx.group, "backward"), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


def scatter_heads(x: Tensor, group: ProcessGroup | None, direction: str) -> Tensor:
    """The exchange of :func:`sequence_to_heads` without autograd, noted under ``direction``."""
    if group is None or degree(group) == 1:
        return x
    sp = degree(group)
    parts = x.unflatten(2, (sp, -1))  # [batch, seq/sp, sp, heads/sp, dim]
    parts = parts.permute(2, 0, 1, 3, 4).contiguous()  # [sp, batch, seq/sp, heads/sp, dim]
    parts = _all_to_all(parts, group, direction)  # the same shape, now one part of the sequence from each rank
    return parts.transpose(0, 1).flatten(1, 2)  # [batch, seq, heads/sp, dim]


def scatter_sequence(x: Tensor, group: ProcessGroup | None, direction: str) -> Tensor:
    """The exchange of :func:`heads_to_sequence` without autograd, noted under ``direction``."""
    if group is None or degree(group) == 1:
        return x
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
    return _begin_all_gather(x, group, asynchronous=False).result()


def _reduce_scatter(grad: Tensor, group: ProcessGroup) -> Tensor:
    return _begin_reduce_scatter(grad, group, asynchronous=False).result()


class _Transfer(NamedTuple):
    """A collective on its way: its buffers stay alive until ``result``, which waits for it."""

    work: Any  # None: it has ended
    received: Tensor
    sent: Tensor
    finish: Callable[[Tensor], Tensor]

    def result(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.finish(self.received)


def _begin_all_gather(x: Tensor, group: ProcessGroup, asynchronous: bool) -> _Transfer:
    sp, batch = degree(group), x.shape[0]
    note("all_gather", "forward", wire_bytes=(sp - 1) * x.nbytes, paper_bytes=x.nbytes)
    shard, gathered = x.contiguous(), x.new_empty(sp * batch, *x.shape[1:])
    work = dist.all_gather_single(gathered, shard, group=group, async_op=asynchronous)

    def finish(received: Tensor) -> Tensor:
        return received.unflatten(0, (sp, batch)).transpose(0, 1).flatten(1, 2)  # [batch, seq, dim]

    return _Transfer(work if asynchronous else None, gathered, shard, finish)


def _begin_reduce_scatter(grad: Tensor, group: ProcessGroup, asynchronous: bool) -> _Transfer:
    sp = degree(group)
    shards = grad.unflatten(1, (sp, -1)).transpose(0, 1).flatten(0, 1).contiguous()  # [sp * batch, seq/sp, dim]
    own = shards.new_empty(grad.shape[0], *shards.shape[1:])
    note("reduce_scatter", "backward", wire_bytes=(sp - 1) * own.nbytes, paper_bytes=own.nbytes)
    work = dist.reduce_scatter_single(own, shards, group=group, async_op=asynchronous)
    return _Transfer(work if asynchronous else None, own, shards, lambda received: received)


# --- a gather that other work hides ---


class PendingGather:
    """A gather begun by :func:`begin_gather`; ``result`` waits for it.

    In backward the same happens the other way round: the reduce-scatter begins where ``result`` was called and ends
    where the gather was begun. Between them autograd runs the backward of what forward ran in between.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.forward: _Transfer | None = None
        self.backward: _Transfer | None = None
        self.ticket: Tensor | None = None  # links the two ends in autograd's graph

    def result(self) -> Tensor:
        """The gathered ``[batch, seq, dim]``; to be called once."""
        if self.ticket is None:
            raise RuntimeError("the result of this gather has been taken already")
        ticket, self.ticket = self.ticket, None
        return _FinishGather.apply(ticket, self)


def begin_gather(x: Tensor, group: ProcessGroup) -> PendingGather:
    """Begin :func:`gather_sequence` of ``[batch, seq/sp, dim]`` and return while the data is still on its way."""
    pending = PendingGather(group)
    pending.ticket = _BeginGather.apply(x, group, pending)
    return pending


class _BeginGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, pending: PendingGather) -> Tensor:
        ctx.pending = pending
        pending.forward = _begin_all_gather(x, group, asynchronous=True)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        transfer, ctx.pending.backward = ctx.pending.backward, None
        return transfer.result(), None, None


class _FinishGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, pending: PendingGather) -> Tensor:
        ctx.pending = pending
        transfer, pending.forward = pending.forward, None
        assert transfer is not None  # set where the ticket was made
        return transfer.result()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.pending.backward = _begin_reduce_scatter(grad, ctx.pending.group, asynchronous=True)
        return grad.new_zeros(()), None
