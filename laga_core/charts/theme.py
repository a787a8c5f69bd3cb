"""The charts' one visual language: a colour for each form, text in the page's own colour, nothing behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import altair as alt

FORM_COLOURS = {"explicit": "#0072B2", "absorbed": "#D55E00", "laga": "#009E73"}
"""Okabe and Ito's blue, vermilion and green: told apart also by the colour-blind."""

FORM_LABELS = {"explicit": "Explicit", "absorbed": "Absorbed", "laga": "Laga"}

INK = "currentColor"  # the page's text colour, light or dark
_FAINT = {"gridColor": INK, "gridOpacity": 0.14, "domainColor": INK, "domainOpacity": 0.5, "tickColor": INK}
CONFIG: dict[str, Any] = {
    "background": "transparent",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif",
    "view": {"stroke": None},
    "axis": {"labelColor": INK, "titleColor": INK, "tickOpacity": 0.5, "titleFontWeight": "normal", **_FAINT},
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "orient": "top",
        "titleFontWeight": "normal",
        "symbolBaseFillColor": INK,
    },
    "header": {"labelColor": INK, "titleColor": INK},
    "title": {"color": INK, "subtitleColor": INK, "anchor": "start", "fontWeight": 600},
    "text": {"color": INK},
    "rule": {"color": INK},
}

AnyChart = TypeVar("AnyChart", bound=alt.TopLevelMixin)


def dressed(chart: AnyChart, description: str) -> AnyChart:
    """The chart in this project's dress, drawn as SVG; ``description`` is its text for those who cannot see it."""
    return chart.configure(**CONFIG).properties(
        description=description,
        autosize=alt.AutoSizeParams(type="pad", resize=True),
        usermeta={"embedOptions": {"renderer": "svg", "actions": False}},
    )


def form_colour(title: str | None = None, field: str = "form:N", legend: bool = True) -> alt.Color:
    """The colour channel of a field that names forms."""
    shown = alt.Legend(title=title, labelExpr=_labels(FORM_LABELS)) if legend else None
    return alt.Color(
        field, scale=alt.Scale(domain=list(FORM_COLOURS), range=list(FORM_COLOURS.values())), legend=shown, title=title
    )


def slider(name: str, label: str, value: float, least: float, most: float, step: float) -> alt.Parameter:
    """A number that the reader sets by a slider."""
    return alt.param(name=name, value=value, bind=alt.binding_range(min=least, max=most, step=step, name=label))


def choice(name: str, label: str, options: Sequence[Any], labels: Sequence[str] | None = None, value: Any = None,
           menu: bool = False) -> alt.Parameter:  # fmt: skip
    """One of a few values, as radio buttons or as a ``menu``; the first unless ``value`` says otherwise."""
    bind = alt.binding_select if menu else alt.binding_radio
    shown: dict[str, Any] = {} if labels is None else {"labels": list(labels)}
    start = options[0] if value is None else value
    return alt.param(name=name, value=start, bind=bind(options=list(options), name=label, **shown))


def case(field: str, results: Mapping[Any, str]) -> str:
    """A Vega expression: the one of ``results`` whose key ``field`` equals, null where none does."""
    text = "null"
    for key, result in reversed(list(results.items())):
        text = f"{field} == {key!r} ? ({result}) : {text}"
    return text


def _labels(names: Mapping[str, str]) -> str:
    return case("datum.value", {key: f"'{text}'" for key, text in names.items()})
