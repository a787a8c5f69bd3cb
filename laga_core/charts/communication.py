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
from ..costs.symbols import CONTEXT, HEADS, NODE, SEQ, SP
from ..forms import STRONG_EXPLICIT
from .theme import FORM_COLOURS, INK, case, choice, dressed, form_colour, slider

Layers = alt.LayerChart | alt.FacetChart  # what alt.layer says it returns

DEGREES = (2, 4, 8, 16, 32, 64, 128)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Explicit": ("explicit", {}),
    "Strong explicit": ("explicit", STRONG_EXPLICIT),
    "Absorbed": ("absorbed", {}),
    "Laga": ("laga", {"context": 2}),
    "Query latent": ("laga", {"context": 2, "query": "latent"}),
}
"""Form and options. The closed form of R = 2 is that of any R, 1 included."""

PER_NODE = 8
COUNTS = {"wire": "on the wire", "nodes": f"between nodes of {PER_NODE}", "paper": "as the paper does"}
"""How bytes may be counted: the accounting, or what of the wire bytes leaves a node."""

RATIOS = {
    "on the wire": ("wire", {"key_rope": "replicated"}),
    "on the wire, rotary key sent once": ("wire", {"key_rope": "headless"}),
    "as the paper counts": ("paper", {"key_rope": "replicated"}),
}
"""How explicit / Laga may be counted: the accounting, and what explicit does."""


def explorer(model: str = "deepseek-v3") -> Layers:
    """Bytes that one rank sends in one forward of bf16, by form or member of the family, and by tensor."""
    config = MLAConfig.preset(model)
    heads = {16: "16 (V2-Lite)", 32: "32", 64: "64 (Kimi K2)", 128: "128 (V3)"}
    rows, results = _rows({name: _parts(config, *variant) for name, variant in VARIANTS.items()})
    controls = [
        choice("accounting", "Counted ", list(COUNTS), list(COUNTS.values())),
        choice("sp", "Ranks ", DEGREES, value=8, menu=True),
        choice("groups", "Context R ", (1, 2, 4, 8, 16), menu=True),
        slider("seq", "Sequence length ", 16384, 4096, 131072, 4096),
        choice("heads", "Heads ", list(heads), list(heads.values()), 128, menu=True),
        alt.param(name="context", expr="min(groups, sp)"),
    ]
    return dressed(
        _stacked(rows, results, "MB", "sent by one rank in one forward", 1e6).add_params(*controls),
        "Megabytes that one rank sends in one forward pass, as a bar for each form and for the query latent, split by "
        "tensor; controls set the ranks, the groups R between which only the latent crosses, the sequence length and "
        "the heads, and whether all bytes are counted, those between nodes, or as the paper counts.",
    )


def ratios(model: str = "deepseek-v3") -> Layers:
    """Explicit / Laga against the degree, under both accountings, with controls for ranks and heads."""
    controls = [
        choice("accounting", "Highlight ", list(ACCOUNTINGS), [COUNTS[name] for name in ACCOUNTINGS]),
        choice("sp", "Ranks ", DEGREES, value=8, menu=True),
        slider("heads", "Heads ", 128, 16, 128, 16),
    ]
    return dressed(
        _ratios(MLAConfig.preset(model)).add_params(*controls),
        "Bytes of explicit divided by bytes of Laga against the number of ranks: constant as the paper counts, "
        "falling on the wire, below 1 past about 0.56 ranks a head.",
    )


def token_bytes(model: str = "deepseek-v3") -> Layers:
    """What one rank sends for each of its own tokens, by tensor, as a degree control moves from 2 to 128."""
    config = MLAConfig.preset(model)
    forms = ("Explicit", "Absorbed", "Laga")
    rows, results = _rows({name: _parts(config, *VARIANTS[name], per_token=True) for name in forms}, "wire")
    fixed = {"heads": config.num_attention_heads, "context": 1}
    return dressed(
        _stacked(rows, results, "KB", "sent for each token", 1e3, most=250).add_params(
            slider("sp", "Ranks ", 8, 2, 128, 2), *(alt.param(name=name, value=value) for name, value in fixed.items())
        ),
        "Kilobytes that one rank sends for each of its own tokens, as bars for each form split by tensor; a "
        "control sets the number of ranks from 2 to 128.",
    )


# --- bars ---


def _parts(
    config: MLAConfig, form: str, options: Mapping[str, Any], per_token: bool = False
) -> dict[str, dict[str, str]]:
    """For each tensor of a form, its bytes by each of :data:`COUNTS` as a Vega expression of what the reader sets."""
    share = SP / SEQ if per_token else sympy.Integer(1)
    names = {"sp": "sp", "seq": "seq", "context": "context"}
    return {
        transfer.tensor: {
            count: _vega(
                (transfer.bytes_between_nodes() if count == "nodes" else transfer.bytes_sent(count)) * share,
                config,
                names,
            )
            for count in COUNTS
        }
        for transfer in transfers(form, **options)
    }


