"""The planner, computed in the page: which member to take for a model, a job and a machine, and the code to copy.

What :func:`laga_core.costs.choose` does, with the same closed forms: a row for each member, its costs as expressions of
what the reader sets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import altair as alt
import sympy

from ..config import MLAConfig
from ..costs import FormChoice, Machine, choose, to_vega
from ..costs.choice import PARTS, REASON, TIE, arithmetic, code, cost_parts, in_words, laga_options, seconds_expressions
from ..costs.symbols import HEADS, HIDDEN, KV_LORA, NOPE, Q_LORA, ROPE, VALUE
from ..forms import STRONG_EXPLICIT
from .theme import INK, case, choice, dressed, form_colour, slider

MODELS = {
    "deepseek-v3": "DeepSeek-V3",
    "deepseek-v2": "DeepSeek-V2",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
    "kimi-k2": "Kimi K2",
    "minicpm3-4b": "MiniCPM3-4B",
    "paper-v3": "the paper's",
}
OWN = {HIDDEN: (512, 16384, 256), HEADS: (4, 256, 4), Q_LORA: (0, 4096, 128), KV_LORA: (64, 2048, 64),
       NOPE: (16, 256, 16), ROPE: (16, 128, 16), VALUE: (16, 256, 16)}  # fmt: skip
"""The reader's own dimensions: least, most and step; DeepSeek-V3's to begin with."""

DEGREES = [2**power for power in range(8)]
START: dict[str, Any] = {
    "seq": 32768,
    "batch": 1,
    "layers": 61,
    "sp": 16,
    "node": 8,
    "memory": 32,
    "near": 60,
    "far": 11,
    "tflops": 150,
    "attention": 100,
}
"""Where the controls begin: two nodes of eight, as :meth:`laga_core.costs.Machine.typical` has an NPU."""


def planner() -> alt.LayerChart | alt.FacetChart:
    """Bars of the best member of each kind, what it sends and keeps; its answer in words and code is in its data."""
    rows = _told(_weighed())
    chart = alt.layer(*_marks(), data=rows.data, transform=rows.transform)
    chart = chart.properties(width=600, height=alt.Step(54)).add_params(*_controls(), *_dimensions())
    chart = dressed(
        chart,
        "Bars for the best member of each kind, quickest first: milliseconds of a layer for computing, sending and "
        "latency; below each what it sends, how much of that between nodes, and what it keeps in all layers. The "
        "recommended one stands out, those that do not fit into memory are faint.",
    )
    chart.usermeta["answer"] = _first_answer()
    return chart


def planned(config: MLAConfig, **settings: Any) -> FormChoice:
    """The choice for ``settings`` named as the controls of the page; for those not given, where the controls begin."""
    at = START | settings
    machine = Machine(
        rate=1e12 * at["tflops"],
        attention_rate=1e12 * at["attention"],
        node_link=1e9 * at["near"],
        slow_link=1e9 * at["far"],
        ranks_per_node=at["node"],
        memory=1e9 * at["memory"],
    )
    return choose(config, at["seq"], at["sp"], machine, at["layers"], "zigzag", at["batch"])


def _first_answer() -> dict[str, str]:
    """What the page tells before its scripts run."""
    model = next(iter(MODELS))
    found = planned(MLAConfig.preset(model))
    return {"why": found.reason, "code": code(found.form, found.options, preset(model))}


def preset(name: str) -> str:
    """The configuration of a published model as code."""
    return f'MLAConfig.preset("{name}")'


def _controls() -> list[alt.Parameter]:
    v3 = MLAConfig.preset("deepseek-v3")
    own = [
        slider(f"own_{s.name}", f"{s.name}{', 0: none' if s is Q_LORA else ''} ", getattr(v3, s.name), *OWN[s])
        for s in OWN
    ]
    seqs = [2**power for power in range(12, 21)]
    return [
        choice("model", "Model ", [*MODELS, "own"], [*MODELS.values(), "own dimensions"], menu=True),
        *own,
        choice("seq", "Tokens of a sequence ", seqs, [f"{seq // 1024}K" for seq in seqs], START["seq"], menu=True),
        slider("batch", "Batch ", START["batch"], 1, 16, 1),
        slider("layers", "Layers on a rank ", START["layers"], 1, 100, 1),
        choice("sp", "Ranks that share it ", DEGREES, value=START["sp"], menu=True),
        choice("node", "Ranks of a node ", DEGREES, value=START["node"], menu=True),
        slider("near", "In a node, GB/s ", START["near"], 5, 500, 5),
        slider("far", "Between nodes, GB/s ", START["far"], 0.25, 100, 0.25),
        slider("tflops", "Projections, TFLOP/s ", START["tflops"], 10, 1000, 10),
        slider("attention", "Attention, TFLOP/s ", START["attention"], 10, 1000, 10),
        slider("memory", "Memory to keep in, GB ", START["memory"], 1, 192, 1),
    ]


def _dimensions() -> list[alt.Parameter]:
    """The symbols of the closed forms, and the configuration as code."""
    configs = {name: MLAConfig.preset(name) for name in MODELS}
    given = {
        symbol.name: case(
            "model",
            {name: str(getattr(config, symbol.name) or 0) for name, config in configs.items()}
            | {"own": f"own_{symbol.name}"},
        )
        for symbol in OWN
    }
    sizes = " + ', ' + ".join(
        f"'{symbol.name}=' + " + (f"(own_{symbol.name} || 'None')" if symbol is Q_LORA else f"own_{symbol.name}")
        for symbol in OWN
    )
    given |= {
        "causal": case(
            "model", {name: str(config.causal).lower() for name, config in configs.items()} | {"own": "true"}
        ),
        "config": case(
            "model", {name: f"'{preset(name)}'" for name in MODELS} | {"own": f"'MLAConfig(' + {sizes} + ')'"}
        ),
        "itemsize": "2",
        "ranks_per_node": "min(node, sp)",
        "node_link": "1e9 * near",
        "slow_link": "1e9 * far",
        "rate": "1e12 * tflops",
        "attention_rate": "1e12 * attention",
        "latency": str(Machine.latency),
    }
    return [alt.param(name=name, expr=expression) for name, expression in given.items()]


def _members() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every member, in the order in which :func:`laga_core.costs.choose` weighs them."""
    yield "explicit", {}
    yield "explicit", dict(STRONG_EXPLICIT)
    for context in DEGREES:
        for options in laga_options(context, "zigzag", ("heads", "latent"), overlap=True):
            yield "laga", options
    yield "absorbed", {}


