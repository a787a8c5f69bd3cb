"""The memory simulation against the paper, against the allocator of this machine, and against its own accounts."""

from __future__ import annotations

import operator
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from laga_core import MLAAttention, MLAConfig, launch, simulate_memory
from laga_core.experiments.paper import read_table

PAPER = MLAConfig.preset("paper-v3")
SMALL = MLAConfig(
    hidden_size=512, num_attention_heads=16, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=32, rope_theta=None, norm="layer", causal=False,
)  # fmt: skip
FULL = replace(SMALL, q_lora_rank=96, rope_theta=1e4, norm="rms", causal=True)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("explicit", {}),
    ("explicit", {"key_rope": "headless"}),
    ("absorbed", {}),
    ("absorbed", {"score": "split"}),
    ("laga", {}),
]


# A matrix product in bf16 takes some 0.3 MB of scratch inside the CPU's library, whatever its size: where no score
# matrix dwarfs that, a longer sequence does.
TOKENS = {"eager": 1024, "tiled": 2048}


def peak_mb(config: MLAConfig, form: str, seq: int, sp: int, **options: Any) -> float:
    return simulate_memory(config, form, "eager", seq, sp, **options).peak_bytes / 1e6


# --- against the paper ---


@pytest.mark.parametrize("row", read_table("table2"), ids=lambda row: f"sp{row['sp']}-{row['seq']}")
def test_table_2(row: dict[str, str]) -> None:
    seq, sp = int(row["seq"]), int(row["sp"])
    for form, options, within in (("explicit", {}, 0.02), ("laga", {}, 0.02), ("absorbed", {"score": "split"}, 0.05)):
        assert peak_mb(PAPER, form, seq, sp, **options) == pytest.approx(float(row[f"{form}_mb"]), rel=within)


def test_the_headline() -> None:
    inflation = peak_mb(PAPER, "absorbed", 16384, 8, score="split") - peak_mb(PAPER, "explicit", 16384, 8)
    assert inflation == pytest.approx(9247, rel=0.01)


@pytest.mark.parametrize("row", read_table("figure4"), ids=lambda row: f"heads{row['n_heads']}")
def test_figure_4(row: dict[str, str]) -> None:
    config = replace(PAPER, hidden_size=int(row["d_model"]), num_attention_heads=int(row["n_heads"]))
    size = int(row["seq"]), int(row["sp"])
    inflation = peak_mb(config, "absorbed", *size, score="split") - peak_mb(config, "explicit", *size)
    assert inflation == pytest.approx(float(row["absorbed_minus_explicit_mb"]), rel=0.07)


# --- against the allocator ---


