"""Memory and what it buys, computed in the page from the closed forms: the explorer, and the answer to the puzzle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt
import sympy

from ..config import MLAConfig
from ..costs import communication_expression, memory_moments, to_vega
from ..costs.memory import LAYERS, memory_values
from ..costs.symbols import BATCH, SEQ, SP
from ..forms import STRONG_EXPLICIT
from .memory import ROLE_COLOURS, role_colour
from .theme import FORM_LABELS, INK, case, choice, dressed, form_colour, slider

Layers = alt.LayerChart | alt.FacetChart

MODELS = {
    "paper-v3": "the paper's",
    "deepseek-v3": "DeepSeek-V3",
    "deepseek-v2-lite": "V2-Lite",
    "kimi-k2": "Kimi K2",
}
KERNELS = {"eager": "eager", "fused": "memory-linear", "tiled": "tiled"}
OPTIONS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "explicit": {
        "replicated": ("rotary key for each head", {}),
        "headless": ("rotary key once", {"key_rope": "headless"}),
        "packed": ("once, in one exchange", dict(STRONG_EXPLICIT)),
    },
    "absorbed": {
        "split": ("two score products", {"score": "split"}),
        "joint": ("one score product", {"score": "joint"}),
    },
    "laga": {
        "plain": ("as in the paper", {}),
        "rebuilt": ("keys, values rebuilt", {"recompute": True}),
        "query": ("query latent", {"query": "latent"}),
        "query rebuilt": ("query latent, all rebuilt", {"query": "latent", "recompute": True}),
    },
}
"""What the explorers offer for each form: a name, in words, and the form's options."""


def explorer() -> alt.VConcatChart:
    """Peak by role for each form, and below it the peak against the sequence with the device's memory as a line."""
    controls = [
        choice("model", "Model ", list(MODELS), list(MODELS.values()), "deepseek-v3", menu=True),
        choice("kernel", "Kernel ", list(KERNELS), list(KERNELS.values()), "fused"),
        _options("explicit"),
        _options("absorbed", "joint"),
        _options("laga"),
        slider("log_seq", "Sequence length, 2^ ", 14, 10, 20, 1),
        choice("sp", "Ranks ", [1, 2, 4, 8, 16], value=8),
        slider("batch", "Batch ", 1, 1, 8, 1),
        slider("layers", "Layers ", 1, 1, 61, 1),
        slider("device", "Device memory, GB ", 80, 16, 192, 8),
    ]
    shown = _Shown(KERNELS, OPTIONS)
    chart = alt.vconcat(shown.bars(), shown.curves(), spacing=24).add_params(*controls, *_dimensions(MODELS))
    return dressed(
        chart.resolve_scale(color="independent"),
        "Peak memory of a training step for explicit, absorbed and Laga, stacked by role; below, the peak against the "
        "sequence length, with the memory of a device as a line and the longest sequence that fits for each form.",
    )


def answer() -> alt.VConcatChart:
    """The puzzle in one picture: bytes sent and bytes held by each form, for the paper's dimensions."""
    models = {"paper-v3": MODELS["paper-v3"]}
    kernels = {name: KERNELS[name] for name in ("eager", "fused")}
    options = {form: {name: each for name, each in found.items() if form == "absorbed" or not each[1]}
               for form, found in OPTIONS.items()}  # fmt: skip
    controls = [
        choice("kernel", "Kernel ", list(kernels), list(kernels.values())),
        _options("absorbed"),
        slider("log_seq", "Sequence length, 2^ ", 14, 12, 17, 1),
        choice("sp", "Ranks ", [2, 4, 8, 16], value=8),
    ]
    fixed = {"model": "paper-v3", "batch": 1, "layers": 1, "explicit": "replicated", "laga": "plain"}
    params = [*controls, *(alt.param(name=name, value=value) for name, value in fixed.items()), *_dimensions(models)]
    chart = alt.vconcat(_sent(), _Shown(kernels, options).bars(), spacing=20).add_params(*params)
    return dressed(
        chart.resolve_scale(color="independent"),
        "Bars for explicit, absorbed and Laga: megabytes that one rank sends in a forward pass, and gigabytes that it "
        "holds at the peak of a training step, by role.",
    )