def _alike(options: dict[str, Any]) -> dict[str, Any]:
    """The options that stand for all with the same expressions: any number of groups is two."""
    return options | ({"context": 2} if "context" in options else {})


def _row(order: int, form: str, options: dict[str, Any]) -> dict[str, Any]:
    alike = _alike(options)
    return {
        "member": in_words(form, options),
        "form": form,
        "_order": order,
        "_context": options.get("context", 1),
        "_overlap": options.get("overlap", False),
        "_latent": options.get("query") == "latent",
        "_alike": in_words(form, alike),
        "_kind": in_words(form, {name: value for name, value in alike.items() if name != "overlap"}),
        "_code": code(form, options, _CONFIG),
    }


_CONFIG = "{config}"  # stands for the configuration in a row's code
_RUNS = (
    "datum.form == 'laga' ? datum._context <= sp && num_attention_heads % (sp / datum._context) == 0"
    " && (sp > 1 || !datum._overlap) && (q_lora_rank > 0 || !datum._latent) : num_attention_heads % sp == 0"
)


def _parts() -> dict[str, str]:
    """For each of the cost's parts a Vega expression of a row and of what the reader sets."""
    texts: dict[str, dict[str, str]] = {part: {} for part in PARTS}
    for form, options in _members():
        alike = _alike(options)
        if options != alike:
            continue
        queries = (True,) if options.get("query") == "latent" else (False, True)
        found = {q: {part: _vega(each) for part, each in cost_parts(form, True, q, **alike).items()} for q in queries}
        for q in queries:  # the mask shows in attention only
            unmasked = sum(arithmetic(form, False, q, d, **alike)[1] for d in ("forward", "backward"))
            found[q]["attention"] = _either("causal", found[q]["attention"], _vega(unmasked))
        for part in PARTS:
            texts[part][in_words(form, alike)] = _either("q_lora_rank > 0", found[True][part], found[queries[0]][part])
    return {f"_{part}": _by_member(each) for part, each in texts.items()}


