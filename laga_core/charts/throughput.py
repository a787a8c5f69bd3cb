"""Charts of throughput: what bytes predict, beside what was reported and what emulated links show."""

from __future__ import annotations

import altair as alt
import sympy
import torch

from ..config import MLAConfig
from ..costs import communication_expression, substitutions, to_vega, transfers
from ..costs.choice import arithmetic
from ..costs.symbols import HEADS, SEQ, SP
from ..experiments import emulated as emulation
from ..experiments import throughput as experiment
from .theme import FORM_COLOURS, FORM_LABELS, INK, case, choice, dressed, form_colour, slider

Layers = alt.LayerChart | alt.FacetChart


def emulated() -> Layers:
    """Explicit / Laga and explicit / absorbed against the speed of the emulated links: the records, and the model."""
    rows = []
    for row in emulation.predicted(emulation.published()):
        speed = "no limit" if row["mbit_s"] is None else f"{row['mbit_s']:g}"
        common = {"speed": speed, "ranks": f"{row['sp']} ranks", "form": row["form"]}
        rows += [{**common, "kind": kind, "ratio": row[kind]} for kind in ("emulated", "predicted")]
    order = list(dict.fromkeys(row["speed"] for row in rows))
    colour = form_colour()
    colour["legend"]["values"] = ["laga", "absorbed"]
    base = alt.Chart().encode(
        x=alt.X("speed:O", sort=order, title="Mbit/s of each link", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("ratio:Q", title="explicit / form, step time", scale=alt.Scale(zero=False)),
        color=colour,
        tooltip=["form:N", "ranks:N", "speed:O", "kind:N", alt.Tooltip("ratio:Q", format=".2f")],
    )
    lines = base.transform_filter("datum.kind == 'predicted'").mark_line()
    marks = base.transform_filter("datum.kind == 'emulated'").mark_point(size=80, strokeWidth=2, opacity=1)
    equal = alt.Chart().mark_rule(strokeDash=[3, 3], opacity=0.5).encode(y=alt.datum(1))
    header = alt.Header(labelAnchor="start", labelOrient="top", labelFontWeight="bold")
    chart = alt.layer(equal, lines, marks).properties(width=480, height=150).facet(
        data=alt.InlineData(rows), row=alt.Row("ranks:N", title=None, header=header), spacing=12
    )  # fmt: skip
    return dressed(
        chart,
        "Explicit divided by Laga and by absorbed in step time against link speed, on two and on four ranks: the model "
        "as lines, emulated links as marks; the advantage shrinks as links get faster.",
    )


def reported() -> Layers:
    """Laga's speed-up in tables 4 (fused) and 5 (fused): reported as marks, predicted from bytes as bars."""
    rows = []
    for cell in experiment.link_fit("table 4", "fused")["predicted"]:
        rows.append(_cell("one node", cell["seq"], cell["reported"], cell["predicted"]))
    for cell in experiment.across_nodes_fit()["predicted"]:
        rows.append(_cell("two nodes", cell["seq"], cell["reported"], cell["bytes_only"]))
    base = alt.Chart(alt.InlineData(rows)).encode(
        y=alt.Y("cell:N", sort=[str(row["cell"]) for row in rows], title=None, axis=alt.Axis(labelLimit=200)),
        tooltip=["cell:N", alt.Tooltip("reported:Q", format=".3f"), alt.Tooltip("predicted:Q", format=".3f")],
    )
    scale = alt.Scale(domain=[1, 1.4])
    bars = base.mark_bar(color=FORM_COLOURS["laga"], opacity=0.6, height=14).encode(
        x=alt.X("predicted:Q", title="explicit / Laga, step time", scale=scale), x2=alt.datum(1)
    )
    marks = base.mark_point(color=INK, filled=True, size=70).encode(x=alt.X("reported:Q", scale=scale))
    return dressed(
        alt.layer(bars, marks).properties(width=480, height=alt.Step(30)),
        "Laga's speed-up in the fused cells of tables 4 and 5: bars are predicted from bytes, dots are reported.",
    )


def explorer(model: str = "paper-v3") -> Layers:
    """Step time of each form on a machine that the reader sets; computed in the page from the closed forms."""
    config = MLAConfig.preset(model)
    controls = [
        slider("link", "Link, GB/s ", 10, 1, 200, 1),
        slider("latency", "Latency of a collective, µs ", 30, 0, 500, 10),
        slider("rate", "Device, TFLOP/s ", 150, 10, 1000, 10),
        slider("seq", "Sequence length ", 16384, 4096, 131072, 4096),
        choice("sp", "Ranks ", (2, 4, 8, 16), value=8),
        choice("heads", "Heads ", (16, 32, 64, 128), value=128),
    ]
    parts: dict[str, dict[str, str]] = {"computing": {}, "sending": {}, "latency": {}}
    for form in FORM_LABELS:
        forward, backward = (arithmetic(form, config.causal, config.q_lora_rank is not None, d)
                             for d in ("forward", "backward"))  # fmt: skip
        parts["computing"][form] = f"({_vega(sympy.Add(*forward, *backward), config)}) / rate / 1e9"
        parts["sending"][form] = f"2 * ({_vega(communication_expression(form), config)}) / link / 1e6"
        parts["latency"][form] = f"{2 * len(transfers(form))} * latency / 1e3"
    rows = [{"form": form, "part": part, "place": n} for form in FORM_LABELS for n, part in enumerate(parts)]
    base = (
        alt.Chart(alt.InlineData(rows))
        .transform_calculate(ms=case("datum.part", {part: case("datum.form", ms) for part, ms in parts.items()}))
        .transform_joinaggregate(total="sum(ms)", groupby=["form"])
        .transform_joinaggregate(best="min(total)")
    )
    labels = case("datum.value", {key: f"'{text}'" for key, text in FORM_LABELS.items()})
    y = alt.Y("form:N", sort=list(FORM_LABELS), title=None, axis=alt.Axis(labelExpr=labels))
    bars = base.mark_bar(height=24).encode(
        x=alt.X("ms:Q", stack="zero", title="ms of one layer, forward and backward"),
        y=y,
        color=form_colour(legend=False),
        opacity=alt.Opacity("part:O", title=None, scale=alt.Scale(domain=list(parts), range=[1, 0.55, 0.25])),
        order=alt.Order("place:Q"),
        tooltip=["form:N", "part:N", alt.Tooltip("ms:Q", format=".2f"), alt.Tooltip("total:Q", format=".2f")],
    )
    totals = (
        base.transform_filter("datum.part == 'computing'")
        .transform_calculate(text="format(datum.total, '.1f') + (datum.total == datum.best ? ' ms, fastest' : ' ms')")
        .mark_text(align="left", dx=5, color=INK)
        .encode(x=alt.X("total:Q"), y=y, text="text:N")
    )
    return dressed(
        alt.layer(bars, totals).properties(width=440, height=alt.Step(36)).add_params(*controls),
        "Step time of explicit, absorbed and Laga split into computing, sending and latency, with controls for link, "
        "latency, device, sequence, ranks and heads; the fastest is marked.",
    )


def _cell(where: str, seq: int, reported: float, predicted: float) -> dict[str, object]:
    return {"cell": f"{where}, {seq:,} tokens", "reported": reported, "predicted": predicted}


def _vega(expression: sympy.Expr, config: MLAConfig) -> str:
    values = substitutions(config, seq=1, sp=1, batch=1, dtype=torch.bfloat16)
    values = {symbol: value for symbol, value in values.items() if symbol not in (SEQ, SP, HEADS)}
    return to_vega(sympy.simplify(expression.subs(values)), {"num_attention_heads": "heads"})