def _options(form: str, start: str | None = None) -> alt.Parameter:
    """The control named as the form: one of its options."""
    labels = [words for words, _ in OPTIONS[form].values()]
    return choice(form, f"{FORM_LABELS[form]} ", list(OPTIONS[form]), labels, start, menu=True)


def _sent() -> Layers:
    sizes = {form: to_vega(communication_expression(form), {"seq": "pow(2, log_seq)"}) for form in FORM_LABELS}
    base = alt.Chart(alt.InlineData([{"form": form} for form in FORM_LABELS])).transform_calculate(
        mb=f"({case('datum.form', sizes)}) / 1e6"
    )
    x = alt.X("mb:Q", title="MB sent by one rank in one forward")
    bars = base.mark_bar(height=20).encode(x=x, y=_y(), color=form_colour(legend=False))
    told = base.mark_text(align="left", dx=5, color=INK).encode(x=x, y=_y(), text=alt.Text("mb:Q", format=",.1f"))
    return alt.layer(bars, told).properties(width=480, height=alt.Step(30))


def _dimensions(models: Mapping[str, str]) -> list[alt.Parameter]:
    """A param for each dimension of the chosen model."""
    values = {name: memory_values(MLAConfig.preset(name), seq=1, sp=1) for name in models}
    symbols = {symbol for each in values.values() for symbol in each} - {SEQ, SP, BATCH, LAYERS}
    chosen = {
        symbol.name: case("model", {name: str(each.get(symbol, 0)) for name, each in values.items()})
        for symbol in sorted(symbols, key=str)
    }
    return [alt.param(name=name, expr=expression) for name, expression in chosen.items()]


def _y() -> alt.Y:
    scale = alt.Scale(domain=list(FORM_LABELS))
    return alt.Y("form:N", title=None, scale=scale, axis=alt.Axis(labelExpr=_LABELS, ticks=False, domain=False))


_POWER = "datum.value >= 1048576 ? datum.value / 1048576 + 'M' : datum.value / 1024 + 'K'"
_LABELS = case("datum.value", {key: f"'{label}'" for key, label in FORM_LABELS.items()})


