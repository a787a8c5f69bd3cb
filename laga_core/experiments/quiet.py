"""Timing on the ranks of an emulated cluster, at moments when nobody else computes on its machine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from . import netns


def timed(step: Callable[[], None]) -> tuple[float, int]:
    """Seconds of one step from a common start, and bytes that this node sent in it."""
    dist.barrier()
    before, start = netns.sent_bytes(), time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    dist.barrier()
    return seconds, netns.sent_bytes() - before


class Quiet:
    """Times a step at a moment when other processes take at most a tenth of the CPUs, if one comes in time.

    All ranks of the machine take part; what they compute themselves is told apart by their own CPU time.
    """

    SHARE = 0.1

    def __init__(self, patience: float) -> None:
        self.left = patience

    def timed(self, step: Callable[[], None]) -> tuple[float, bool]:
        """Seconds of ``step``, and whether nobody else computed meanwhile."""
        while True:
            self._await_quiet()
            busy, own, start = _busy_seconds(), os.times().user, time.perf_counter()
            seconds, _ = timed(step)
            computed = torch.tensor(os.times().user - own, dtype=torch.float64)
            dist.all_reduce(computed)
            wall = time.perf_counter() - start
            others = (_busy_seconds() - busy - computed.item()) / (wall * (os.cpu_count() or 1))
            worst = torch.tensor([others, wall], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            if worst[0] <= self.SHARE or self.left <= 0:
                return seconds, bool(worst[0] <= self.SHARE)
            self.left -= worst[1].item()

    def _await_quiet(self) -> None:
        left = torch.tensor(self.left, dtype=torch.float64)
        before = _busy_seconds()
        while dist.get_rank() == 0 and left > 0:
            time.sleep(0.2)
            now = _busy_seconds()
            if now - before <= self.SHARE * 0.2 * (os.cpu_count() or 1):
                break
            left -= 0.2
            before = now
        dist.broadcast(left, 0)
        self.left = left.item()


def _busy_seconds() -> float:
    """CPU seconds that all programs of this machine have computed so far."""
    user, nice = Path("/proc/stat").read_text().split(maxsplit=3)[1:3]
    return (int(user) + int(nice)) / os.sysconf("SC_CLK_TCK")
