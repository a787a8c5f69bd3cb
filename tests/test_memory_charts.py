"""The memory explorers: what the page computes, what the live notebook simulates and the closed forms are one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from drawing import drawn

from laga_core import MLAConfig, simulate_memory
from laga_core.charts import live, memory_explorer
from laga_core.costs import memory_cost


@pytest.fixture(scope="module")
def explorer() -> dict[str, Any]:
    return memory_explorer.explorer().to_dict()


@pytest.mark.parametrize(
    ("model", "kernel", "score", "power", "sp", "batch"),
    [
        ("paper-v3", "eager", "split", 14, 8, 1),
        ("paper-v3", "eager", "joint", 14, 8, 1),
        ("deepseek-v3", "fused", "joint", 16, 4, 2),
        ("deepseek-v2-lite", "fused", "split", 17, 1, 1),
        ("kimi-k2", "eager", "split", 13, 2, 4),
    ],
)
def test_page_and_live_notebook_agree(
    explorer: dict[str, Any], model: str, kernel: str, score: str, power: int, sp: int, batch: int
) -> None:
    _, page = drawn(explorer, model=model, kernel=kernel, score=score, log_seq=power, sp=sp, batch=batch)
    rows = live.memory_rows(model, 2**power, sp, batch, kernel, "joint" if kernel == "fused" else score)
    for row in rows:
        options = {"score": score} if row["form"] == "absorbed" and kernel == "eager" else {}
        cost = memory_cost(MLAConfig.preset(model), row["form"], kernel, 2**power, sp, batch, **options)
        assert f"{cost.peak_bytes / 1e9:,.2f}" in page, row["form"]
        assert row["peak_mb"] * 1e6 == pytest.approx(cost.peak_bytes, rel=0.02)


def test_the_longest_sequence_that_fits(explorer: dict[str, Any]) -> None:
    _, page = drawn(explorer, model="paper-v3", kernel="eager", score="split", sp=8, device=80)
    for form, options in (("Explicit", {}), ("Absorbed", {"score": "split"}), ("Laga", {})):
        text = next(each for each in page if each.startswith(f"{form} fits"))
        longest = int(re.sub(r"\D", "", text))
        config, name = MLAConfig.preset("paper-v3"), form.lower()
        assert memory_cost(config, name, "eager", longest, 8, **options).peak_bytes <= 80e9
        assert memory_cost(config, name, "eager", int(longest * 1.1) // 8 * 8, 8, **options).peak_bytes > 80e9


def test_the_puzzle_shows_the_headline() -> None:
    _, page = drawn(memory_explorer.answer().to_dict())
    for form, options in (("explicit", {}), ("absorbed", {"score": "split"}), ("laga", {})):
        peak = simulate_memory(MLAConfig.preset("paper-v3"), form, "eager", 16384, 8, **options).peak_bytes
        assert f"{peak / 1e9:,.2f}" in page


def test_the_live_explorer_says_what_is_wrong() -> None:
    box = live.memory_explorer()
    controls = {control.description: control for control in box.children[:-1]}
    controls["kernel"].value = "eager"
    assert "<table" in box.children[-1].value
    controls["model"].value = "deepseek-v2-lite"
    controls["ranks"].value = 64  # more ranks than heads
    assert "choose sp among" in box.children[-1].value
