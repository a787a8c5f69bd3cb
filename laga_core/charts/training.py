"""Charts of training runs: convergence of the forms, the schedule with experts, routing noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from ..experiments import convergence, routing_noise
from ..experiments.checks.records import published
from ..results import Record
from .theme import FORM_LABELS, INK, case, choice, dressed, form_colour

AnyChart = alt.Chart | alt.LayerChart | alt.FacetChart
FLOOR = 1e-11  # where a difference of exactly zero is drawn, on an axis that has no zero
MODEL_COLOURS = {"experts": "#CC79A7", "every expert": "#E69F00", "dense": "#56B4E9"}
MODEL_LABELS = {"experts": "routed experts", "every expert": "every token to every expert", "dense": "one wide MLP"}
CALL_COLOURS = {
    "all_to_all": "#56B4E9",
    "all_gather": "#009E73",
    "reduce_scatter": "#0072B2",
    "expert_counts": "#999999",
    "expert_dispatch": "#E69F00",
    "expert_combine": "#CC79A7",
}


def losses(records: Iterable[Record], title: str = "nats a token") -> AnyChart:
    """Loss against step, a dashed line a form; where there is more than one degree, a switch picks it.

    Where the run is the paper's, so are two dots: what it reports of start and end.
    """
    records = list(records)
    rows = [
        {"step": step, "loss": loss, "form": r.parameters["form"], "sp": r.parameters["sp"]}
        for r in records
        for step, loss in enumerate(r.metrics["loss"])
    ]
    labels = case("datum.value", {form: f"'{label}'" for form, label in FORM_LABELS.items()})
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_line(strokeWidth=2.5)
        .encode(
            x=alt.X("step:Q", title="step", axis=alt.Axis(tickCount=8)),
            y=alt.Y("loss:Q", title=f"loss, {title}"),
            color=form_colour(),
            strokeDash=alt.StrokeDash(
                "form:N",
                title=None,
                legend=alt.Legend(title=None, labelExpr=labels),  # the colour's, so that the two are one
                scale=alt.Scale(domain=list(convergence.FORMS), range=[[1, 0], [8, 6], [2, 6]]),
            ),
            tooltip=["form:N", "step:Q", alt.Tooltip("loss:Q", format=".6f")],
        )
        .properties(width=520, height=260)
    )
    description = "Loss against training step, a line for each form; the lines coincide."
    if not all(record.parameters.items() >= convergence.PAPER_RUN.items() for record in records):
        return dressed(_by_degree(chart, rows), description)
    reported = [{"step": step, "loss": loss, "label": "reported"} for step, loss in convergence.REPORTED.items()]
    base = alt.Chart(alt.InlineData(reported)).encode(x="step:Q", y="loss:Q")
    dots = base.mark_point(filled=True, size=70, color=INK).encode(tooltip=["label:N", "step:Q", "loss:Q"])
    texts = base.mark_text(align="right", dx=-4, dy=-14, fontSize=12, color=INK).encode(text="label:N")
    first = texts.transform_filter("datum.step == 0").mark_text(align="left", dx=10, fontSize=12, color=INK)
    last = texts.transform_filter("datum.step > 0")
    return dressed(_by_degree(chart, rows, dots, first, last), f"{description} Two dots: as the paper reports.")


def differences(records: Iterable[Record] | None = None) -> AnyChart:
    """The paper's figure 6b: the absolute difference of two forms' losses, at each step, on a logarithmic axis.

    By default of the published records of the paper's run.
    """
    records = published("convergence", **convergence.PAPER_RUN) if records is None else records
    rows = convergence.differences(records)
    pairs = [f"{a} − {b}" for a, b in convergence.PAIRS]
    chart = (
        alt.Chart(alt.InlineData(rows))
        .transform_calculate(shown=f"max(datum.difference, {FLOOR})")
        .mark_line(strokeWidth=1.5, opacity=0.9)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=_difference_axis("shown:Q", "difference of losses, nats"),
            color=alt.Color(
                "pair:N",
                title=None,
                legend=alt.Legend(columns=3),
                scale=alt.Scale(domain=pairs, range=["#009E73", "#D55E00", "#999999"]),
            ),
            strokeDash=alt.StrokeDash(
                "pair:N",
                title=None,
                legend=alt.Legend(columns=3),
                scale=alt.Scale(domain=pairs, range=[[1, 0], [1, 0], [4, 4]]),
            ),
            tooltip=["pair:N", "step:Q", alt.Tooltip("difference:Q", format=".1e")],
        )
        .properties(width=520, height=260)
    )
    description = (
        "Absolute difference of two forms' losses against step, on a logarithmic axis, for each pair of forms."
    )
    return dressed(_by_degree(chart, rows), description)


def schedule(record: Record | None = None) -> alt.Chart:
    """The collectives of one training step on one rank in the order of the calls, a row for each part of each layer.

    By default of the published record of 4 ranks that share the experts in pairs.
    """
    record = published("experts", sp=4, ep=2)[0] if record is None else record
    rows = []
    for number, call in enumerate(record.metrics["schedule"]):
        part = "attention" if call["running"] == "attention" else "experts"
        rows.append({**call, "call": number, "after": number + 1, "row": f"{part} {call['layer']}"})
    order = list(dict.fromkeys(row["row"] for row in rows))  # as forward meets them
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_rect(stroke="white", strokeWidth=0.5)
        .encode(
            x=alt.X(
                "call:Q",
                title="calls in order: forward, then backward",
                axis=alt.Axis(tickMinStep=1),
                scale=alt.Scale(domain=[0, len(rows) + 1], nice=False),
            ),
            x2="after:Q",
            y=alt.Y("row:N", title=None, sort=order),
            color=alt.Color(
                "collective:N",
                title=None,
                scale=alt.Scale(domain=list(CALL_COLOURS), range=list(CALL_COLOURS.values())),
                legend=alt.Legend(columns=3, labelExpr="replace(datum.label, /_/g, '-')"),
            ),
            tooltip=["collective:N", "direction:N", "layer:Q", alt.Tooltip("wire_bytes:Q", format=",", title="bytes")],
        )
        .properties(width=520, height=26 * len(order))
    )
    return dressed(
        chart,
        "The collectives of one step in the order of the calls, a row for the attention and the experts of each layer: "
        "a staircase down in forward and up again in backward; no two rows overlap.",
    )


def divergence(records: Iterable[Record] | None = None) -> AnyChart:
    """The difference of two runs at each step, a line a model; a menu picks the seed. A rule marks the first flip.

    By default of the published records.
    """
    records = published("routing_noise") if records is None else records
    records = [record for record in records if record.parameters["noise"]]
    rows, flips = [], []
    for record in records:
        cell = {"model": record.parameters["model"], "seed": record.parameters["seed"]}
        pairs = zip(record.metrics["difference"], record.metrics["flipped"], strict=True)
        rows += [
            {**cell, "step": step, "difference": float(f"{value:.3g}"), "flipped": flipped}
            for step, (value, flipped) in enumerate(pairs)
        ]
        if record.metrics["first_flip"] is not None:
            first = record.metrics["first_flip"]
            flips.append({**cell, "step": first, "late": first > len(record.metrics["flipped"]) / 2})
    seeds = sorted({row["seed"] for row in rows})
    lines = (
        alt.Chart(alt.InlineData(rows))
        .transform_filter("datum.seed == seed")
        .transform_calculate(shown=f"max(datum.difference, {FLOOR})")
        .mark_line(strokeWidth=1.8)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=_difference_axis("shown:Q", "difference of two runs, nats"),
            color=_model_colour(),
            tooltip=["model:N", "step:Q", alt.Tooltip("difference:Q", format=".1e"), "flipped:Q"],
        )
    )
    at_flip = alt.Chart(alt.InlineData(flips)).transform_filter("datum.seed == seed")
    x = alt.X("step:Q", title="step")
    rule = at_flip.mark_rule(strokeDash=[5, 4], color=INK).encode(x=x)
    words = "'first token routed elsewhere'"
    at_flip = at_flip.transform_calculate(right=f"datum.late ? '' : {words}", left=f"datum.late ? {words} : ''")
    right = at_flip.mark_text(align="left", dx=5, fontSize=12, color=INK).encode(x=x, y=alt.value(285), text="right:N")
    left = at_flip.mark_text(align="right", dx=-5, fontSize=12, color=INK).encode(x=x, y=alt.value(285), text="left:N")
    chart = alt.layer(lines, rule, right, left).properties(width=520, height=300)
    if len(seeds) > 1:
        chart = chart.add_params(choice("seed", "Seed ", seeds, menu=True))
    else:
        chart = chart.add_params(alt.param(name="seed", value=seeds[0] if seeds else 0))
    return dressed(
        chart,
        "Absolute difference of the losses of two runs of one seed, against step, on a logarithmic axis: with routed "
        "experts it jumps by orders of magnitude at the first step that routes a token elsewhere; without a choice of "
        "experts it stays near rounding.",
    )


def factors(rows: Sequence[Mapping[str, Any]] | None = None) -> AnyChart:
    """The two factors of each seed, on a logarithmic axis, with the paper's beside them; by default as published."""
    rows = routing_noise.factors(published("routing_noise", noise=True)) if rows is None else rows
    names = routing_noise.LABELS
    points = [
        {"factor": names[name], "value": row[name], "seed": row["seed"]}
        for row in rows
        for name in names
        if row[name] is not None
    ]
    reported = [{"factor": names[name], "value": value} for name, value in routing_noise.PAPER.items()]
    two_lines = case(
        "datum.value", {name: str([line.strip() for line in name.split(" ", 1)]) for name in names.values()}
    )
    y = alt.Y("factor:N", title=None, sort=list(names.values()), axis=alt.Axis(labelExpr=two_lines))
    values = [point["value"] for point in points + reported]
    domain = [min(1, *values), 2 * max(values)]
    powers = alt.Axis(values=[10**power for power in range(6)], format="~s")
    x = alt.X("value:Q", title="factor (bar: reported)", scale=alt.Scale(type="log", domain=domain), axis=powers)
    ours = (
        alt.Chart(alt.InlineData(points))
        .mark_circle(size=90, opacity=0.75, color=MODEL_COLOURS["experts"])
        .encode(x=x, y=y, tooltip=["seed:Q", alt.Tooltip("value:Q", format=",.0f")])
    )
    theirs = (
        alt.Chart(alt.InlineData(reported))
        .mark_tick(thickness=3, size=34, color=INK)
        .encode(x=x, y=y, tooltip=[alt.Tooltip("value:Q", title="reported")])
    )
    return dressed(
        alt.layer(ours, theirs).properties(width=420, height=110),
        "For each seed the ratio of the divergence with experts to that without, and the jump at the first routing "
        "flip, on a logarithmic axis; bars mark the paper's 16 and 1000.",
    )


