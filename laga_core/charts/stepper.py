"""A forward pass stepped through: tiles of what each rank holds, form by form and member by member."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import altair as alt

from ..config import MLAConfig
from .dataflow import MEMBERS, PER_NODE, RANKS, STEPS, Member, Tensor, quarters, sent_bytes, shape, sharing, tensors
from .theme import INK, choice, dressed, slider

_QUARTER_COLOURS = ["#332288", "#44AA99", "#DDCC77", "#AA4499"]  # Paul Tol's muted scheme
_ROW = 6.2  # from one tensor to the next, in quarters of the heads
_WIDTH, _GAP = 4.0, 1.2  # a rank's column is four quarters of the sequence wide
Layers = alt.LayerChart | alt.FacetChart  # what alt.layer says it returns

FORMS = ("explicit", "absorbed", "laga")


def stepper() -> Layers:
    """The three forms on four ranks, under a form control and a step control."""
    return _draw(FORMS, "laga", "Form ", nodes=False)


def family_stepper() -> Layers:
    """The family beside the forms, on two nodes of two ranks; of the bytes sent, those between the nodes are told."""
    return _draw(tuple(MEMBERS), "context", "Member ", nodes=True)


def _draw(names: Sequence[str], first: str, label: str, nodes: bool) -> Layers:
    config, seq = MLAConfig.preset("deepseek-v3"), 16384
    tiles, frames, labels, captions, most = [], [], [], [], 0
    for name in names:
        member = MEMBERS[name]
        held = tensors(member, config)
        rows = {row: number for number, row in enumerate(dict.fromkeys(tensor.row for tensor in held))}
        most = max(most, len(rows))
        for tensor in held:
            common = {"member": name, "first": tensor.first, "last": tensor.last}
            top = _ROW * rows[tensor.row]
            tiles += [common | tile for tile in _tiles(tensor, member, top, nodes)]
            frames += [common | {"x": _left(r, nodes), "y": top} for r in range(RANKS)]
            labels.append(common | {"x": 0, "y": top - 0.8, "text": _text_of(tensor, member, config, seq)})
        for step, text in enumerate(member.steps):
            told = "\n".join(textwrap.wrap(f"{step}. {text}", 44))
            caption = {"x": 0, "y": -11.2, "text": told, "sent": _sent(member, step, config, seq, nodes)}
            captions.append({"member": name, "first": step, "last": step} | caption)
    controls = [
        choice("member", label, names, [MEMBERS[name].label for name in names], first),
        slider("step", "Step ", 2, 0, STEPS, 1),
    ]
    chart = _layers(tiles, frames, labels, captions, most, nodes).add_params(*controls)
    return dressed(
        chart,
        "Four ranks as columns, and below each the parts of every tensor it holds, as tiles coloured by the quarter "
        "of the sequence; a step control moves through the forward pass, and the shapes and the bytes sent are told.",
    )


def _text_of(tensor: Tensor, member: Member, config: MLAConfig, seq: int) -> str:
    size = shape(tensor, member, config, seq)
    return f"{tensor.name}: {' × '.join(f'{n:,}' for n in size)}, {2 * math.prod(size) / 1e6:,.0f} MB"


def _sent(member: Member, step: int, config: MLAConfig, seq: int, nodes: bool) -> str:
    sent, outside = (_megabytes(each) for each in sent_bytes(member, step, config, seq))
    if sent == "0":
        return "Nothing is sent."
    if not nodes:
        return f"Each rank sends {sent} MB."
    part = {"0": "none of it", sent: "all of it"}.get(outside, f"{outside} of it")
    return f"Each rank sends {sent} MB, {part} to the other node."


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f}" if 0 < count < 1e7 else f"{count / 1e6:,.0f}"


def _left(rank: int, nodes: bool) -> float:
    """Where a rank's column begins; nodes stand apart."""
    return rank * (_WIDTH + _GAP) + (_GAP * (rank // PER_NODE) if nodes else 0)


def _tiles(tensor: Tensor, member: Member, top: float, nodes: bool) -> list[dict[str, float]]:
    """Rectangles: across, the quarter of the sequence; down, the quarter of the heads; one grid for each rank."""
    tiles = []
    for rank in range(RANKS):
        left, share = _left(rank, nodes), 4 / sharing(member)
        if not tensor.heads:
            y, height = top + 1.4, 1.2
        elif tensor.heads == "own":
            y, height = top + rank % sharing(member) * share, share
        else:
            y, height = top, 4.0
        here = quarters(tensor, member, rank)
        tiles += [
            {"rank": rank, "x": left + q, "x2": left + q + 1, "y": y, "y2": y + height, "quarter": q} for q in here
        ]
    return tiles


def _layers(
    tiles: list[dict], frames: list[dict], labels: list[dict], captions: list[dict], rows: int, nodes: bool
) -> Layers:
    x = alt.X("x:Q", scale=alt.Scale(domain=[0, _left(RANKS - 1, nodes) + _WIDTH], nice=False), axis=None)
    y = alt.Y("y:Q", scale=alt.Scale(domain=[-12.4, _ROW * rows - 1], reverse=True, nice=False), axis=None)
    now = "datum.member == member && datum.first <= step && step <= datum.last"
    colour = alt.Color(
        "quarter:O",
        scale=alt.Scale(domain=list(range(RANKS)), range=_QUARTER_COLOURS),
        legend=alt.Legend(title="Quarter of the tokens", labelExpr="datum.value + 1"),
    )
    cells = alt.Chart(alt.InlineData(tiles)).transform_filter(now).mark_rect(stroke="white", strokeWidth=0.5)
    cells = cells.encode(x=x, x2="x2", y=y, y2="y2", color=colour)
    # An empty frame a rank: what it does not hold shows as clearly as what it holds.
    empty = (
        alt.Chart(alt.InlineData(frames)).transform_filter(now).mark_rect(filled=False, stroke=INK, strokeOpacity=0.3)
    )
    empty = empty.transform_calculate(x2=f"datum.x + {_WIDTH}", y2="datum.y + 4").encode(x=x, x2="x2", y=y, y2="y2")
    names = _text(labels, align="left", fontSize=12).transform_filter(now).encode(x=x, y=y)
    heads = _text(_headings(nodes), fontWeight="bold").encode(x=x, y=y)
    told = _text(captions, align="left", fontSize=13, lineBreak="\n").transform_filter(now).encode(x=x, y=y)
    sent = _text(captions, align="left", dy=34, fontSize=12, fontWeight="bold").transform_filter(now)
    layers = [empty, cells, names, heads, told, sent.encode(x=x, y=y, text="sent:N")]
    return alt.layer(*layers).properties(width=520, height=88 + 56 * rows)


def _text(rows: list[dict], **style: Any) -> alt.Chart:
    return alt.Chart(alt.InlineData(rows)).mark_text(**style).encode(text="text:N")


def _headings(nodes: bool) -> list[dict]:
    """A heading for each rank, and for each node where they are shown."""
    ranks = [{"x": _left(r, nodes) + _WIDTH / 2, "y": -3, "text": f"rank {r}"} for r in range(RANKS)]
    if not nodes:
        return ranks
    middles = [(_left(r, nodes) + _left(r + 1, nodes) + _WIDTH) / 2 for r in range(0, RANKS, PER_NODE)]
    return ranks + [{"x": x, "y": -5, "text": f"node {n}"} for n, x in enumerate(middles)]
