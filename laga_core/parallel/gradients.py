"""Reduction of parameter gradients over the sequence-parallel group (paper §5.2)."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from .agreement import agree
from .collectives import degree
from .ledger import note


def all_reduce_gradients(module: nn.Module, group: ProcessGroup | None) -> None:
    """Sum every parameter's gradient over ``group``, in place; call it after backward.

    Each rank's backward leaves a partial gradient: of its tokens (all forms), and of its heads only for ``kv_b_proj``
    under the absorbed form and Laga. Their sum is the full gradient whatever the form, so afterwards every rank holds
    the same. A parameter without a gradient on this rank counts as zero; without one on any rank it stays ``None``.
    Small gradients travel together, in buckets of at most 25 MiB.

    Raises ``RuntimeError`` without a process group, and ``ValueError`` on every rank where their trainable parameters
    differ in number, order, shape or dtype, or a gradient is sparse.
    """
    if not isinstance(group, ProcessGroup):
        raise RuntimeError(
            f"all_reduce_gradients needs the process group that the module was built with, got {group!r}; "
            "start ranks with laga_core.launch (or torch.distributed.init_process_group) and pass the group"
        )
    if degree(group) == 1:
        return
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    parameters = list(trainable.values())
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    sparse = [name for name, p in trainable.items() if p.grad is not None and p.grad.layout is not torch.strided]
    problem = f"the gradient of {sparse[0]} is sparse; all_reduce_gradients takes dense ones" if sparse else None
    alike = ", ".join(f"{name} {list(p.shape)} {p.dtype}" for name, p in trainable.items())
    signature: dict[str, int | str] = {
        "trainable parameters": len(parameters),
        "elements": sum(p.numel() for p in parameters),
        "checksum of names, shapes and dtypes": zlib.crc32(alike.encode()),
    }
    agree(signature, problem, group, device)
    if not parameters:
        return
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        _all_reduce(bucket, group)


_BUCKET = 25 << 20  # bytes sent at once: small gradients wait for each other, a large one is not copied


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Neighbours of one dtype and device that together fill at most a bucket."""
    for _, alike in groupby(gradients, key=lambda grad: (grad.dtype, grad.device)):
        bucket: list[torch.Tensor] = []
        for grad in alike:
            if bucket and sum(each.nbytes for each in bucket) + grad.nbytes > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket


def _all_reduce(gradients: list[torch.Tensor], group: ProcessGroup) -> None:
    alone = len(gradients) == 1 and gradients[0].is_contiguous()
    flat = gradients[0] if alone else torch.cat([grad.reshape(-1) for grad in gradients])
    sp = degree(group)
    # A ring reduces and then gathers: each rank sends sp - 1 pieces of 1/sp, twice.
    note("all_reduce", "backward", wire_bytes=2 * (sp - 1) * -(-flat.nbytes // sp), paper_bytes=flat.nbytes)
    dist.all_reduce(flat, group=group)
    if not alone:
        for grad, reduced in zip(gradients, flat.split([grad.numel() for grad in gradients]), strict=True):
            grad.copy_(reduced.view_as(grad))
