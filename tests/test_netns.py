"""Emulated clusters: shaped links that are counted, failures that name their rank, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from laga_core.experiments import netns

pytestmark = pytest.mark.usefixtures("namespaces")


def listed() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def left() -> list[str]:
    """Namespaces of this process."""
    return [name for name in listed().splitlines() if name.startswith(f"laga{os.getpid()}-")]


def send(size: int, mbit: float) -> tuple[int, float]:
    """From rank 0 to rank 1: bytes counted and seconds taken."""
    netns.shape(mbit)
    x = torch.zeros(size, dtype=torch.uint8)
    before, start = netns.sent_bytes(), time.perf_counter()
    if dist.get_rank() == 0:
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
    dist.barrier()
    return netns.sent_bytes() - before, time.perf_counter() - start


def test_a_shaped_link_is_as_slow_as_it_says_and_counts_what_it_carries() -> None:
    size, mbit = 4_000_000, 100
    sent, seconds = netns.run(send, size, mbit, nodes=2, timeout=60)[0]
    assert size <= sent <= 1.1 * size
    assert seconds >= 0.9 * size * 8 / (mbit * 1e6)


def fail() -> None:
    if dist.get_rank() == 1:
        raise ValueError("this rank is unwell")
    dist.barrier()


def test_a_failing_rank_is_named_and_its_namespaces_go() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed.*this rank is unwell"):
        netns.run(fail, nodes=2, timeout=60)
    assert not left()


def test_a_hang_ends() -> None:
    with pytest.raises(TimeoutError, match=r"did not finish within 0\.5 s"):
        netns.run(time.sleep, 60, nodes=1, timeout=0.5)
    assert not left()


def test_an_error_leaves_no_namespace_and_leftovers_of_the_dead_are_removed() -> None:
    subprocess.run(["ip", "netns", "add", "laga4194305-0"], check=True)  # above the largest process id
    with pytest.raises(KeyError), netns.network(2) as names:
        assert all(name in listed() for name in names)
        assert "laga4194305-0" not in listed()
        raise KeyError
    assert not left()
