"""One look before a collective: do all ranks mean the same call?

A collective entered with different shapes hangs or corrupts memory. So the ranks first exchange a short signature, and
all of them raise the same error where one of them is wrong.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_CONTROL = "the ranks do not agree"


def agree(signature: dict[str, int], problem: str | None, group: ProcessGroup | None, device: torch.device) -> None:
    """Raise ``ValueError`` on every rank if any rank has a ``problem`` or another ``signature``.

    ``signature`` has the same keys on all ranks. Its exchange is a control message of some bytes, kept out of the
    ledger. Fake process groups, which have no peers, check only this rank's own problem.
    """
    if group is None or dist.get_world_size(group) == 1 or dist.get_backend(group) == "fake":
        if problem:
            raise ValueError(problem)
        return
    own = torch.tensor([problem is not None, *signature.values()], dtype=torch.int64, device=device)
    all_ranks = own.new_empty(dist.get_world_size(group) * own.numel())
    dist.all_gather_single(all_ranks, own, group=group)
    rows = all_ranks.view(-1, own.numel()).tolist()
    if any(row[0] for row in rows):
        messages: list[str | None] = [None] * len(rows)
        dist.all_gather_object(messages, problem, group=group)
        raise ValueError("; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text))
    differing = [
        f"{name} is {', '.join(f'{row[column]} on rank {rank}' for rank, row in enumerate(rows))}"
        for column, name in enumerate(signature, start=1)
        if len({row[column] for row in rows}) > 1
    ]
    if differing:
        raise ValueError(f"{_CONTROL}: {'; '.join(differing)}; every rank must pass the same")
