"""Charts compute in Vega what the closed forms say: read from the drawn SVG, with the reader's controls set."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from drawing import drawn

from laga_core import MLAConfig, communication
from laga_core.charts import communication as charts
from laga_core.charts import equivalence, theme
from laga_core.experiments.communication import crossover, ratios

V3 = MLAConfig.preset("deepseek-v3")


@pytest.mark.parametrize(("sp", "seq", "heads"), [(8, 16384, 128), (4, 4096, 16), (64, 131072, 64)])
@pytest.mark.parametrize("accounting", ["wire", "paper"])
def test_explorer_follows_its_controls(accounting: str, sp: int, seq: int, heads: int) -> None:
    _, texts = drawn(charts.explorer().to_dict(), accounting=accounting, sp=sp, seq=seq, heads=heads)
    config = replace(V3, num_attention_heads=heads)
    for form, options in charts.VARIANTS.values():
        sent = communication(config, form, seq, sp, accounting, **options)
        gathered = sent.by_collective.get("all_gather", 0)
        label = f"{sent.total_bytes / 1e6:,.1f}" + (f", {gathered / 1e6:,.1f} gathered" if gathered else "")
        assert label in texts, (form, options, texts)
    assert f"{ratios(config, [sp], seq)[0][accounting]:.2f}" in texts
    assert f"equal at {crossover(config):.0f} ranks" in texts


@pytest.mark.parametrize("sp", [2, 8, 128])
def test_bytes_of_a_token(sp: int) -> None:
    _, texts = drawn(charts.token_bytes().to_dict(), sp=sp)
    sent = communication(V3, "laga", sp, sp).total_bytes
    assert any(text.startswith(f"{sent / 1e3:.1f}, ") for text in texts), texts


def test_the_crossing_moves_with_the_heads() -> None:
    assert "equal at 71 ranks" in drawn(charts.ratios().to_dict())[1]
    assert "equal at 9 ranks" in drawn(charts.ratios().to_dict(), heads=16)[1]


def test_deviations_show_the_chosen_tensor() -> None:
    spec = equivalence.deviations().to_dict()
    output = drawn(spec)
    gradient = drawn(spec, tensor="kv_b_proj")
    assert any("5.6e-6" in text for text in output[1]) and any("7.7e-4" in text for text in gradient[1])
    assert not any("reported" in text for text in drawn(spec, measure="relative")[1])
    assert output[0] != gradient[0]


@pytest.mark.parametrize("make", [charts.explorer, charts.ratios, charts.token_bytes, equivalence.deviations])
def test_one_visual_language(make: Any) -> None:
    spec = make().to_dict()
    assert spec["description"] and spec["autosize"] == {"type": "pad", "resize": True}
    assert spec["usermeta"]["embedOptions"]["renderer"] == "svg"
    assert spec["config"]["background"] == "transparent" and spec["config"]["axis"]["labelColor"] == "currentColor"
    svg, _ = drawn(spec)
    used = {colour.upper() for colour in re.findall(r"#[0-9a-fA-F]{6}\b", svg)}
    assert used & {colour.upper() for colour in theme.FORM_COLOURS.values()}
    assert not re.search(r"NaN|undefined", svg)
