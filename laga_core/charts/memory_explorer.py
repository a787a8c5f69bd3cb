"""Memory and what it buys, computed in the page from the closed forms: the explorer, and the answer to the puzzle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt
import sympy

from ..config import MLAConfig
from ..costs import communication_expression, memory_moments, peak_expression, to_vega
from ..costs.memory import memory_values
from ..costs.symbols import BATCH, SEQ, SP
from .memory import ROLE_COLOURS, role_colour
from .theme import FORM_LABELS, INK, case, choice, dressed, form_colour, slider

Layers = alt.LayerChart | alt.FacetChart

MODELS = {
    "paper-v3": "the paper's",
    "deepseek-v3": "DeepSeek-V3",
    "deepseek-v2-lite": "V2-Lite",
    "kimi-k2": "Kimi K2",
}
VARIANTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "explicit eager": ("explicit", "eager", {}),
    "absorbed eager joint": ("absorbed", "eager", {"score": "joint"}),
    "absorbed eager split": ("absorbed", "eager", {"score": "split"}),
    "laga eager": ("laga", "eager", {}),
    "explicit fused": ("explicit", "fused", {}),
    "absorbed fused": ("absorbed", "fused", {}),
    "laga fused": ("laga", "fused", {}),
}
_SHOWN = (
    "indexof(datum.variant, kernel) > 0 && "
    "(kernel == 'fused' || datum.form != 'absorbed' || indexof(datum.variant, score) > 0)"
)


def explorer() -> alt.VConcatChart:
    """Peak by role for each form, and below it the peak against the sequence with the device's memory as a line."""
    controls = [
        choice("model", "Model ", list(MODELS), list(MODELS.values()), "deepseek-v3", menu=True),
        choice("kernel", "Kernel ", ["eager", "fused"], ["eager", "memory-linear"], "fused"),
        choice("score", "Absorbed's score ", ["split", "joint"], ["two products", "one"], "joint"),
        slider("log_seq", "Sequence length, 2^ ", 14, 10, 20, 1),
        choice("sp", "Ranks ", [1, 2, 4, 8, 16], value=8),
        slider("batch", "Batch ", 1, 1, 8, 1),
        slider("device", "Device memory, GB ", 80, 16, 192, 8),
    ]
    chart = alt.vconcat(_bars(MODELS), _curves(MODELS), spacing=24).add_params(*controls, *_dimensions(MODELS))
    return dressed(
        chart.resolve_scale(color="independent"),
        "Peak memory of one layer for explicit, absorbed and Laga, stacked by role; below, the peak against the "
        "sequence length, with the memory of a device as a line and the longest sequence that fits for each form.",
    )


def answer() -> alt.VConcatChart:
    """The puzzle in one picture: bytes sent and bytes held by each form, for the paper's dimensions."""
    models = {"paper-v3": MODELS["paper-v3"]}
    controls = [
        choice("kernel", "Kernel ", ["eager", "fused"], ["eager", "memory-linear"]),
        choice("score", "Absorbed's score ", ["split", "joint"], ["two products", "one"]),
        slider("log_seq", "Sequence length, 2^ ", 14, 12, 17, 1),
        choice("sp", "Ranks ", [2, 4, 8, 16], value=8),
    ]
    fixed = [alt.param(name="model", value="paper-v3"), alt.param(name="batch", value=1)]
    chart = alt.vconcat(_sent(), _bars(models), spacing=20).add_params(*controls, *fixed, *_dimensions(models))
    return dressed(
        chart.resolve_scale(color="independent"),
        "Bars for explicit, absorbed and Laga: megabytes that one rank sends in a forward pass, and gigabytes that it "
        "holds at the peak of a training step, by role.",
    )


def _sent() -> Layers:
    sizes = {form: _vega(communication_expression(form), "pow(2, log_seq)") for form in FORM_LABELS}
    base = alt.Chart(alt.InlineData([{"form": form} for form in FORM_LABELS])).transform_calculate(
        mb=f"({case('datum.form', sizes)}) / 1e6"
    )
    x = alt.X("mb:Q", title="MB sent by one rank in one forward")
    y = alt.Y("form:N", sort=list(FORM_LABELS), title=None, axis=alt.Axis(labelExpr=_LABELS, ticks=False, domain=False))
    bars = base.mark_bar(height=20).encode(x=x, y=y, color=form_colour(legend=False))
    told = base.mark_text(align="left", dx=5, color=INK).encode(x=x, y=y, text=alt.Text("mb:Q", format=",.1f"))
    return alt.layer(bars, told).properties(width=480, height=alt.Step(30))


def _dimensions(models: Mapping[str, str]) -> list[alt.Parameter]:
    """A param for each dimension of the chosen model."""
    values = {name: memory_values(MLAConfig.preset(name), seq=1, sp=1) for name in models}
    symbols = {symbol for each in values.values() for symbol in each} - {SEQ, SP, BATCH}
    chosen = {
        symbol.name: case("model", {name: str(each.get(symbol, 0)) for name, each in values.items()})
        for symbol in sorted(symbols, key=str)
    }
    return [alt.param(name=name, expr=expression) for name, expression in chosen.items()]


