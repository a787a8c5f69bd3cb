"""The paper's figures drawn again from its numbers, with ours beside them: dots are reported, bars and lines are ours.

Figure 2 is a drawing of the dataflow; :mod:`laga_core.charts.stepper` lets one step through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import altair as alt

from ..costs import ACCOUNTINGS, communication
from ..experiments import communication as communication_experiment
from ..experiments import memory as memory_experiment
from ..experiments.checks.records import published
from ..experiments.memory import FORMS, FUSED, paper_config
from ..experiments.paper import read_table
from ..experiments.throughput import across_nodes_fit
from ..results import Store
from . import memory, training
from .theme import FORM_COLOURS, FORM_LABELS, INK, case, dressed, form_colour

AnyChart = alt.Chart | alt.LayerChart | alt.FacetChart | alt.HConcatChart | alt.VConcatChart
_LABELS = case("datum.value", {key: f"'{text}'" for key, text in FORM_LABELS.items()})
COUNTED = {"paper": "as the paper counts", "wire": "on the wire"}
_FORM_AXIS = alt.Axis(
    labelExpr=case("datum.value", {key: f"'{text}'" for key, text in FORM_LABELS.items()}), ticks=False
)


def figure_1(seq: int = 16384, sp: int = 8) -> AnyChart:
    """The teaser: bytes sent, and peak memory under the eager and the fused kernel."""
    cell = {"seq": seq, "sp": sp}
    sent = _beside(lambda form: communication(paper_config(), form, seq, sp).total_bytes / 1e6, "table1", 1, **cell)
    eager = _beside(lambda form: _peak_gb(form, "eager", **cell), "table2", 1e3, **cell)
    fused = _beside(lambda form: _peak_gb(form, FUSED, **cell), "table4", 1e3, kernel="fused", **cell)
    panels = [
        _bars(sent, "MB sent by one rank in one forward"),
        _bars(eager, "GB at the peak, eager kernel"),
        _bars(fused, "GB at the peak, fused kernel"),
    ]
    return dressed(
        alt.vconcat(*panels, spacing=18),
        "Bars of ours and dots of the paper's: megabytes sent, and gigabytes at the peak under two kernels.",
    )


def figure_3() -> AnyChart:
    """Explicit / Laga in bytes: against the ranks, and against the heads."""
    table = {(int(row["sp"]), int(row["seq"])): row for row in read_table("table1")}
    ranks = [
        {"ranks": sp, "kind": "reported", "tokens": seq, "ratio": float(row["explicit_mb"]) / float(row["laga_mb"])}
        for (sp, seq), row in table.items()
    ]
    degrees = sorted({sp for sp, _ in table})
    for found in communication_experiment.ratios(paper_config(), degrees, 16384):
        ranks += [{"ranks": found["sp"], "kind": COUNTED[name], "ratio": found[name]} for name in ACCOUNTINGS]
    heads = []
    for row in communication_experiment.figure_3b():
        heads.append({"heads": row["heads"], "kind": "reported", "ratio": row["reported"]})
        heads += [{"heads": row["heads"], "kind": COUNTED[name], "ratio": row[name]} for name in ACCOUNTINGS]
    chart = alt.hconcat(_ratio(ranks, "ranks"), _ratio(heads, "heads"), spacing=24)
    return dressed(
        chart,
        "Bytes of explicit divided by bytes of Laga against ranks and against heads: reported dots lie on the line of "
        "the paper's accounting, above that of the wire.",
    )


def figure_4() -> AnyChart:
    """Peak memory against the sequence, on 8 ranks."""
    return memory.sequence(memory_experiment.beside_the_paper(Store()))


def figure_4_heads() -> AnyChart:
    """What absorbed adds to explicit, against the heads."""
    return memory.heads(memory_experiment.heads_sweep(Store()))


def figure_5() -> AnyChart:
    """Laga's throughput over explicit's on two nodes, and what bytes at the paper's own link rate predict."""
    rows = [
        {"tokens": cell["seq"], "kernel": kernel, "reported": cell["reported"], "predicted": float(cell["bytes_only"])}
        for kernel in ("eager", "fused")
        for cell in across_nodes_fit(kernel)["predicted"]
    ]
    kernels = ["eager", "fused"]
    base = alt.Chart(alt.InlineData(rows)).encode(
        x=alt.X("tokens:O", title="tokens", axis=alt.Axis(labelAngle=0, labelExpr="format(datum.value, ',')")),
        tooltip=[
            "tokens:Q",
            "kernel:N",
            *(alt.Tooltip(f"{kind}:Q", format=".2f") for kind in ("reported", "predicted")),
        ],
    )
    y: dict[str, Any] = {"title": "Laga / explicit, tokens a second", "scale": alt.Scale(domain=[0.7, 1.3])}
    dash = alt.StrokeDash("kernel:N", title=None, scale=alt.Scale(domain=kernels, range=[[5, 4], [1, 0]]))
    shape = alt.Shape("kernel:N", title=None, scale=alt.Scale(domain=kernels, range=["square", "circle"]))
    lines = base.mark_line(color=FORM_COLOURS["laga"], strokeWidth=2.5, point=False)
    marks = base.mark_point(color=INK, size=80, filled=True)
    one = alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(opacity=0.5, color=INK)
    chart = alt.layer(
        one.encode(y=alt.Y("one:Q", **y)),
        lines.encode(y=alt.Y("predicted:Q", **y), strokeDash=dash),
        marks.encode(y=alt.Y("reported:Q", **y), shape=shape),
    )
    return dressed(
        chart.properties(width=460, height=240),
        "Laga's throughput divided by explicit's on two nodes: reported dots, and lines predicted from bytes; the "
        "eager dot at 4096 tokens lies far below its line.",
    )


