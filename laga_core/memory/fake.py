"""One rank of many, with neither peers nor data, and what its device would run in place of what a CPU runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ..kernels import KERNELS, products, tiled
from . import fused

topology = import_module("laga_core.parallel.topology")  # the package has a function of that name

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

    with _lock, mock.patch.object(c10d, "_world", _World()) as world:

        def group(ranks: int) -> ProcessGroup:
            custom = ProcessGroup.BackendType.CUSTOM
            made = ProcessGroup(FakeStore(), 0, ranks)
            backend = FakeProcessGroup._create_internal(0, ranks, None)  # type: ignore[call-arg]
            made._register_backend(torch.device(device), custom, backend)
            made._set_default_backend(custom)
            world.groups[made] = (dist.Backend.FAKE, None)
            return made

        def split(whole: ProcessGroup, within: int) -> Any:
            return topology.Topology(group(within), group(whole.size() // within))

        world.default_pg = group(sp)
        with mock.patch.object(topology, "_create", split):
            yield world.default_pg


class _World(c10d._World):
    """torch.distributed's registry of groups, of which this process is rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[ProcessGroup, Any] = {}

    @property
    def pg_map(self) -> dict[ProcessGroup, Any]:
        return self.groups

    @property
    def pg_group_ranks(self) -> dict[ProcessGroup, dict[int, int]]:
        return {group: {0: 0} for group in self.groups}


@contextmanager
def stand_ins(device: str) -> Iterator[None]:
    """The kernel ``"fused"``, short loops, and the choices that code makes by its device.

    LayerNorm's statistics are float32 on both devices, as on an accelerator.
    """
    with ExitStack() as stack:
        stack.enter_context(_lock)
        stack.enter_context(mock.patch.dict(KERNELS, fused=fused.attend))
        stack.enter_context(mock.patch.object(tiled, "_cut", _ends))
        stack.enter_context(mock.patch.object(products, "on_cpu", lambda x: device == "cpu"))
        if device == "accelerator":
            stack.enter_context(mock.patch.object(torch.nn.functional, "rms_norm", _fused_rms_norm))
        yield


def _ends(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """The first and the last of the pieces the tiled kernel works through, and the one before a last that is not whole.

    So memory sees each kind of neighbours: a whole piece that meets what a whole one left, and the rest that does. What
    happens in between is the same again.
    """
    pieces = -(-(stop - start) // step)
    shown = {0, pieces - 1} if (stop - start) % step == 0 else {0, pieces - 2, pieces - 1}
    for piece in sorted(shown & set(range(pieces))):
        yield start + piece * step, min(start + (piece + 1) * step, stop)


def _fused_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    """One kernel on an accelerator; on a CPU, a chain of float32 operations that keeps every link."""
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
