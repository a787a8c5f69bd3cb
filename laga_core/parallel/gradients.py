"""Reduction of parameter gradients over the sequence-parallel group (paper §5.2)."""

from __future__ import annotations

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

    Raises ``RuntimeError`` without a process group, and ``ValueError`` on every rank where their parameters differ.
    """
    if not isinstance(group, ProcessGroup):
        raise RuntimeError(
            f"all_reduce_gradients needs the process group that the module was built with, got {group!r}; "
            "start ranks with laga_core.launch (or torch.distributed.init_process_group) and pass the group"
        )
    parameters = [p for p in module.parameters() if p.requires_grad]
    if not parameters or degree(group) == 1:
        return
    device = parameters[0].device
    agree({"parameters": len(parameters), "elements": sum(p.numel() for p in parameters)}, None, group, device)
    used = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    for parameter, anywhere in zip(parameters, used.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _all_reduce(parameter.grad, group)


def _all_reduce(grad: torch.Tensor, group: ProcessGroup) -> None:
    sp = degree(group)
    # A ring reduces and then gathers: each rank sends sp - 1 pieces of 1/sp, twice.
    note("all_reduce", "backward", wire_bytes=2 * (sp - 1) * -(-grad.nbytes // sp), paper_bytes=grad.nbytes)
    if grad.is_contiguous():
        dist.all_reduce(grad, group=group)
    else:
        dense = grad.contiguous()
        dist.all_reduce(dense, group=group)
        grad.copy_(dense)
