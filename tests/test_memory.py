"""The memory simulation against the paper, against the allocator of this machine, and against its own accounts."""

from __future__ import annotations

import operator
import re
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from laga_core import MLAAttention, MLAConfig, launch, simulate_memory
from laga_core.experiments import memory as experiment
from laga_core.experiments.paper import read_table
from laga_core.forms import FORMS, STRONG_EXPLICIT, check_form
from laga_core.kernels import tiled
from laga_core.memory import fake
from laga_core.results import Store

PAPER = MLAConfig.preset("paper-v3")
SMALL = MLAConfig(
    hidden_size=512, num_attention_heads=16, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=32, rope_theta=None, norm="layer", causal=False,
)  # fmt: skip
FULL = replace(SMALL, q_lora_rank=96, rope_theta=1e4, norm="rms", causal=True)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("explicit", {}),
    ("explicit", {"key_rope": "headless"}),
    ("explicit", STRONG_EXPLICIT),
    ("absorbed", {}),
    ("absorbed", {"score": "split"}),
    ("laga", {}),
    ("laga", {"overlap": True}),
    ("laga", {"recompute": True}),
    ("laga", {"query": "latent"}),
    ("laga", {"query": "latent", "overlap": True, "head_chunk": 3}),
    ("laga", {"query": "latent", "recompute": True, "head_chunk": 3}),
    ("laga", {"context": 2, "layout": "zigzag"}),
    ("laga", {"context": 2, "query": "latent", "recompute": True}),
]


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


class Case(NamedTuple):
    config: MLAConfig
    form: str
    kernel: str
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32
    tokens: int = 512
    layers: int = 1


def cases(sp: int) -> list[Case]:
    """Every form, kernel and option that can run on ``sp`` ranks.

    A matrix product in bf16 takes some 0.3 MB of scratch inside some CPUs' library, whatever its size: there only a
    longer sequence dwarfs that.
    """
    found = [Case(FULL, form, kernel, options) for kernel in ("eager", "tiled") for form, options in VARIANTS]
    found += [Case(SMALL, form, kernel, {}) for kernel in ("eager", "tiled") for form in FORMS]
    for kernel, form, options, tokens in (
        ("eager", "explicit", {}, 1024),
        ("eager", "absorbed", {}, 1024),
        ("tiled", "laga", {"recompute": True}, 2048),
    ):
        found.append(Case(FULL, form, kernel, options, torch.bfloat16, tokens, layers=2))

    def fits(case: Case) -> bool:
        try:
            return bool(check_form(case.config, sp, case.form, case.options))
        except ValueError:
            return False

    return [case for case in found if fits(case)]


def allocated(group: Any, case: Case) -> int:
    """Most bytes the CPU allocator had given out in the second step, from the profiler's memory events."""
    sp = 1 if group is None else dist.get_world_size(group)
    layers = [
        MLAAttention(case.config, case.form, case.kernel, group, dtype=case.dtype, **case.options)
        for _ in range(case.layers)
    ]
    stack = torch.nn.Sequential(*layers)
    hidden = torch.randn(1, case.tokens // sp, case.config.hidden_size).to(case.dtype).requires_grad_()
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


def settle(collective: Any) -> Any:
    """gloo's own thread lets go of a collective's buffers a moment after it has ended: wait for that moment."""

    def settled(*args: Any, **kwargs: Any) -> Any:
        result = collective(*args, **kwargs)
        time.sleep(0.03)
        return result

    return settled


def all_allocated() -> list[int]:
    torch.set_num_threads(1)
    for name in ("all_to_all_single", "all_gather_single", "reduce_scatter_single"):
        setattr(dist, name, settle(getattr(dist, name)))
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    return [allocated(group, case) for case in cases(dist.get_world_size())]


@pytest.mark.parametrize("sp", [1, 2])
def test_what_the_allocator_gave_out(sp: int) -> None:
    measured = launch(all_allocated, nproc=sp, device="cpu", timeout=240, threads_per_rank=1)[0]
    for case, real in zip(cases(sp), measured, strict=True):
        kinds = {"form": case.form, "kernel": case.kernel, "dtype": case.dtype, **case.options}
        run = simulate_memory(case.config, seq=case.tokens, sp=sp, layers=case.layers, device="cpu", **kinds)
        assert run.peak_bytes == pytest.approx(real, rel=0.01), case


# --- its own accounts ---


@pytest.mark.parametrize(("form", "options"), VARIANTS, ids=str)
@pytest.mark.parametrize("kernel", ["eager", "tiled", "fused"])
def test_every_byte_has_a_role(form: str, options: dict[str, Any], kernel: str) -> None:
    run = simulate_memory(MLAConfig.preset("deepseek-v3"), form, kernel, 8192, 8, **options)
    assert sum(run.breakdown.values()) == run.peak_bytes == max(event.bytes for event in run.timeline)
    assert sum(run.saved_breakdown.values()) == run.saved_bytes
    held = 0
    for event in run.timeline:
        held += event.delta
        assert held == event.bytes and event.role and event.operator
    known = {"weights", "gradients", "hidden", "latent", "q"}
    assert known <= {part for role in (*run.breakdown, *run.saved_breakdown) for part in re.split(", | and ", role)}


@pytest.mark.parametrize(("form", "causal"), [("laga", True), ("absorbed", False)])
def test_short_loops_are_the_whole_ones(form: str, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiled kernel's loops are cut short in the simulation: here the blocks are small, so that there are many."""
    for name, value in (("_TILE_ACCELERATOR", 1 << 15), ("_ROWS", 128), ("_KEYS", 32), ("_DIAGONAL", 64)):
        monkeypatch.setattr(tiled, name, value)
    config = replace(FULL, num_attention_heads=20, causal=causal)
    short = simulate_memory(config, form, "tiled", 400, 1)
    monkeypatch.setattr(fake, "_ends", tiled._cut)
    whole = simulate_memory(config, form, "tiled", 400, 1)
    assert short.peak_bytes == whole.peak_bytes and len(short.timeline) < len(whole.timeline) / 2


OWN_MEMORY = """
import resource
from laga_core import MLAConfig, simulate_memory
for kernel in ("eager", "tiled"):
    simulate_memory(MLAConfig.preset("deepseek-v3"), "absorbed", kernel, 1 << 20, 1, layers=4)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_it_needs_little_memory_itself() -> None:
    found = subprocess.run([sys.executable, "-c", OWN_MEMORY], capture_output=True, text=True, check=True, timeout=100)
    assert int(found.stdout) * (1 if sys.platform == "darwin" else 1024) < 1.5e9  # ru_maxrss: bytes there, else KiB


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


def test_a_record_of_earlier_code_is_not_shown(tmp_path: Path) -> None:
    cell = {"form": "laga", "kernel": "fused", "seq": 1024, "sp": 2}
    store = Store(tmp_path)
    peak = experiment.peak_mb(store, **cell)
    (found,) = store.load("memory")
    assert found.metrics["peak_bytes"] == peak * 1e6
    store.write(replace(found, metrics={"peak_bytes": 1, "saved_bytes": 1}))
    assert experiment.peak_mb(store, **cell) == peak
    assert [record.metrics for record in store.load("memory")] == [found.metrics]
