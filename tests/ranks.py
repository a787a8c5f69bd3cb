"""Real ranks for the tests: a function runs on each of them, with the process group as its first argument."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from laga_core.launch import launch

COMPILER = "torch._dynamo"  # what torch's optimizers and checkpoint import at their first call: a second each time


def on_ranks(fn: Callable[..., Any], *args: Any, sp: int, timeout: float = 60.0, preload: Sequence[str] = ()) -> list:
    """``fn(group, *args)`` on each of ``sp`` ranks of this machine; the values in rank order.

    ``fn`` must be importable from its test module, which is imported before the ranks are, as are those of ``preload``.
    A hang ends after ``timeout`` seconds, as an error.
    """
    preload = (fn.__module__, *preload)
    return launch(_call, fn, args, nproc=sp, device="cpu", timeout=timeout, threads_per_rank=1, preload=preload)


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    return fn(dist.group.WORLD, *args)


def raised(fn: Callable[[], Any]) -> str:
    """What ``fn`` raises, as "Type: message"; "nothing" if it returns."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
