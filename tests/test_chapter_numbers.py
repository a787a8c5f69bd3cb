"""The numbers that chapters state in prose are what the code gives: a sentence cannot drift from its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from laga_core import MLAConfig, communication, simulate_memory
from laga_core.experiments import memory, throughput

BOOK = Path(__file__).resolve().parent.parent / "book"
PAPER = MLAConfig.preset("paper-v3")


def text(chapter: str) -> str:
    return " ".join((BOOK / f"{chapter}.md").read_text(encoding="utf-8").split())


def states(chapter: str, *quotes: str) -> None:
    missing = [quote for quote in quotes if quote not in text(chapter)]
    assert not missing, f"{chapter}.md no longer says {missing}"


def ratio(sp: int, config: MLAConfig = PAPER, **explicit: str) -> float:
    sent = (
        communication(config, form, 16384, sp, **options) for form, options in (("explicit", explicit), ("laga", {}))
    )
    one, other = (each.total_bytes for each in sent)
    return one / other


def peak_mb(form: str, **options: str) -> float:
    return simulate_memory(PAPER, form, "eager", 16384, 8, **options).peak_bytes / 1e6


def test_communication() -> None:
    wire = [ratio(sp) for sp in (4, 8, 16)]
    once = [ratio(sp, key_rope="headless") for sp in (4, 8, 16)]
    few = ratio(8, replace(PAPER, num_attention_heads=16))
    crossover = 128 * (128 + 64 + 128) / (512 + 64)
    states(
        "communication",
        "is {:.2f} for 4 ranks, {:.2f} for 8 and {:.2f} for 16".format(*wire),
        "down to {:.2f}, {:.2f} and {:.2f}".format(*once),
        f"the wire {few:.2f}",
        f"at about {crossover:.0f} ranks",
    )
    states("sequence_parallelism", f"about {crossover:.0f} of them")
    assert ratio(64) > 1 > ratio(128)


def test_memory() -> None:
    explicit, split, joint = peak_mb("explicit"), peak_mb("absorbed", score="split"), peak_mb("absorbed", score="joint")
    matrix = memory.score_matrix_mb(16384, 8)
    states(
        "memory",
        f"the split form finds {split - explicit:.0f}",
        f"removes {split - joint:.0f} of them",
        f"itself, {matrix:.0f} MB, and {split - joint - matrix:.0f} MB more",
        f"What is left is {joint - explicit:.0f} MB",
        f"both peak at {explicit / 1e3:.1f} GB",
    )
    narrow = replace(PAPER, hidden_size=2048)
    for config in (PAPER, narrow):
        excess = (simulate_memory(config, f, "eager", 8192, 8, **o).peak_bytes / 1e6
                  for f, o in (("absorbed", {"score": "split"}), ("explicit", {})))  # fmt: skip
        assert next(excess) - next(excess) == pytest.approx(2510, abs=1)
    states("memory", "gives 2510 MB for both widths")


def test_saved() -> None:
    saved = {form: simulate_memory(PAPER, form, "fused", 16384, 8).saved_bytes / 1e6 for form in memory.FORMS}
    states(
        "fused",
        "is {explicit:.0f} MB for explicit, {laga:.0f} for Laga and {absorbed:.0f} for absorbed".format(**saved),
        f"a factor of {saved['absorbed'] / saved['explicit']:.1f} in saved activations",
    )
    states("memory", f"keeps about {saved['absorbed'] / saved['explicit']:.1f} times")
    layers = 61 * (saved["absorbed"] - saved["explicit"]) / 1e3
    assert 19.5 < layers < 22  # "some 20 GB on every rank"


def test_quadratic_fits() -> None:
    fits = {row["column"]: row for row in memory.quadratic_fits()}
    for column, label in (
        ("explicit, eager", "explicit, eager"),
        ("laga, eager", "Laga, eager"),
        ("absorbed, eager", "absorbed, eager"),
    ):
        row = fits[column]
        states("memory", f"| {label} | {row['score_matrices']:.2f} | {row['linear_mb_per_4096']:.1f} |")
    a100 = fits["absorbed − explicit, A100"]
    states("memory", f"on the A100 | {a100['score_matrices']:.3f} | {a100['linear_mb_per_4096']:.1f} |")
    fused = fits["absorbed, fused"]
    square = fused["score_matrices"] * memory.score_matrix_mb(4096, 8)
    states("fused", rf"{fused['fixed_mb']:.0f} + {fused['linear_mb_per_4096']:.0f}\, s + {square:.0f}\, s^2")


def test_hardware() -> None:
    matrices = [memory.score_matrix_mb(seq, 8) for seq in (4096, 8192, 16384)]
    a100 = [575 - matrices[0], 2221 - matrices[1], 8734 - matrices[2]]
    joint = [simulate_memory(PAPER, "absorbed", "eager", s, 8).peak_bytes
             - simulate_memory(PAPER, "explicit", "eager", s, 8).peak_bytes for s in (4096, 8192, 16384)]  # fmt: skip
    states(
        "hardware",
        "what remains is {:.0f}, {:.0f} and {:.0f} MB".format(*a100),
        "has {:.0f}, {:.0f} and {:.0f} MB".format(*(each / 1e6 for each in joint)),
    )


def test_throughput_fits() -> None:
    assert throughput.link_fit("table 4", "fused")["gb_s"] == pytest.approx(58.7, abs=0.05)
    at_16k = throughput.across_nodes_fit()["predicted"][-1]
    assert (round(at_16k["reported"], 2), round(at_16k["bytes_only"], 2)) == (1.24, 1.17)
