"""The benchmarks' own arithmetic: rounds, medians, peaks, floors. What they measure is not asserted here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from mmap import PAGESIZE, mmap

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import __main__, floor, harness


def test_every_benchmark_can_be_asked_for_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["unheard"]) == 2
    known = capsys.readouterr().err.strip().rpartition(": ")[2].split(", ")
    assert known == ["attention", "family", "kernels", "launch"]
    assert all(callable(importlib.import_module(f"benchmarks.bench_{name}").compare) for name in known)


def test_rounds_turn_so_that_nobody_always_comes_first() -> None:
    called: list[str] = []
    took = harness.interleaved({name: lambda name=name: called.append(name) for name in "abc"}, repeats=4)
    assert "".join(called) == "abcbcacababc"
    assert took.keys() == set("abc")


def test_no_round_but_the_first_begins_after_its_time() -> None:
    called: list[str] = []
    harness.interleaved({"a": lambda: called.append("a")}, repeats=9, seconds=0)
    assert called == ["a"]


def test_memory_touched_for_the_first_time_is_told() -> None:
    def touch() -> None:
        with mmap(-1, 64 << 20) as memory:
            memory[::PAGESIZE] = bytes(len(memory) // PAGESIZE)

    took = harness.interleaved({"new": touch, "none": lambda: None})
    assert took["new"].seconds > took["new"].system / 2 > 0
    assert took["new"].system > 10 * took["none"].system


def test_a_line_says_the_ratio_the_bound_and_what_was_wanted() -> None:
    short = harness.Comparison("x", "2 ms", "3 ms", 1.5, at_least=2.0, bound=1.75, note="because")
    assert not short.met
    first, second = str(short).splitlines()
    assert first.split() == ["x", "2", "ms", "3", "ms", "1.50", "1.75", ">=", "2", "FALLS", "SHORT"]
    assert second.strip() == "because"
    assert str(harness.Comparison("x", "1 MB", "4 MB", 0.25, at_most=0.25)).split()[-3:] == ["<=", "0.25", "met"]
    assert str(harness.Comparison("x", "1 MB", "40 MB", 0.025, at_most=1 / 30)).split()[-3:] == ["<=", "0.0333", "met"]
    assert harness.Comparison("x", "", "", 9.0).met


def test_faster_divides_theirs_by_ours_and_by_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(harness.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> Callable[[], object]:
        return lambda: now.append(now.pop() + seconds)

    it = harness.faster("x", takes(2.0), takes(6.0), takes(1.5), at_least=2.0, repeats=3)
    assert (it.ours, it.theirs, it.ratio, it.bound, it.met) == ("2000 ms", "6000 ms", 3.0, 4.0, True)


def test_the_peak_is_what_is_held_at_once() -> None:
    def run() -> None:
        first = torch.empty(1 << 20)  # 4 MiB
        del first
        both = torch.empty(1 << 19), torch.empty(1 << 18)
        del both

    assert harness.peak_bytes(run) == 4 << 20


def test_the_floor_multiplies_what_causal_attention_has_to() -> None:
    seq, heads, dim, dim_v = 1024, 4, 24, 16
    with FlopCounterMode(display=False) as counted, pytest.MonkeyPatch.context() as patched:
        patched.setattr(floor, "_seconds", lambda step: step.__name__ != "by_bmm")  # the route that is counted
        step = floor.attention(seq, heads, dim, dim_v, torch.float32)
        before = counted.get_total_flops()
        step()
        forward, backward = 2 * (dim + dim_v), 2 * (3 * dim + 2 * dim_v)  # a score, once more in backward
        assert counted.get_total_flops() - before == heads * seq**2 // 2 * (forward + backward)


def test_the_floor_multiplies_what_a_linear_map_has_to() -> None:
    layer, x = torch.nn.Linear(24, 40, bias=False), torch.randn(64, 24, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        layer(x).sum().backward()
    with FlopCounterMode(display=False) as floored, pytest.MonkeyPatch.context() as patched:
        patched.setattr(floor, "_seconds", lambda step: step.__name__ != "by_bmm")
        step = floor.projections(64, [(24, 40)], torch.float32)
        before = floored.get_total_flops()
        step()
    assert floored.get_total_flops() - before == counted.get_total_flops()