@cache
def _vega(expression: sympy.Expr) -> str:
    return to_vega(expression, {"context": "datum._context"})


def _either(condition: str, yes: str, no: str) -> str:
    return yes if yes == no else f"{condition} ? ({yes}) : ({no})"


def _by_member(texts: Mapping[str, str]) -> str:
    """The text of the member that a row is of; what many share is written once."""
    members: dict[str, list[str]] = {}
    for member, text in texts.items():
        members.setdefault(text, []).append(member)
    *others, last = members.items()
    tests = [f"indexof({json.dumps(named)}, datum._alike) >= 0 ? ({text}) : " for text, named in others]
    return "".join(tests) + f"({last[0]})"


def _weighed() -> alt.Chart:
    """A row for the best member of each kind, ranked as :func:`laga_core.costs.choose` does, with its costs."""
    rows = [_row(order, *member) for order, member in enumerate(_members())]
    seconds = {f"_{name}": to_vega(each, _DATUM) for name, each in seconds_expressions().items()}
    everywhere: dict[str, Any] = {"frame": [None, None]}
    by_rank = _sorted("_unfit", "_key", "_seconds", "_order")
    by_time = _sorted("_seconds", "_order")
    another = _sorted("_unlike", "_unfit", "_seconds", "_order")
    firsts: dict[str, Any] = {
        f"_other{name}": f"first_value({name})" for name in ("_seconds", "_sent", "_outside", "_unfit", "_unlike")
    }
    return (
        alt.Chart(alt.InlineData(rows))
        .transform_filter(_RUNS)
        .transform_calculate(**_parts())
        .transform_calculate(**seconds)
        .transform_calculate(
            _seconds="datum._compute + datum._transfer + datum._latency",
            _unfit="layers * datum._saved > 1e9 * memory ? 1 : 0",
        )
        .transform_joinaggregate(_nothing_fits="min(_unfit)")
        .transform_calculate(_key="datum._nothing_fits ? datum._saved : datum._seconds")
        .transform_window(_place="row_number()", _best="first_value(form)", sort=by_rank, **everywhere)
        .transform_calculate(_unlike="datum.form == datum._best ? 1 : 0")
        .transform_window(
            _quickest="first_value(member)", _quickest_seconds="first_value(_seconds)", sort=by_time, **everywhere
        )
        .transform_window(_other="first_value(member)", **firsts, sort=another, **everywhere)
        .transform_window(_place_of_kind="row_number()", sort=by_rank, groupby=["_kind"])
        .transform_filter("datum._place_of_kind == 1")
        .transform_joinaggregate(_slowest="max(_seconds)")
        .transform_window(line="row_number()", sort=by_rank)
    )


def _told(weighed: alt.Chart) -> alt.Chart:
    """The same rows with what is shown of them: columns for people, the reason of the first, and code."""
    return weighed.transform_calculate(
        ms="1e3 * datum._seconds",
        computing_ms="1e3 * datum._compute",
        sending_ms="1e3 * datum._transfer",
        latency_ms="1e3 * datum._latency",
        sent_mb="datum._sent / 1e6",
        between_nodes_mb="datum._outside / 1e6",
        kept_gb="layers * datum._saved / 1e9",
        fits="!datum._unfit",
        recommended="datum._place == 1",
    ).transform_calculate(
        why=f"datum.recommended ? {_reason()} : ''",
        code=f"replace(datum._code, '{_CONFIG}', config)",
        **{f"_is_{piece}": f"'{piece}'" for piece in PIECES},
        _start="0",
        _room="1.2e3 * datum._slowest",  # for what is written at a bar's end
        _sent_until="datum.computing_ms + datum.sending_ms",
        _name="datum.member + (datum.recommended ? ': recommended' : '')",
        _time="format(datum.ms, datum.ms < 10 ? ',.2f' : ',.1f') + ' ms'",
        _detail=_DETAIL,
    )


def _sorted(*names: str) -> Any:
    return [alt.SortField(name) for name in names]


