"""Charts of communication: every number is computed in the page, from the closed forms of :mod:`laga_core.costs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import sympy
import torch

from ..config import MLAConfig
from ..costs import (
    ACCOUNTINGS,
    communication_expression,
    crossover_expression,
    substitutions,
    to_vega,
    transfers,
)
from ..costs.symbols import HEADS, SEQ, SP
from .theme import FORM_COLOURS, INK, case, choice, dressed, form_colour, slider

Layers = alt.LayerChart | alt.FacetChart  # what alt.layer says it returns

DEGREES = (2, 4, 8, 16, 32, 64, 128)
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "Explicit": ("explicit", {"key_rope": "replicated"}),
    "Explicit, rotary key once": ("explicit", {"key_rope": "headless"}),
    "Absorbed": ("absorbed", {}),
    "Laga": ("laga", {}),
}
RATIOS = {
    "on the wire": ("wire", {"key_rope": "replicated"}),
    "on the wire, rotary key sent once": ("wire", {"key_rope": "headless"}),
    "as the paper counts": ("paper", {"key_rope": "replicated"}),
}
"""How explicit / Laga may be counted: the accounting, and what explicit does."""


def explorer(model: str = "deepseek-v3") -> alt.VConcatChart:
    """Bytes that one rank sends in one forward of bf16, by form and tensor; below, the ratio against the degree."""
    config = MLAConfig.preset(model)
    controls = [
        choice("accounting", "Counted ", list(ACCOUNTINGS), ["on the wire", "as the paper does"]),
        choice("sp", "Ranks ", DEGREES, value=8),
        slider("seq", "Sequence length ", 16384, 4096, 131072, 4096),
        choice(
            "heads", "Heads ", (16, 32, 64, 128), ["16 (V2-Lite)", "32", "64 (Kimi K2)", "128 (V3)"], 128, menu=True
        ),
    ]
    chart = alt.vconcat(_bars(config), _ratios(config), spacing=28).add_params(*controls)
    return dressed(
        chart.resolve_scale(color="independent", opacity="independent", strokeDash="independent"),
        "Megabytes that one rank sends in one forward pass, as bars for each form split by tensor; below, explicit "
        "divided by Laga against the number of ranks, on the wire and as the paper counts.",
    )


def ratios(model: str = "deepseek-v3") -> Layers:
    """Explicit / Laga against the degree, under both accountings, with a control for the heads."""
    controls = [
        slider("heads", "Heads ", 128, 16, 128, 16),
        choice("accounting", "Highlight ", list(ACCOUNTINGS), ["on the wire", "as the paper does"]),
    ]
    return dressed(
        _ratios(MLAConfig.preset(model), chosen=False).add_params(*controls),
        "Bytes of explicit divided by bytes of Laga against the number of ranks: constant as the paper counts, "
        "falling on the wire, below 1 past about 0.56 ranks a head.",
    )


def token_bytes(model: str = "deepseek-v3") -> Layers:
    """What one rank sends for each of its own tokens, by tensor, as a degree control moves from 2 to 128."""
    config = MLAConfig.preset(model)
    per_token = {name: _parts(config, *variant, per_token=True) for name, variant in VARIANTS.items()}
    rows, results = _rows(per_token, "wire")
    chart = _stacked(rows, results, "KB sent for each token", 1e3, alt.Scale(domain=[0, 250]))
    return dressed(
        chart.add_params(
            slider("sp", "Ranks ", 8, 2, 128, 2), alt.param(name="heads", value=config.num_attention_heads)
        ),
        "Kilobytes that one rank sends for each of its own tokens, as bars for each form split by tensor; a "
        "control sets the number of ranks from 2 to 128.",
    )


# --- bars ---


def _parts(
    config: MLAConfig, form: str, options: Mapping[str, str], per_token: bool = False
) -> dict[str, dict[str, str]]:
    """For each tensor of a form, its bytes under each accounting as a Vega expression of sp, seq and heads."""
    share = SP / SEQ if per_token else sympy.Integer(1)
    return {
        transfer.tensor: {
            name: _vega(transfer.bytes_sent(name) * share, config, {"sp": "sp", "seq": "seq"}) for name in ACCOUNTINGS
        }
        for transfer in transfers(form, **options)
    }


def _vega(expression: sympy.Expr, config: MLAConfig, names: Mapping[str, str]) -> str:
    """The expression with this configuration's head sizes put in; heads stay a control, as whatever ``names`` says."""
    values = substitutions(config, seq=1, sp=1, batch=1, dtype=torch.bfloat16)
    values = {symbol: value for symbol, value in values.items() if symbol not in (SEQ, SP, HEADS)}
    return to_vega(sympy.simplify(expression.subs(values)), {"num_attention_heads": "heads", **names})


