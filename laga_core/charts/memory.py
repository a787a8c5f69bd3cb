"""Charts of memory: the timeline of a step, what the trap is made of, and what each form keeps for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from ..config import MLAConfig
from ..costs import FLOOR
from ..costs.memory import memory_values
from ..experiments import memory as experiment
from ..memory import simulate_memory
from ..results import Store
from .theme import FORM_COLOURS, FORM_LABELS, INK, case, choice, dressed, form_colour

ROLE_COLOURS = {
    "weights": "#BBBBBB",
    "gradients": "#999999",
    "hidden": "#666666",
    "q": "#6699CC",
    "k": "#004488",
    "v": "#88CCEE",
    "latent": "#009E73",
    "q_absorbed": "#D55E00",
    "latent accumulator": "#EE9955",
    "output": "#117733",
    "log-sum-exp": "#DDDDDD",
    "scores": "#EECC66",
    "probabilities": "#DDAA33",
    "gradient of scores": "#AA4499",
    "gradient of probabilities": "#CC6677",
    "gradient of weights": "#997700",
    "gradients of activations": "#CC99BB",
    "causal mask": "#555522",
    "kernel workspace": "#882255",
    "other": "#44AA99",
}
"""One colour for each role, here and in the explorer; related roles are close to each other."""


def timeline(seq: int = 16384, sp: int = 8) -> alt.FacetChart:
    """Memory through one step of each form, stacked by role, under a cursor that the three share."""
    rows = experiment.timeline(experiment.paper_config(), seq, sp)
    totals: Counter[tuple[str, int]] = Counter()
    for row in rows:
        totals[row["form"], row["slot"]] += row["mb"]
    slots = max(row["slot"] for row in rows)
    turn = min(row["slot"] for row in rows if row["phase"] == "backward")
    summit = max(totals, key=totals.__getitem__)[1]
    cursor = alt.selection_point(
        name="cursor", fields=["slot"], nearest=True, on="pointermove", empty=False, value=[{"slot": summit}]
    )
    x = alt.X("slot:Q", title=None, axis=None, scale=alt.Scale(domain=[0, slots], nice=False))
    base = alt.Chart()
    areas = base.mark_area(interpolate="step-after").encode(
        x=x,
        y=alt.Y("mb:Q", stack="zero", title="GB held", axis=alt.Axis(labelExpr="datum.value / 1000", tickCount=5)),
        color=role_colour(rows),
        order=alt.Order("place:Q"),
    )
    told = base.transform_joinaggregate(total="sum(mb)", groupby=["form", "slot"])
    moment = told.transform_filter("datum.first").encode(x=x)
    points = moment.mark_point(opacity=0, size=1).encode(y=alt.Y("total:Q")).add_params(cursor)
    rule = moment.transform_filter(cursor).mark_rule(color=INK, opacity=0.8)
    label = (
        moment.transform_filter(cursor)
        .transform_calculate(text=f"format(datum.total / 1000, '.1f') + ' GB after ' + {_CHANGE}")
        .mark_text(align="left", baseline="top", color=INK, fontSize=12)
        .encode(x=alt.value(6), y=alt.value(4), text="text:N")
    )
    halves = alt.Chart().mark_rule(strokeDash=[3, 3], color=INK, opacity=0.4).transform_filter(f"datum.slot == {turn}")
    layers = alt.layer(areas, halves.encode(x=x), points, rule, label).properties(width=560, height=130)
    chart = layers.facet(
        data=alt.InlineData(_placed(rows)),
        row=alt.Row(
            "form:N",
            sort=list(FORM_LABELS),
            title=None,
            header=alt.Header(labelExpr=case("datum.value", {k: f"'{v}'" for k, v in FORM_LABELS.items()}),
                              labelAnchor="start", labelOrient="top", labelFontWeight="bold"),
        ),
        spacing=6,
    )  # fmt: skip
    return dressed(chart, "Memory held through forward and backward by the explicit, absorbed and Laga forms.")


def decomposition(sp: int = 8) -> alt.Chart:
    """What absorbed adds to explicit's peak: reported, and simulated in its two parts."""
    rows = []
    for row in experiment.decomposition(Store(), sp=sp):
        label = f"{row['seq']:,} tokens"
        rows += [
            {"seq": label, "bar": "reported", "part": "reported by the paper", "mb": row["reported_mb"]},
            {
                "seq": label,
                "bar": "simulated",
                "part": "gone when scores are joined",
                "mb": row["score_mb"],
            },
            {"seq": label, "bar": "simulated", "part": "tensors of the latent's size", "mb": row["latent_mb"]},
        ]
    colours = {"reported by the paper": "#888888", "gone when scores are joined": "#DDAA33",
               "tensors of the latent's size": FORM_COLOURS["absorbed"]}  # fmt: skip
    chart = (
        alt.Chart(alt.InlineData(rows))
        .mark_bar()
        .encode(
            x=alt.X("mb:Q", title="MB above explicit's peak", axis=alt.Axis(tickCount=5)),
            y=alt.Y("seq:N", title=None, sort=[row["seq"] for row in rows]),
            yOffset=alt.YOffset("bar:N", sort=["reported", "simulated"]),
            color=alt.Color(
                "part:N",
                title=None,
                scale=alt.Scale(domain=list(colours), range=list(colours.values())),
                legend=alt.Legend(columns=1, labelLimit=320),
            ),
            tooltip=["seq:N", "part:N", alt.Tooltip("mb:Q", format=",.0f", title="MB")],
        )
        .properties(width=500, height=alt.Step(24))
    )
    return dressed(chart, "Memory that absorbed adds to explicit: reported, and simulated in two parts.")


