"""How far the forms lie apart: measured deviations from the explicit form in one process."""

from __future__ import annotations

from collections.abc import Iterable

import altair as alt

from ..experiments.checks.records import published
from ..experiments.equivalence import BOUNDS, EXPERIMENT, table
from ..results import Record
from .theme import INK, choice, dressed, form_colour

FLOOR = 1e-17  # where a deviation of exactly zero is drawn, on an axis that has no zero
TENSORS = {
    "output": "output",
    "hidden": "gradient of the input",
    "q_proj": "gradient of W_q",
    "kv_b_proj": "gradient of W_kv_b",
    "kv_a_proj_with_mqa": "gradient of W_kv_a",
    "kv_a_layernorm": "gradient of the norm",
    "o_proj": "gradient of W_o",
}


def deviations(records: Iterable[Record] | None = None) -> alt.LayerChart | alt.FacetChart:
    """Largest deviation from explicit in one process, by degree, form and dtype; by default of the published records.

    A menu picks the tensor, a switch absolute or relative deviation. The paper's bounds are lines.
    """
    records = published(EXPERIMENT) if records is None else list(records)
    known = records[0].metrics["absolute"] if records else {}
    tensors = {name: label for name, label in TENSORS.items() if name in known}
    rows = [row for name in tensors for row in table(records, name)]
    base = (
        alt.Chart(alt.InlineData(rows))
        .transform_filter("datum.tensor == tensor")
        .transform_calculate(
            deviation="measure == 'absolute' ? datum.absolute : datum.relative",
            shown=f"max(measure == 'absolute' ? datum.absolute : datum.relative, {FLOOR})",
        )
    )
    axis = alt.Axis(
        values=[FLOOR, *(10.0**power for power in range(-16, 0, 2))],
        labelExpr=f"datum.value < {2 * FLOOR} ? 'exactly 0' : format(datum.value, '.0e')",
    )
    x = alt.X("sp:O", title="ranks", axis=alt.Axis(labelAngle=0))
    y = alt.Y("shown:Q", title="largest deviation", axis=axis, scale=alt.Scale(type="log", domain=[FLOOR, 1e-2]))
    points = base.mark_point(size=110, strokeWidth=2.5, filled=False, opacity=0.9).encode(
        x=x,
        y=y,
        xOffset=alt.XOffset("form:N", sort=["explicit", "absorbed", "laga"]),
        color=form_colour(),
        shape=alt.Shape(
            "dtype:N",
            title=None,
            scale=alt.Scale(domain=["float32", "float64"], range=["circle", "square"]),
        ),
        tooltip=["form:N", "dtype:N", alt.Tooltip("sp:O", title="ranks"), alt.Tooltip("deviation:Q", format=".1e")],
    )
    bounds = (
        alt.Chart(alt.InlineData([{"tensor": name, "bound": bound} for name, bound in BOUNDS.items()]))
        .transform_filter("datum.tensor == tensor && measure == 'absolute'")
        .transform_calculate(text="'reported by the paper for fp32: ' + format(datum.bound, '.1e')")
    )
    rule = bounds.mark_rule(strokeDash=[5, 4], opacity=0.8, color=INK).encode(y="bound:Q")
    label = bounds.mark_text(align="left", dx=4, dy=-8, fontSize=12, color=INK).encode(
        y="bound:Q", x=alt.value(0), text="text:N"
    )
    chart = alt.layer(rule, label, points).properties(width=460, height=300)
    return dressed(
        chart.add_params(
            choice("tensor", "Tensor ", list(tensors), list(tensors.values()), menu=True),
            choice("measure", "Deviation ", ["absolute", "relative"], ["absolute", "relative to the largest element"]),
        ),
        "Largest deviation of each form from the explicit form in one process, on a logarithmic axis, against the "
        "number of ranks, in single and double precision; a menu picks the tensor.",
    )