def _rows(
    parts: Mapping[str, Mapping[str, Mapping[str, str]]], only: str | None = None
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """A row for each bar's segment, and what its size is computed from."""
    rows: list[dict[str, Any]] = []
    results: dict[int, str] = {}
    for variant, tensors in parts.items():
        for place, (tensor, counted) in enumerate(tensors.items()):
            results[len(rows)] = counted[only] if only else case("accounting", counted)
            form, options = VARIANTS[variant]
            moved = {transfer.tensor: transfer.collective for transfer in transfers(form, **options)}
            row = {"variant": variant, "form": form, "tensor": tensor, "collective": moved[tensor], "place": place}
            rows.append({"id": len(rows), **row})
    return rows, results


def _bars(config: MLAConfig) -> Layers:
    rows, results = _rows({name: _parts(config, *variant) for name, variant in VARIANTS.items()})
    return _stacked(rows, results, "MB sent by one rank in one forward", 1e6)


def _stacked(
    rows: Sequence[Mapping[str, Any]], results: Mapping[int, str], title: str, unit: float, scale: Any = alt.Undefined
) -> Layers:
    y = alt.Y("variant:N", sort=list(VARIANTS), title=None, axis=alt.Axis(ticks=False, domain=False, labelLimit=180))
    base = (
        alt.Chart(alt.InlineData(list(rows)))
        .transform_calculate(sent=f"({case('datum.id', results)}) / {unit:g}")
        .transform_calculate(gathered="datum.collective == 'all_gather' ? datum.sent : 0")
        .transform_joinaggregate(total="sum(sent)", gathered="sum(gathered)", groupby=["variant"])
        .transform_joinaggregate(longest="max(total)")
    )
    stack: dict[str, Any] = {"stack": "zero", "title": title}
    bars = base.mark_bar(stroke="white", strokeWidth=1, height=26).encode(
        x=alt.X("sent:Q", scale=scale, **stack),
        y=y,
        color=form_colour(legend=False),
        order=alt.Order("place:Q"),
        tooltip=[
            alt.Tooltip("variant:N", title="form"),
            alt.Tooltip("tensor:N", title="tensor"),
            alt.Tooltip("sent:Q", title=title, format=",.1f"),
            alt.Tooltip("total:Q", title="in all", format=",.1f"),
        ],
    )
    names = (
        base.transform_calculate(label="datum.sent > 0.07 * datum.longest ? datum.tensor : ''")
        .mark_text(color="white", fontSize=11, fontWeight=600)
        .encode(x=alt.X("sent:Q", bandPosition=0.5, **stack), y=y, order=alt.Order("place:Q"), text="label:N")
    )
    totals = (
        base.transform_filter("datum.place == 0")
        .transform_calculate(label=_TOTAL)
        .mark_text(align="left", dx=5, fontSize=12)
        .encode(x=alt.X("total:Q", title=title), y=y, text="label:N")
    )
    return alt.layer(bars, names, totals).properties(width=460, height=alt.Step(36))


_TOTAL = "format(datum.total, ',.1f') + (datum.gathered > 0 ? ', ' + format(datum.gathered, ',.1f') + ' gathered' : '')"


# --- ratios ---


def _ratios(config: MLAConfig, chosen: bool = True) -> Layers:
    results, accountings = {}, {}
    for name, (accounting, options) in RATIOS.items():
        explicit = communication_expression("explicit", accounting, **options)
        ratio = explicit / communication_expression("laga", accounting)
        results[name] = _vega(ratio, config, {"sp": "datum.ranks"})
        accountings[name] = f"'{accounting}'"
    x = alt.X(
        "ranks:Q",
        title="ranks",
        scale=alt.Scale(type="log", base=2, domain=[2, 128]),
        axis=alt.Axis(values=list(DEGREES), format="d"),
    )
    y = alt.Y("ratio:Q", title="explicit / Laga", scale=alt.Scale(domain=[0.4, 2.1], clamp=True))
    base = (
        alt.Chart(alt.sequence(2, 129, 1, as_="ranks"))
        .transform_calculate(name=f"split({'|'.join(RATIOS)!r}, '|')")
        .transform_flatten(["name"], as_=["counted"])
        .transform_calculate(
            ratio=case("datum.counted", results),
            weight=f"({case('datum.counted', accountings)}) == accounting ? 1 : 0.35",
        )
        .transform_filter("datum.ranks <= heads")
    )
    legend = alt.Legend(orient="bottom-left", columns=1, labelLimit=320, offset=8)
    counted = alt.StrokeDash("counted:N", sort=list(RATIOS), title=None, legend=legend)
    weight = alt.Opacity("weight:Q", scale=None, legend=None)
    lines = base.mark_line(color=FORM_COLOURS["laga"], strokeWidth=2.5).encode(
        x=x, y=y, strokeDash=counted, opacity=weight
    )
    powers = base.transform_filter(f"indexof({list(DEGREES)}, datum.ranks) >= 0")
    tooltip = [
        alt.Tooltip("ranks:Q", title="ranks"),
        alt.Tooltip("counted:N"),
        alt.Tooltip("ratio:Q", title="explicit / Laga", format=".2f"),
    ]
    points = powers.mark_point(filled=True, size=55, color=FORM_COLOURS["laga"]).encode(
        x=x, y=y, opacity=weight, detail="counted:N", tooltip=tooltip
    )
    one = alt.Chart(alt.InlineData([{"ratio": 1}])).mark_rule(opacity=0.6, color=INK).encode(y="ratio:Q")
    tie = "'equal at ' + format(datum.ranks, '.0f') + ' ranks'"
    equal = (
        alt.Chart(alt.InlineData([{"ratio": 1}]))
        .transform_calculate(ranks=_vega(crossover_expression(), config, {}), label=tie)
        .mark_text(align="right", dx=-2, dy=12, fontSize=12, color=INK)
        .encode(x=x, y=y, text="label:N")
    )
    layers = [lines, points, one, equal]
    if chosen:
        main = "datum.ranks == sp && datum.weight == 1 && datum.counted != 'on the wire, rotary key sent once'"
        picked = powers.transform_filter(main)
        layers.insert(0, picked.mark_rule(opacity=0.35, color=INK).encode(x=x))
        value = picked.mark_text(dx=5, dy=-10, align="left", fontSize=12, fontWeight=600, color=INK)
        layers.append(value.encode(x=x, y=y, text=alt.Text("ratio:Q", format=".2f")))
    return alt.layer(*layers).properties(width=460, height=230)