def heads(rows: Sequence[Mapping[str, Any]]) -> alt.LayerChart | alt.FacetChart:
    """Figure 4's sweep over the heads, from the rows of ``experiments.memory.heads_sweep``."""
    kinds = {"reported_mb": "reported", "split_mb": "simulated, two score products", "joint_mb": "simulated, one"}
    points = [
        {"heads": row["heads"], "kind": name, "mb": row[column]} for row in rows for column, name in kinds.items()
    ]
    base = alt.Chart(alt.InlineData(points)).encode(
        x=alt.X("heads:Q", title="heads", axis=alt.Axis(values=[row["heads"] for row in rows])),
        y=alt.Y("mb:Q", title="absorbed − explicit, MB"),
        detail="kind:N",
        tooltip=["heads:Q", "kind:N", alt.Tooltip("mb:Q", format=",.0f", title="MB")],
    )
    return dressed(
        alt.layer(
            base.mark_line(color=FORM_COLOURS["absorbed"]),
            base.mark_point(color=FORM_COLOURS["absorbed"], size=70).encode(
                shape=alt.Shape(
                    "kind:N", title=None, sort=list(kinds.values()), legend=alt.Legend(labelLimit=220, columns=2)
                )
            ),
        ).properties(width=480, height=240),
        "Absorbed above explicit in MB against the heads: reported and simulated lie on each other on a straight line; "
        "with one score product almost nothing is left.",
    )


def sequence(rows: Sequence[Mapping[str, Any]], sp: int = 8) -> alt.LayerChart | alt.FacetChart:
    """Figure 4's sweep over the sequence, from the eager rows of ``experiments.memory.beside_the_paper``."""
    points = [
        {"tokens": row["seq"], "form": row["form"], "kind": kind, "gb": row[f"{kind}_mb"] / 1000}
        for row in rows
        if row["source"] == "table 2" and row["sp"] == sp
        for kind in ("reported", "simulated")
    ]
    base = alt.Chart(alt.InlineData(points)).encode(
        x=alt.X("tokens:Q", title="tokens", axis=alt.Axis(values=[4096, 8192, 16384])),
        y=alt.Y("gb:Q", title="peak, GB"),
        color=form_colour(),
        tooltip=["tokens:Q", "form:N", "kind:N", alt.Tooltip("gb:Q", format=".2f", title="GB")],
    )
    lines = base.transform_filter("datum.kind == 'simulated'").mark_line()
    marks = base.transform_filter("datum.kind == 'reported'").mark_point(size=80)
    return dressed(
        alt.layer(lines, marks).properties(width=480, height=260),
        "Peak memory against the sequence length, simulated as lines and reported as marks: absorbed grows away from "
        "explicit and Laga, which lie on each other.",
    )