def _vega(expression: sympy.Expr, config: MLAConfig, names: Mapping[str, str]) -> str:
    """The expression with this configuration's head sizes put in; heads stay a control, as whatever ``names`` says."""
    values = substitutions(config, seq=1, sp=1, batch=1, dtype=torch.bfloat16) | {NODE: PER_NODE}
    values = {symbol: value for symbol, value in values.items() if symbol not in (SEQ, SP, HEADS, CONTEXT)}
    return to_vega(expression.subs(values), {"num_attention_heads": "heads", **names})


def _rows(
    parts: Mapping[str, Mapping[str, Mapping[str, str]]], only: str | None = None
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """A row for each bar's segment, and what its size is computed from."""
    rows: list[dict[str, Any]] = []
    results: dict[int, str] = {}
    for variant, tensors in parts.items():
        form, options = VARIANTS[variant]
        moved = {transfer.tensor: transfer.collective for transfer in transfers(form, **options)}
        for place, (tensor, counted) in enumerate(tensors.items()):
            results[len(rows)] = counted[only] if only else case("accounting", counted)
            row = {"variant": variant, "form": form, "tensor": tensor, "collective": moved[tensor], "place": place}
            rows.append({"id": len(rows), **row})
    return rows, results


def _stacked(
    rows: Sequence[Mapping[str, Any]], results: Mapping[int, str], unit: str, what: str, size: float, most: int = 0
) -> Layers:
    """Bars split by tensor, what they add up to written above each; ``most`` fixes the end of the axis."""
    title = f"{unit} {what}"
    y = alt.Y("variant:N", sort=list(VARIANTS), axis=None)
    base = (
        alt.Chart(alt.InlineData(list(rows)))
        .transform_calculate(sharing="datum.form == 'laga' ? sp / context : sp")  # the ranks that heads are split over
        .transform_calculate(sent=f"datum.sharing > heads ? 0 : ({case('datum.id', results)}) / {size:g}")
        .transform_calculate(gathered="datum.collective == 'all_gather' ? datum.sent : 0")
        .transform_joinaggregate(total="sum(sent)", gathered="sum(gathered)", groupby=["variant"])
        .transform_joinaggregate(longest="max(total)")
    )
    scale = alt.Scale(domain=[0, most]) if most else alt.Undefined
    stack: dict[str, Any] = {"stack": "zero", "title": title}
    bars = base.mark_bar(stroke="white", strokeWidth=1, height=24).encode(
        x=alt.X("sent:Q", scale=scale, axis=alt.Axis(tickCount=6), **stack),
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
    # A name is written where it fits, by about 7 pixels a letter.
    fits = f"datum.sent / max({most}, datum.longest) * width > 7 * length(datum.tensor) + 4"
    names = (
        base.transform_calculate(label=f"{fits} ? datum.tensor : ''")
        .mark_text(color="white", fontSize=11, fontWeight=600)
        .encode(x=alt.X("sent:Q", bandPosition=0.5, **stack), y=y, order=alt.Order("place:Q"), text="label:N")
    )
    totals = (
        base.transform_filter("datum.place == 0")
        .transform_calculate(label=_LABEL.replace("UNIT", unit))
        .transform_calculate(_least="max(datum.total, 1)")  # where nothing is sent there is an axis nevertheless
    )
    told = totals.mark_text(align="left", dy=-21, fontSize=12).encode(x=alt.value(0), y=y, text="label:N")
    ends = totals.mark_tick(opacity=0).encode(x=alt.X("_least:Q", title=title), y=y)
    return alt.layer(bars, names, told, ends).properties(width=520, height=alt.Step(50))


_LABEL = (
    "datum.variant + (datum.form == 'laga' && context > 1 ? ', R = ' + context : '') + ': ' + (datum.sharing > heads "
    "? heads + ' heads do not split over ' + datum.sharing + ' ranks' : format(datum.total, ',.1f') + ' UNIT' "
    "+ (datum.gathered > 0 ? ', ' + format(datum.gathered, ',.1f') + ' gathered' : ''))"
)


# --- ratios ---


def _ratios(config: MLAConfig) -> Layers:
    results, accountings = {}, {}
    for name, (accounting, options) in RATIOS.items():
        explicit = communication_expression("explicit", accounting, **options)
        ratio = sympy.cancel(explicit / communication_expression("laga", accounting))
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
    main = "datum.ranks == sp && datum.weight == 1 && datum.counted != 'on the wire, rotary key sent once'"
    picked = powers.transform_filter(main)
    here = picked.mark_rule(opacity=0.35, color=INK).encode(x=x)
    value = picked.mark_text(dx=5, dy=-10, align="left", fontSize=12, fontWeight=600, color=INK)
    value = value.encode(x=x, y=y, text=alt.Text("ratio:Q", format=".2f"))
    return alt.layer(here, lines, points, one, equal, value).properties(width=520, height=230)