def allocated(group: Any, config: MLAConfig, form: str, kernel: str, options: dict[str, Any]) -> int:
    """Most bytes the CPU allocator had given out in the second step, from the profiler's memory events."""
    sp = 1 if group is None else dist.get_world_size(group)
    layers = [MLAAttention(config, form, kernel, group, dtype=torch.bfloat16, **options) for _ in range(2)]
    stack = torch.nn.Sequential(*layers)
    hidden = torch.randn(1, TOKENS[kernel] // sp, config.hidden_size).bfloat16().requires_grad_()
    stack(hidden).sum().backward()
    hidden.grad = None
    held = sum(2 * p.nbytes for p in stack.parameters()) + hidden.nbytes
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as recorded:
        stack(hidden).sum().backward()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    peak = held
    for event in sorted(events, key=operator.methodcaller("start_ns")):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def cases() -> list[tuple[MLAConfig, str, str, dict[str, Any]]]:
    return [
        (config, form, kernel, options)
        for config in (SMALL, FULL)
        for kernel in ("eager", "tiled")
        for form, options in VARIANTS
        if kernel == "eager" or options.get("score") != "split"
    ]


def settle(collective: Any) -> Any:
    """gloo's own thread lets go of a collective's buffers a moment after it has ended: wait for that moment."""

    def settled(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        time.sleep(0.005)
        return result

    return settled


def all_allocated() -> list[int]:
    torch.set_num_threads(1)
    for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single"):
        setattr(dist, name, settle(getattr(dist, name)))
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    return [allocated(group, *case) for case in cases()]


@pytest.mark.parametrize("sp", [1, 2])
def test_what_the_allocator_gave_out(sp: int) -> None:
    measured = launch(all_allocated, nproc=sp, device="cpu", timeout=240, threads_per_rank=1)[0]
    for (config, form, kernel, options), real in zip(cases(), measured, strict=True):
        run = simulate_memory(config, form, kernel, TOKENS[kernel], sp, layers=2, device="cpu", **options)
        assert run.peak_bytes == pytest.approx(real, rel=0.01), (form, kernel, options, config.causal)


# --- its own accounts ---


@pytest.mark.parametrize("kernel", ["eager", "tiled", "fused"])
@pytest.mark.parametrize(("form", "options"), VARIANTS)
def test_every_byte_has_a_role(form: str, options: dict[str, Any], kernel: str) -> None:
    if kernel != "eager" and options.get("score") == "split":
        return  # two score products are an eager form
    run = simulate_memory(MLAConfig.preset("deepseek-v3"), form, kernel, 8192, 8, layers=2, **options)
    assert sum(run.breakdown.values()) == run.peak_bytes == max(event.bytes for event in run.timeline)
    assert sum(run.saved_breakdown.values()) == run.saved_bytes
    held = 0
    for event in run.timeline:
        held += event.delta
        assert held == event.bytes and event.role and event.operator
    known = {"weights", "gradients", "hidden", "latent", "q"}
    assert known <= set(run.breakdown) | set(run.saved_breakdown)


def test_layers_add_what_one_saves() -> None:
    one, three = (simulate_memory(PAPER, "laga", "fused", 16384, 8, layers=n) for n in (1, 3))
    assert three.saved_bytes == pytest.approx(3 * one.saved_bytes, rel=0.001)


def test_latents_sizes_stand_in_the_open_under_a_linear_kernel() -> None:
    saved = {
        form: simulate_memory(PAPER, form, "fused", 16384, 8).saved_bytes for form in ("explicit", "absorbed", "laga")
    }
    assert saved["absorbed"] / saved["explicit"] == pytest.approx(1.8, abs=0.05)
    assert 1.0 < saved["laga"] / saved["explicit"] < 1.05


def test_it_leaves_the_caller_alone_and_allocates_nothing() -> None:
    before = dist.is_initialized()
    tracemalloc.start()
    simulate_memory(PAPER, "explicit", "eager", 1 << 20, 64)  # a petabyte of scores
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert dist.is_initialized() == before and peak < 200e6
    torch.ones(2).sum()  # real tensors still are


def simulated_inside() -> int:
    dist.barrier()
    found = simulate_memory(PAPER, "laga", "fused", 4096, 8).peak_bytes
    dist.barrier()  # the group of the caller still works
    return found


def test_inside_real_ranks() -> None:
    outside = simulate_memory(PAPER, "laga", "fused", 4096, 8).peak_bytes
    assert launch(simulated_inside, nproc=2, device="cpu", timeout=100) == [outside, outside]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kernel": "flash"}, "known to the simulation"),
        ({"kernel": "npu"}, "cannot be simulated"),
        ({"form": "implicit"}, "known: explicit"),
        ({"seq": 1001}, "cannot be split evenly"),
        ({"seq": 0}, "at least 1"),
        ({"seq": 1 << 40}, "tokens"),
        ({"sp": 3}, "choose sp among"),
        ({"layers": 0}, "layers must be"),
        ({"batch": -1}, "batch must be"),
        ({"dtype": torch.int8}, "dtype"),
        ({"score": "split"}, "has no option"),
    ],
)
def test_bad_input(wrong: dict[str, Any], says: str) -> None:
    call: dict[str, Any] = {"form": "laga", "kernel": "eager", "seq": 1024, "sp": 8}
    with pytest.raises((ValueError, TypeError), match=says):
        simulate_memory(PAPER, **call | wrong)