_DATUM = {part: f"datum._{part}" for part in PARTS}
_SIZE = "replace(format({}, '.3s'), /([kMGT]?)$/, ' $1') + 'B'"
_DETAIL = (
    f"(datum._sent ? {_SIZE.format('datum._sent')} + ' sent' : 'nothing sent')"
    f" + (datum._outside ? ', ' + {_SIZE.format('datum._outside')} + ' between nodes' : '')"
    f" + '; ' + {_SIZE.format('layers * datum._saved')} + (datum.fits ? ' kept' : ' do not fit')"
)


def _reason() -> str:
    """The sentences of a choice's reason as a Vega expression."""
    other = "!datum._other_unlike && !datum._other_unfit"
    told = {
        "best": "true",
        "nothing fits": "datum._nothing_fits",
        "quicker": "!datum._nothing_fits && datum._quickest != datum.member",
        "other": other,
        "tie": f"{other} && datum._other_seconds < {TIE} * datum._seconds",
    }
    numbers = {
        "seconds": "datum.ms",
        "compute": "datum.computing_ms",
        "transfer": "datum.sending_ms",
        "latency": "datum.latency_ms",
        "kept": "datum.kept_gb",
        "memory": "memory",
        "quickest_seconds": "1e3 * datum._quickest_seconds",
        "ratio": "datum._other_seconds / datum._seconds",
        "other_sent": "datum._other_sent / 1e6",
        "other_outside": "datum._other_outside / 1e6",
        "sent": "datum.sent_mb",
        "outside": "datum.between_nodes_mb",
    }
    slots = {name: f"format({number}, ',.2f')" for name, number in numbers.items()}
    slots |= {"best": "datum.member", "quickest": "datum._quickest", "other": "datum._other"}
    texts = []
    for name, sentence in REASON.items():
        pieces = re.split(r"\{(\w+)\}", sentence)
        text = " + ".join(slots[piece] if place % 2 else json.dumps(piece) for place, piece in enumerate(pieces))
        texts.append(f"({told[name]} ? {text} : '')")
    return " + ".join(texts)


PIECES = ("computing", "sending", "latency")
_TIMES = (*(f"{piece}_ms" for piece in PIECES), "ms")


def _marks() -> list[alt.Chart]:
    """A band for each member: its name, its bar in three parts, and a line of what it sends and keeps."""
    y = alt.Y("line:O", axis=None)
    rows = alt.Chart().encode(y=y, tooltip=["member:N", *(alt.Tooltip(f"{name}:Q", format=",.2f") for name in _TIMES)])
    faint = alt.ExprRef("datum.fits ? 1 : 0.3")
    shades = alt.Scale(domain=list(PIECES), range=[1, 0.6, 0.3])
    ends = ["_start", "computing_ms", "_sent_until", "ms"]
    bars = [
        rows.mark_bar(height=12, fillOpacity=faint).encode(
            x=alt.X(
                f"{start}:Q",
                title="ms of one layer, forward and backward",
                scale=alt.Scale(nice=False),
                axis=alt.Axis(grid=False, tickCount=6),
            ),
            x2=end,
            color=form_colour(legend=False),
            opacity=alt.Opacity(f"_is_{name}:O", scale=shades, title=None),
        )
        for name, start, end in zip(PIECES, ends, ends[1:], strict=False)
    ]
    behind = rows.mark_rect(color=INK, fillOpacity=alt.ExprRef("datum.recommended ? 0.08 : 0"))
    behind = behind.encode(x="_start:Q", x2="_room")
    words: dict[str, Any] = {"align": "left", "color": INK}
    name = rows.mark_text(dy=-16, fontWeight=alt.ExprRef("datum.recommended ? 700 : 400"), **words)
    told = rows.mark_text(dx=6, fontWeight=alt.ExprRef("datum.recommended ? 700 : 400"), **words)
    detail = rows.mark_text(dy=16, fontSize=11, opacity=0.85, **words)
    return [
        behind,
        *bars,
        name.encode(x=alt.value(4), text="_name:N"),
        told.encode(x="ms:Q", text="_time:N"),
        detail.encode(x=alt.value(4), text="_detail:N"),
    ]
