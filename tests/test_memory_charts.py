"""The memory explorers: what the page computes, what the live notebook simulates and the closed forms are one."""

from __future__ import annotations

import re
from typing import Any

import pytest
from drawing import drawn

from laga_core import MLAConfig, simulate_memory
from laga_core.charts import live, memory, memory_explorer
from laga_core.charts.theme import FORM_LABELS
from laga_core.costs import memory_cost


@pytest.fixture(scope="module")
def explorer() -> dict[str, Any]:
    return memory_explorer.explorer().to_dict()


Chosen = dict[str, str]
SHOWN: list[tuple[str, str, Chosen, int, int, int, int]] = [
    # model, kernel, options by form, log2 of the sequence, ranks, batch, layers
    ("paper-v3", "eager", {"explicit": "packed", "absorbed": "split", "laga": "plain"}, 14, 8, 1, 1),
    ("paper-v3", "eager", {"explicit": "replicated", "absorbed": "joint", "laga": "rebuilt"}, 14, 8, 1, 4),
    ("deepseek-v3", "fused", {"explicit": "packed", "absorbed": "joint", "laga": "query"}, 16, 4, 2, 2),
    ("deepseek-v3", "tiled", {"explicit": "headless", "absorbed": "split", "laga": "query rebuilt"}, 15, 8, 1, 1),
    ("deepseek-v2-lite", "fused", {"explicit": "replicated", "absorbed": "split", "laga": "rebuilt"}, 17, 1, 1, 1),
    ("kimi-k2", "tiled", {"explicit": "replicated", "absorbed": "joint", "laga": "query"}, 13, 2, 4, 3),
]


def longest(page: list[str], form: str) -> int:
    """What the page says of the longest sequence that fits."""
    text = next(each for each in page if each.startswith(FORM_LABELS[form]) and "fit" in each)
    return 0 if "not" in text else 2**20 if "all" in text else int(re.sub(r"\D", "", text))


@pytest.mark.parametrize(("model", "kernel", "chosen", "power", "sp", "batch", "layers"), SHOWN)
def test_page_and_live_notebook_agree(
    explorer: dict[str, Any], model: str, kernel: str, chosen: Chosen, power: int, sp: int, batch: int, layers: int
) -> None:
    sizes = {"sp": sp, "batch": batch, "layers": layers}
    _, page = drawn(explorer, model=model, kernel=kernel, log_seq=power, **sizes, **chosen)
    rows = live.memory_rows(model, 2**power, kernel=kernel, **sizes, **chosen)
    for row in rows:
        form = row["form"]
        options = memory_explorer.OPTIONS[form][chosen[form]][1]
        cost = memory_cost(MLAConfig.preset(model), form, kernel, 2**power, **sizes, **options)
        assert f"{cost.peak_bytes / 1e9:,.2f}" in page, form
        assert row["peak_mb"] * 1e6 == pytest.approx(cost.peak_bytes, rel=0.02)
        shown = longest(page, form)  # the page tries twelve lengths to an octave, from 1024 tokens to a million
        assert shown <= row["longest"] < 1.1 * shown or shown == 2**20 <= row["longest"] or row["longest"] < 1100


def test_a_model_without_query_latent_cannot_gather_it(explorer: dict[str, Any]) -> None:
    _, page = drawn(explorer, model="paper-v3", laga="query")
    assert "this model has no query latent" in page and not any(text.startswith("Laga ") for text in page)
    with pytest.raises(ValueError, match="query latent"):
        live.memory_rows("paper-v3", 4096, 8, 1, 1, "fused", laga="query")


def test_what_cannot_fit_is_told(explorer: dict[str, Any]) -> None:
    _, page = drawn(explorer, model="deepseek-v3", layers=61, device=16)
    assert "Laga does not fit" in page


def test_the_puzzle_shows_the_headline() -> None:
    _, page = drawn(memory_explorer.answer().to_dict())
    for form, options in (("explicit", {}), ("absorbed", {"score": "split"}), ("laga", {})):
        peak = simulate_memory(MLAConfig.preset("paper-v3"), form, "eager", 16384, 8, **options).peak_bytes
        assert f"{peak / 1e9:,.2f}" in page


def test_the_live_explorer_draws_bars_and_says_what_is_wrong() -> None:
    box = live.memory_explorer()
    controls, shown = {control.description: control for control in box.children[:-1]}, box.children[-1]
    controls["kernel"].value = "eager"
    assert "<table" in shown.value and "probabilities" in shown.value and "longest in 80 GB" in shown.value
    controls["device, GB"].value = 96
    assert "longest in 96 GB" in shown.value
    controls["laga"].value = "query"
    controls["model"].value = "paper-v3"
    assert "query latent" in shown.value and "<table" not in shown.value


def test_the_timeline_names_operator_role_and_size() -> None:
    _, texts = drawn(memory.timeline().to_dict())
    labels = [text for text in texts if re.fullmatch(r"[\d.]+ GB after \w+: [\w ,]+ [+−][\d.]+ [GM]B", text)]
    assert len(labels) == 3 and any("probabilities" in text or "scores" in text for text in labels), texts
