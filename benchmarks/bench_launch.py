"""The launcher against a bare ``torchrun`` of the same function: from the call until its processes are gone.

``launch`` is called from a process that has PyTorch loaded, as a notebook's kernel has; its agent and ranks are new.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial

from laga_core import launch

from . import hello
from .harness import Comparison, interleaved


def compare() -> Iterator[Comparison]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", hello.__file__]
    candidates = {
        "ours": partial(launch, hello.total, nproc=2, device="cpu", threads_per_rank=1),
        "theirs": partial(subprocess.run, torchrun, check=True, capture_output=True, timeout=120),
    }
    for run in candidates.values():
        run()
    took = interleaved(candidates, repeats=3, spare=3)
    ours, theirs = took["ours"].seconds, took["theirs"].seconds
    yield Comparison("launch, torchrun: two ranks", f"{ours:.1f} s", f"{theirs:.1f} s", ours / theirs, at_most=1.2)
