"""Collectives that use both ways of a link at once, which gloo's own do not.

gloo's all-to-all sends first and then asks for what it is to receive. The request travels in the same stream as the
data, so a rank that comes late, as in every step one does, asks behind all that it sends, and the other waits for that.
Here every receive is posted first. A reduce-scatter is an exchange and a sum; gloo's is an all-reduce, of twice the
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def both_ways(run: Callable[..., Any], *args: Any) -> Any:
    """``run(*args)``, with the collectives of :mod:`laga_core.parallel.collectives` made of such exchanges."""
    with mock.patch.multiple(
        dist,
        all_to_all_single=_all_to_all_single,
        all_gather_single=_all_gather_single,
        reduce_scatter_single=_reduce_scatter_single,
    ):
        return run(*args)


class _Work:
    """Sends and receives on their way, and what is to be done with what came."""

    def __init__(self, transfers: Sequence[Any], finish: Callable[[], object]) -> None:
        self._transfers, self._finish = transfers, finish

    def wait(self) -> None:
        for transfer in self._transfers:
            transfer.wait()
        self._finish()


def _all_to_all_single(received: Tensor, sent: Tensor, group: ProcessGroup | None = None) -> None:
    ranks = dist.get_world_size(group)
    _exchange(received.chunk(ranks), sent.chunk(ranks), group).wait()


def _all_gather_single(
    gathered: Tensor, shard: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> _Work | None:
    ranks = dist.get_world_size(group)
    return _awaited(_exchange(gathered.chunk(ranks), [shard] * ranks, group), async_op)


def _reduce_scatter_single(
    own: Tensor, shards: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> _Work | None:
    ranks = dist.get_world_size(group)
    parts = own.new_empty(ranks, *own.shape)
    return _awaited(
        _exchange(parts.unbind(), shards.chunk(ranks), group, lambda: torch.sum(parts, 0, out=own)), async_op
    )


def _exchange(
    received: Sequence[Tensor],
    sent: Sequence[Tensor],
    group: ProcessGroup | None,
    finish: Callable[[], object] = lambda: None,
) -> _Work:
    me = dist.get_rank(group)
    others = [rank for rank in range(len(sent)) if rank != me]
    receives = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
    sends = [dist.isend(sent[rank], group=group, group_dst=rank) for rank in others]
    received[me].copy_(sent[me])
    return _Work([*receives, *sends], finish)


def _awaited(work: _Work, async_op: bool) -> _Work | None:
    if async_op:
        return work
    work.wait()
    return None