def figure_6() -> AnyChart:
    """Loss of each form at each step, at the paper's size."""
    return training.losses(_memorising())


def figure_6_differences() -> AnyChart:
    """How far the losses of two forms lie apart at each step."""
    return training.differences(_memorising())


def _memorising() -> list[Any]:
    return published("convergence", task="random tokens", hidden=512, lr=1e-3)


def _beside(ours: Callable[[str], float], table: str, unit: float, **where: Any) -> list[dict[str, Any]]:
    """A row for each form: ours, and what a cell of the paper's table has in ``unit``s."""
    (cell,) = read_table(table, **where)
    return [{"form": form, "ours": ours(form), "reported": float(cell[f"{form}_mb"]) / unit} for form in FORMS]


def _peak_gb(form: str, kernel: str, seq: int, sp: int) -> float:
    score = "split" if (form, kernel) == ("absorbed", "eager") else None
    return memory_experiment.peak_mb(Store(), form=form, kernel=kernel, score=score, seq=seq, sp=sp) / 1e3


def _bars(rows: Sequence[Mapping[str, Any]], title: str) -> AnyChart:
    base = alt.Chart(alt.InlineData(list(rows))).encode(
        y=alt.Y("form:N", sort=list(FORMS), title=None, axis=alt.Axis(labelExpr=_LABELS, ticks=False)),
        tooltip=["form:N", alt.Tooltip("ours:Q", format=",.2f"), alt.Tooltip("reported:Q", format=",.2f")],
    )
    most = 1.15 * max(max(row["ours"], row["reported"]) for row in rows)  # room for the number beside the last dot
    x = alt.X("ours:Q", title=title, scale=alt.Scale(domain=[0, most], nice=False))
    bars = base.mark_bar(height=18).encode(x=x, color=form_colour(legend=False))
    dots = base.mark_point(color=INK, filled=True, size=70).encode(x="reported:Q")
    told = base.mark_text(align="left", dx=8, color=INK).encode(
        x="reported:Q", text=alt.Text("reported:Q", format=",.1f")
    )
    return alt.layer(bars, dots, told).properties(width=460, height=alt.Step(28))


def _ratio(rows: Iterable[Mapping[str, Any]], against: str) -> AnyChart:
    base = alt.Chart(alt.InlineData(list(rows))).encode(
        x=alt.X(f"{against}:O", title=against, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("ratio:Q", title="explicit / Laga", scale=alt.Scale(domain=[1, 2])),
        tooltip=[f"{against}:O", "kind:N", alt.Tooltip("ratio:Q", format=".2f")],
    )
    lines = base.transform_filter("datum.kind != 'reported'").mark_line(color=FORM_COLOURS["laga"], strokeWidth=2.5)
    dots = base.transform_filter("datum.kind == 'reported'").mark_point(color=INK, filled=True, size=70)
    dash = alt.StrokeDash("kind:N", title=None, sort=list(COUNTED.values()))
    return alt.layer(lines.encode(strokeDash=dash), dots).properties(width=210, height=220)
