"""One look before a collective: do all ranks mean the same call?

A collective entered with different shapes hangs or corrupts memory. So the ranks first exchange a short signature, and
all of them raise the same error where one of them is wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def agree(
    signature: Mapping[str, int | str], problem: str | None, group: ProcessGroup | None, device: torch.device
) -> None:
    """Raise ``ValueError`` on every rank if any rank has a ``problem`` or another ``signature``.

    ``signature`` has the same keys on all ranks. Its exchange is a control message of some bytes, kept out of the
    ledger. Fake process groups, which have no peers, check only this rank's own problem.
    """
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        if problem:
            raise ValueError(problem)
        return
    values = [value if isinstance(value, int) else zlib.crc32(value.encode()) for value in signature.values()]
    own = torch.tensor([problem is not None, *values], dtype=torch.int64, device=device)
    rows = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather_single(rows.view(-1), own, group=group)
    if rows[:, 0].any() or (rows != rows[0]).any():
        raise ValueError(_disagreement(signature, problem, group))


def _disagreement(signature: Mapping[str, int | str], problem: str | None, group: ProcessGroup) -> str:
    """What is wrong, in words, the same on every rank."""
    told: list[tuple[str | None, dict[str, int | str]]] = [(None, {})] * dist.get_world_size(group)
    dist.all_gather_object(told, (problem, dict(signature)), group=group)
    problems = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text]
    if problems:
        return "; ".join(problems)
    differing = [
        f"{name} is {', '.join(f'{values[name]} on rank {rank}' for rank, (_, values) in enumerate(told))}"
        for name in signature
        if len({values[name] for _, values in told}) > 1
    ]
    return f"the ranks do not agree: {'; '.join(differing)}; every rank must pass the same"