def _group(role: str) -> str:
    """Few enough roles to tell colours apart: what is always small, or passes by in backward, goes together."""
    if role.startswith("gradient of ") and role not in ROLE_COLOURS:
        return "gradients of activations"
    return role if role in ROLE_COLOURS and role != "log-sum-exp" else "other"


def _vega(expression: sympy.Expr, seq: str) -> str:
    return to_vega(expression, {"seq": seq})


def _bars(models: Mapping[str, str]) -> Layers:
    rows: list[dict[str, Any]] = []
    sizes: dict[str, dict[int, str]] = {}
    for variant, (form, kernel, options) in VARIANTS.items():
        for moment in memory_moments(form, kernel, **options):
            grouped: dict[str, sympy.Expr] = {}
            for role, size in moment.roles.items():
                grouped[_group(role)] = grouped.get(_group(role), sympy.S.Zero) + size
            for role, size in grouped.items():
                sizes.setdefault(variant, {})[len(rows)] = _vega(size, "pow(2, log_seq)")
                row = {"id": len(rows), "variant": variant, "form": form, "moment": moment.name, "role": role}
                rows.append(row)
    order = {role: place for place, role in enumerate(dict.fromkeys(row["role"] for row in rows))}
    rows = [row | {"place": order[row["role"]]} for row in rows]
    bytes_ = case("datum.variant", {variant: case("datum.id", each) for variant, each in sizes.items()})
    base = (
        alt.Chart(alt.InlineData(rows))
        .transform_filter(_SHOWN)
        .transform_calculate(gb=f"({bytes_}) / 1e9")
        .transform_joinaggregate(total="sum(gb)", groupby=["form", "moment"])
        .transform_joinaggregate(peak="max(total)", groupby=["form"])
        .transform_filter("datum.total == datum.peak && datum.gb > 0")
    )
    y = alt.Y("form:N", sort=list(FORM_LABELS), title=None, axis=alt.Axis(labelExpr=_LABELS, ticks=False, domain=False))
    bars = base.mark_bar(height=24).encode(
        x=alt.X("gb:Q", title="GB at the peak, one layer", stack="zero"),
        y=y,
        color=role_colour(rows),
        order=alt.Order("place:Q"),
        tooltip=[
            alt.Tooltip("role:N"),
            alt.Tooltip("gb:Q", format=",.3f", title="GB"),
            alt.Tooltip("total:Q", format=",.3f", title="in all"),
            alt.Tooltip("moment:N", title="peak in"),
        ],
    )
    totals = (
        base.transform_aggregate(peak="max(peak)", groupby=["form"])
        .mark_text(align="left", dx=5, color=INK)
        .encode(x=alt.X("peak:Q"), y=y, text=alt.Text("peak:Q", format=",.2f"))
    )
    return alt.layer(bars, totals).properties(width=480, height=alt.Step(34))


_POWER = "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : datum.value / 1024 + 'K'"
_LABELS = case("datum.value", {key: f"'{label}'" for key, label in FORM_LABELS.items()})


def _curves(models: Mapping[str, str]) -> Layers:
    rows = [{"variant": variant, "form": form} for variant, (form, _, _) in VARIANTS.items()]
    peak = case(
        "datum.variant", {v: _vega(peak_expression(f, k, **o), "datum.seq") for v, (f, k, o) in VARIANTS.items()}
    )
    base = (
        alt.Chart(alt.InlineData(rows))
        .transform_filter(_SHOWN)
        .transform_calculate(power="sequence(10, 20.01, 0.125)")
        .transform_flatten(["power"])
        .transform_calculate(seq="sp * round(pow(2, datum.power) / sp)")
        .transform_calculate(gb=f"({peak}) / 1e9")
    )
    x = alt.X(
        "seq:Q", title="tokens", scale=alt.Scale(type="log", base=2), axis=alt.Axis(labelExpr=_POWER, tickCount=6)
    )
    y = alt.Y("gb:Q", title="GB at the peak", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", tickCount=5))
    lines = base.mark_line().encode(x=x, y=y, color=form_colour(legend=False))
    limit = alt.Chart(alt.InlineData([{}])).transform_calculate(gb="device").mark_rule(strokeDash=[4, 3], color=INK)
    fits = base.transform_filter("datum.gb <= device").transform_aggregate(longest="max(seq)", groupby=["form"])
    told = fits.transform_calculate(
        text="({explicit: 'Explicit', absorbed: 'Absorbed', laga: 'Laga'})[datum.form] + ' fits ' + "
        "(datum.longest >= pow(2, 20) ? 'all shown' : format(datum.longest, ',.0f') + ' tokens')",
        row="indexof(['explicit', 'absorbed', 'laga'], datum.form) * 16 + 40",
    )
    label = told.mark_text(align="left", baseline="top", fontSize=12, fontWeight=600).encode(
        x=alt.value(8), y=alt.Y("row:Q", scale=None, axis=None), text="text:N", color=form_colour(legend=False)
    )
    curves = alt.layer(lines, limit.encode(y=y))
    return alt.layer(curves, label).resolve_scale(y="independent").properties(width=480, height=220)