def saved(seq: int = 16384, sp: int = 8) -> alt.LayerChart | alt.FacetChart:
    """What each form keeps between forward and backward under a memory-linear kernel, by role, and the floor."""
    controls = [choice("model", "Model ", ["paper-v3", "deepseek-v3"], ["as in the paper", "DeepSeek-V3"])]
    labels = {**FORM_LABELS, "floor": "Floor"}
    rows = []
    for model in ("paper-v3", "deepseek-v3"):
        config = MLAConfig.preset(model)
        kept = {
            form: simulate_memory(config, form=form, kernel=experiment.FUSED, seq=seq, sp=sp).saved_breakdown
            for form in FORM_LABELS
        }
        values = memory_values(config, seq=seq, sp=sp)
        kept["floor"] = {role: int(size.subs(values)) for role, size in FLOOR.items()}
        for form, roles in kept.items():
            rows += [{"model": model, "form": form, "role": role, "mb": size / 1e6} for role, size in roles.items()]
    base = (
        alt.Chart(alt.InlineData(_placed(rows)))
        .transform_filter("datum.model == model")
        .transform_joinaggregate(total="sum(mb)", groupby=["form"])
    )
    y = alt.Y(
        "form:N",
        sort=list(labels),
        title=None,
        axis=alt.Axis(labelExpr=case("datum.value", {k: f"'{v}'" for k, v in labels.items()})),
    )
    bars = base.mark_bar().encode(
        x=alt.X("mb:Q", title="MB kept for backward, one layer", stack="zero"),
        y=y,
        color=role_colour(rows),
        order=alt.Order("place:Q"),
        tooltip=["role:N", alt.Tooltip("mb:Q", format=",.1f", title="MB"), alt.Tooltip("total:Q", format=",.0f")],
    )
    totals = (
        base.transform_filter("datum.first")
        .mark_text(align="left", dx=5, color=INK)
        .encode(x=alt.X("total:Q"), y=y, text=alt.Text("total:Q", format=",.0f"))
    )
    chart = alt.layer(bars, totals).properties(width=480, height=alt.Step(34)).add_params(*controls)
    return dressed(
        chart,
        "Saved activations of one layer by role, for explicit, absorbed and Laga, and the least that has to be kept.",
    )


# "_softmax: probabilities +8.59 GB"
_CHANGE = (
    "datum.operator + ': ' + datum.changed + ' ' + (abs(datum.change_mb) < 100 ? "
    "format(datum.change_mb, '+.1f') + ' MB' : format(datum.change_mb / 1000, '+.2f') + ' GB')"
)


def role_colour(rows: Iterable[Mapping[str, Any]]) -> alt.Color:
    """The colour channel of ``role``, its legend restricted to the roles that occur, in the order of the stack."""
    known = {row["role"] for row in rows}
    domain = [role for role in ROLE_COLOURS if role in known] + sorted(known - set(ROLE_COLOURS))
    colours = [ROLE_COLOURS.get(role, "#AAAA00") for role in domain]
    return alt.Color(
        "role:N",
        title=None,
        scale=alt.Scale(domain=domain, range=colours),
        legend=alt.Legend(columns=4, symbolType="square", labelLimit=180),
    )


def _placed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their place in the stack, and a mark on the first row of each bar or moment."""
    order = {role: place for place, role in enumerate(ROLE_COLOURS)}
    seen: set[tuple[Any, ...]] = set()
    placed = []
    for row in rows:
        key = (row.get("model"), row["form"], row.get("slot"))
        placed.append(row | {"place": order.get(row["role"], len(order)), "first": key not in seen})
        seen.add(key)
    return placed