class _Shown:
    """A row for each tensor that a form may hold at a moment, under each kernel and option.

    Many are of one size: each size is written once, and a row says which of them is its.
    """

    def __init__(self, kernels: Iterable[str], options: Mapping[str, Mapping[str, tuple[str, dict[str, Any]]]]) -> None:
        sizes: dict[sympy.Expr, int] = {}
        self.rows: list[dict[str, Any]] = []
        for kernel in kernels:
            for form, found in options.items():
                for name, (_, given) in found.items():
                    for moment in memory_moments(form, kernel, **given):
                        here = {"kernel": kernel, "form": form, "option": name, "moment": moment.name}
                        for role, size in _grouped(moment.roles).items():
                            self.rows.append(here | {"role": role, "size": sizes.setdefault(size, len(sizes))})
        self.sizes = list(sizes)
        order = {role: place for place, role in enumerate(dict.fromkeys(row["role"] for row in self.rows))}
        self.rows = [row | {"place": order[row["role"]]} for row in self.rows]

    def chosen(self) -> alt.Chart:
        """The rows of the chosen kernel and options; a model without a query latent has none where Laga gathers it."""
        option = case("datum.form", {form: form for form in FORM_LABELS})
        return (
            alt.Chart(alt.InlineData(self.rows))
            .transform_filter(f"datum.kernel == kernel && datum.option == ({option})")
            .transform_filter(f"datum.form != 'laga' || !({_NO_QUERY_LATENT})")
        )

    def gigabytes(self, seq: str) -> str:
        """The expression of a row's GB at a sequence length."""
        sizes = {number: to_vega(size, {"seq": seq}) for number, size in enumerate(self.sizes)}
        return f"({case('datum.size', sizes)}) / 1e9"

    def bars(self) -> Layers:
        """What each form holds at its peak, by role."""
        base = (
            self.chosen()
            .transform_calculate(gb=self.gigabytes("pow(2, log_seq)"))
            .transform_joinaggregate(total="sum(gb)", groupby=["form", "moment"])
            .transform_joinaggregate(peak="max(total)", groupby=["form"])
            .transform_filter("datum.total == datum.peak && datum.gb > 0")
        )
        bars = base.mark_bar(height=24).encode(
            x=alt.X("gb:Q", title="GB at the peak", stack="zero"),
            y=_y(),
            color=role_colour(self.rows),
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
            .encode(x=alt.X("peak:Q"), y=_y(), text=alt.Text("peak:Q", format=",.2f"))
        )
        missing = (
            alt.Chart(alt.InlineData([{"form": "laga", "text": "this model has no query latent"}]))
            .transform_filter(_NO_QUERY_LATENT)
            .mark_text(align="left", dx=5, color=INK)
            .encode(x=alt.datum(0), y=_y(), text="text:N")
        )
        return alt.layer(bars, totals, missing).properties(width=480, height=alt.Step(34))

    def curves(self) -> Layers:
        """The peak against the sequence, the device's memory, and the longest sequence that fits."""
        base = (
            self.chosen()
            .transform_calculate(power="sequence(10, 20.01, 0.125)")
            .transform_flatten(["power"])
            .transform_calculate(seq="sp * round(pow(2, datum.power) / sp)")
            .transform_calculate(gb=self.gigabytes("datum.seq"))
            .transform_aggregate(gb="sum(gb)", groupby=["form", "moment", "seq"])
            .transform_aggregate(gb="max(gb)", groupby=["form", "seq"])
        )
        x = alt.X(
            "seq:Q", title="tokens", scale=alt.Scale(type="log", base=2), axis=alt.Axis(labelExpr=_POWER, tickCount=6)
        )
        y = alt.Y("gb:Q", title="GB at the peak", scale=alt.Scale(type="log"), axis=alt.Axis(format="~s", tickCount=5))
        lines = base.mark_line().encode(x=x, y=y, color=form_colour(legend=False))
        limit = alt.Chart(alt.InlineData([{}])).transform_calculate(gb="device").mark_rule(strokeDash=[4, 3], color=INK)
        told = (
            base.transform_calculate(fitting="datum.gb <= device ? datum.seq : 0")
            .transform_aggregate(longest="max(fitting)", groupby=["form"])
            .transform_calculate(
                text=f"({case('datum.form', {form: repr(label) for form, label in FORM_LABELS.items()})}) + "
                "(datum.longest == 0 ? ' does not fit' : datum.longest >= pow(2, 20) ? ' fits all shown' "
                ": ' fits ' + format(datum.longest, ',.0f') + ' tokens')",
                row=f"indexof({list(FORM_LABELS)}, datum.form) * 16 + 40",
            )
        )
        label = told.mark_text(align="left", baseline="top", fontSize=12, fontWeight=600).encode(
            x=alt.value(8), y=alt.Y("row:Q", scale=None, axis=None), text="text:N", color=form_colour(legend=False)
        )
        curves = alt.layer(lines, limit.encode(y=y))
        return alt.layer(curves, label).resolve_scale(y="independent").properties(width=480, height=220)


_NO_QUERY_LATENT = "direct_query && indexof(laga, 'query') >= 0"


def _grouped(roles: Mapping[str, sympy.Expr]) -> dict[str, sympy.Expr]:
    grouped: dict[str, sympy.Expr] = {}
    for role, size in roles.items():
        grouped[group(role)] = grouped.get(group(role), sympy.S.Zero) + size
    return {role: size for role, size in grouped.items() if size != 0}


def group(role: str) -> str:
    """Few enough roles to tell colours apart: what is always small, or passes by in backward, goes together."""
    if role.startswith("gradient of ") and role not in ROLE_COLOURS:
        return "gradients of activations"
    return role if role in ROLE_COLOURS and role != "log-sum-exp" else "other"
