"""One rank of many, with neither peers nor data."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

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
