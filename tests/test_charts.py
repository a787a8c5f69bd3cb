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


@pytest.mark.parametrize(
    ("sp", "seq", "heads", "groups"),
    [(8, 16384, 128, 1), (16, 16384, 128, 2), (4, 4096, 16, 16), (64, 131072, 64, 8), (64, 16384, 16, 2)],
)
@pytest.mark.parametrize("counted", ["wire", "nodes", "paper"])
def test_explorer_follows_its_controls(counted: str, sp: int, seq: int, heads: int, groups: int) -> None:
    controls = {"accounting": counted, "sp": sp, "seq": seq, "heads": heads, "groups": groups}
    _, texts = drawn(charts.explorer().to_dict(), **controls)
    config, context = replace(V3, num_attention_heads=heads), min(groups, sp)
    for name, (form, options) in charts.VARIANTS.items():
        in_laga = form == "laga"
        label = name + (f", R = {context}" if in_laga and context > 1 else "") + ": "
        shared = sp // context if in_laga else sp
        if heads % shared:
            assert f"{label}{heads} heads do not split over {shared} ranks" in texts
            continue
        given = {**options, "context": context} if in_laga else options
        accounting = "paper" if counted == "paper" else "wire"
        sent = communication(config, form, seq, sp, accounting, ranks_per_node=8 if sp > 8 else sp, **given)
        total = sent.inter_node_bytes if counted == "nodes" else sent.total_bytes
        assert total is not None
        found = next(text for text in texts if text.startswith(label))
        assert found.startswith(f"{label}{total / 1e6:,.1f} MB"), found
        if counted != "nodes":
            gathered = sent.by_collective.get("all_gather", 0)
            assert found.endswith(f", {gathered / 1e6:,.1f} gathered" if gathered else "MB"), found


@pytest.mark.parametrize(("sp", "heads"), [(8, 128), (4, 16), (64, 64)])
@pytest.mark.parametrize("accounting", ["wire", "paper"])
def test_ratios_follow_their_controls(accounting: str, sp: int, heads: int) -> None:
    _, texts = drawn(charts.ratios().to_dict(), accounting=accounting, sp=sp, heads=heads)
    config = replace(V3, num_attention_heads=heads)
    assert f"{ratios(config, [sp], 16384)[0][accounting]:.2f}" in texts
    assert f"equal at {crossover(config):.0f} ranks" in texts


@pytest.mark.parametrize("sp", [2, 8, 128])
def test_bytes_of_a_token(sp: int) -> None:
    _, texts = drawn(charts.token_bytes().to_dict(), sp=sp)
    sent = communication(V3, "laga", sp, sp).total_bytes
    assert any(text.startswith(f"Laga: {sent / 1e3:.1f} KB, ") for text in texts), texts


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
