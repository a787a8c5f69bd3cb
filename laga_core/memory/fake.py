"""One rank of many, with neither peers nor data, and what its device would run in place of what a CPU runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.overrides import TorchFunctionMode

from ..kernels import KERNELS, tiled
from . import fused

_lock = threading.RLock()


@contextmanager
def fake_group(sp: int, device: torch.device | str = "cpu") -> Iterator[ProcessGroup | None]:
    """A group of ``sp`` ranks in which this process is rank 0 and collectives return at once, their results undefined.

    ``None`` for one rank. The caller's own process groups, if any, are set aside meanwhile and come back untouched.
    """
    if sp == 1:
        yield None
        return
    from torch._C._distributed_c10d import FakeProcessGroup
    from torch.testing._internal.distributed.fake_pg import FakeStore

    custom = ProcessGroup.BackendType.CUSTOM
    group = ProcessGroup(FakeStore(), 0, sp)
    backend = FakeProcessGroup._create_internal(0, sp, None)  # type: ignore[call-arg]
    group._register_backend(torch.device(device), custom, backend)
    group._set_default_backend(custom)
    with _lock:
        outside = c10d._world
        c10d._world = _World(group)
        try:
            yield group
        finally:
            c10d._world = outside


class _World(c10d._World):
    """torch.distributed's registry of groups, holding one."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.default_pg = group
        self._groups: dict[ProcessGroup, Any] = {group: (dist.Backend.FAKE, None)}

    @property
    def pg_map(self) -> dict[ProcessGroup, Any]:
        return self._groups


@contextmanager
def stand_ins(device: str) -> Iterator[None]:
    """The kernel ``"fused"``, short loops, and an accelerator's choices where fake tensors would make a CPU's."""
    with ExitStack() as stack:
        stack.enter_context(_lock)
        stack.enter_context(mock.patch.dict(KERNELS, fused=fused.attend))
        stack.enter_context(mock.patch.object(tiled, "_cut", _ends))
        if device == "accelerator":
            stack.enter_context(mock.patch.object(tiled, "_on_cpu", lambda x: False))
            stack.enter_context(_Accelerator())
        yield


def _ends(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """The first and the last of the pieces the tiled kernel works through: what happens in between is the same."""
    for first in sorted({start, start + (stop - start - 1) // step * step}) if stop > start else ():
        yield first, min(first + step, stop)


class _Accelerator(TorchFunctionMode):
    """RMSNorm is one kernel there; on a CPU it is a chain of float32 operations that keeps every link."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.rms_norm:
            return _fused_rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    return _FusedRMSNorm.apply(x, weight)


class _FusedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        reciprocal = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        ctx.save_for_backward(x, weight, reciprocal)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)