def _difference_axis(field: str, title: str) -> alt.Y:
    axis = alt.Axis(
        values=[FLOOR, *(10.0**power for power in range(-10, 2, 2))],
        labelExpr=f"datum.value < {2 * FLOOR} ? '0' : format(datum.value, '.0e')",
    )
    return alt.Y(field, title=title, axis=axis, scale=alt.Scale(type="log", domainMin=FLOOR))


def _model_colour() -> alt.Color:
    labels = " : ".join(f"datum.label == '{name}' ? '{label}'" for name, label in MODEL_LABELS.items())
    return alt.Color(
        "model:N",
        title=None,
        scale=alt.Scale(domain=list(MODEL_COLOURS), range=list(MODEL_COLOURS.values())),
        legend=alt.Legend(labelExpr=f"{labels} : datum.label", labelLimit=220, columns=3),
    )


def _by_degree(chart: alt.Chart, rows: Sequence[Mapping[str, Any]], *above: alt.Chart) -> AnyChart:
    """Only the rows of one degree, which a switch picks where there are several; ``above`` lies on top of it."""
    degrees = sorted({row["sp"] for row in rows})
    if len(degrees) < 2:
        return alt.layer(chart, *above) if above else chart
    # Where the curves of two degrees coincide, the title says which is drawn.
    title = alt.TitleParams(text=alt.ExprRef("sp + (sp == 1 ? ' rank' : ' ranks')"), fontSize=12)
    one = chart.transform_filter("datum.sp == sp")
    whole = alt.layer(one, *above) if above else one
    return whole.properties(title=title).add_params(choice("sp", "Ranks ", degrees))
