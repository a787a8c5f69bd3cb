"""Charts of the family: who wins where, step times over shaped links, what is kept, and how the work is laid out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import altair as alt

from ..config import MLAConfig
from ..costs import Machine, choose
from ..experiments import family
from ..sharding import sequence_positions
from .theme import INK, choice, dressed, form_colour

MEMBER_COLOURS = {
    "explicit": "#0072B2",
    "strong explicit": "#56B4E9",
    "Laga": "#009E73",
    "Laga, overlap": "#00C08B",
    "query latent": "#CC79A7",
    "latent only": "#E69F00",
    "latent only, overlap": "#B37700",
}
"""Explicit's and Laga's own colours; further ones of Okabe and Ito's for the family."""

_KINDS = {
    "strong explicit": MEMBER_COLOURS["strong explicit"],
    "heads only (R = 1)": MEMBER_COLOURS["Laga"],
    "heads × context": "#F0E442",
}


def winners(preset: str = "deepseek-v3", machine: Machine | None = None) -> alt.LayerChart | alt.FacetChart:
    """Which member the cost model finds quickest, by the link between nodes and the sequence length (derived)."""
    config, machine = MLAConfig.preset(preset), machine or Machine.typical("npu")
    degrees = (16, 64, 128)
    rows = [
        _winner(config, seq, sp, replace(machine, slow_link=link * 1e9)) | {"link": f"{link:g}"}
        for sp in degrees
        for link in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
        for seq in (2**power for power in range(12, 20))
    ]
    base = (
        alt.Chart(alt.InlineData(rows))
        .transform_filter("datum.sp == sp")
        .encode(
            x=alt.X("link:O", sort=None, title="link between nodes, GB/s a rank", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("seq:O", sort=None, title="sequence, tokens"),
            tooltip=[
                alt.Tooltip("member:N", title="quickest"),
                alt.Tooltip("ms:Q", title="ms a layer"),
                alt.Tooltip("ratio:Q", title="times quicker than the best of the other kind"),
            ],
        )
    )
    tiles = base.mark_rect(opacity=0.85).encode(
        color=alt.Color(
            "winner:N",
            title=None,
            scale=alt.Scale(domain=list(_KINDS), range=list(_KINDS.values())),
            legend=alt.Legend(columns=3),
        )
    )
    labels = base.mark_text(fontSize=11, color="#000").encode(text="text:N")
    ranks = choice("sp", "Ranks ", degrees, [f"{sp}, on {sp // machine.ranks_per_node} nodes" for sp in degrees])
    return dressed(
        alt.layer(tiles, labels).properties(width=460, height=260).add_params(ranks),
        f"A map of the quickest member for {preset} on nodes of {machine.ranks_per_node} ranks, by link speed and "
        "sequence length; each tile says how many times quicker it is than the best explicit form, or, where explicit "
        "wins, than the best of Laga's family.",
    )


def _winner(config: MLAConfig, seq: int, sp: int, machine: Machine) -> dict[str, Any]:
    found = choose(config, seq, sp, machine, layout="zigzag")
    other = next(each for each in found.weighed if (each.form == "explicit") != (found.form == "explicit"))
    ratio = other.seconds / found.best.seconds
    return {
        "sp": sp,
        "seq": f"{seq // 1024}K",
        "winner": _kind(found.form, found.options.get("context", 1)),
        "member": str(found.best),
        "ms": round(1e3 * found.best.seconds, 3),
        "ratio": round(ratio, 3),
        "text": f"{ratio:.2f}" if ratio < 9.95 else f"{ratio:.0f}",
    }


def _kind(form: str, context: int) -> str:
    return "strong explicit" if form == "explicit" else "heads × context" if context > 1 else "heads only (R = 1)"


def step_times(
    rows: Iterable[Mapping[str, Any]] | None = None, against: str = "strong explicit"
) -> alt.LayerChart | alt.FacetChart:
    """How many times as quick as ``against`` each member is over each link (emulated).

    ``rows`` of :func:`laga_core.experiments.family.step_times`, by default those of the first committed record.
    """
    rows = family.with_gloo(rows or family.published("step times")[0].metrics["rows"])
    base_seconds = {(r["link"], r["seq"], r["heads"]): r["seconds"] for r in rows if r["member"] == against}
    data = [
        {
            "link": "unshaped" if r["link"] is None else f"{r['link']:g} Mbit/s",
            "place": -(r["link"] or 1e6),
            "setting": f"{r['heads']} heads, {r['seq']} tokens",
            "member": r["member"],
            "ratio": round(base_seconds[r["link"], r["seq"], r["heads"]] / r["seconds"], 3),
            "ms": round(1e3 * r["seconds"], 1),
            "mb": round(r["sent_bytes"] / 1e6, 2),
        }
        for r in rows
    ]
    settings = list(dict.fromkeys(row["setting"] for row in data))
    headline = "32 heads, 1024 tokens"
    members = [name for name in MEMBER_COLOURS if any(row["member"] == name for row in data)]
    base = alt.Chart(alt.InlineData(data)).transform_filter("datum.setting == setting")
    bars = base.mark_bar().encode(
        x=alt.X("link:N", sort=alt.SortField("place"), title=None, axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("member:N", sort=members),
        y=alt.Y("ratio:Q", title=f"times as quick as {against}"),
        color=alt.Color(
            "member:N",
            title=None,
            scale=alt.Scale(domain=members, range=[MEMBER_COLOURS[name] for name in members]),
            legend=alt.Legend(columns=4),
        ),
        tooltip=["member:N", "ratio:Q", alt.Tooltip("ms:Q", title="ms"), alt.Tooltip("mb:Q", title="MB sent")],
    )
    even = (
        alt.Chart(alt.InlineData([{"one": 1}])).mark_rule(strokeDash=[5, 4], color=INK, opacity=0.7).encode(y="one:Q")
    )
    return dressed(
        alt.layer(bars, even)
        .properties(width=460, height=260)
        .add_params(
            choice("setting", "Setting ", settings, menu=True, value=headline if headline in settings else settings[-1])
        ),
        f"Bars: how many times as quick as {against} each member is, forward and backward of one layer on two ranks, "
        "over an unshaped link and links of 1000 and 200 Mbit/s; a menu picks heads and sequence length.",
    )


def kept(rows: Sequence[Mapping[str, Any]] | None = None) -> alt.LayerChart | alt.FacetChart:
    """Bytes a layer keeps between forward and backward, member by member (simulated).

    ``rows`` of :func:`laga_core.experiments.family.kept`, which is run without them.
    """
    rows = rows or family.kept(names=("explicit", "Laga", "recompute", "recompute, query latent"))
    different: dict[int, dict[str, Any]] = {}
    for row in rows:
        mb, member = row["saved_bytes"] / 1e6, row["member"]
        form = "explicit" if "explicit" in member else "laga"
        part = f", {row['saved_part']:.2f} of explicit" if different else ""
        told = {"member": member, "form": form, "mb": round(mb, 1), "text": f"{member}: {mb:.0f} MB{part}"}
        different.setdefault(row["saved_bytes"], told)  # what keeps the same is shown once
    base = alt.Chart(alt.InlineData(list(different.values()))).encode(y=alt.Y("member:N", sort=None, axis=None))
    bars = base.mark_bar(height=18).encode(
        x=alt.X("mb:Q", title="kept by one layer, MB", axis=alt.Axis(tickCount=5)),
        color=form_colour(legend=False),
        tooltip=["member:N", alt.Tooltip("mb:Q", title="MB")],
    )
    labels = base.mark_text(align="left", dy=-17, color=INK).encode(x=alt.value(0), text="text:N")
    return dressed(
        alt.layer(bars, labels).properties(width=460, height=alt.Step(44)),
        "Bars: megabytes that one layer keeps between forward and backward for each member, with its part of what "
        "explicit keeps.",
    )


def layout(contexts: Sequence[int] = (2, 4)) -> alt.Chart:
    """Who attends what under a causal mask: tiles of queries and keys, coloured by the group of ranks."""
    rows = []
    for context in contexts:
        pieces = 4 * max(contexts)
        for name in ("contiguous", "zigzag"):
            positions = sequence_positions(pieces, name, context).tolist()
            group = {position: place * context // pieces for place, position in enumerate(positions)}
            work = {g: sum(q + 1 for q in range(pieces) if group[q] == g) for g in range(context)}
            rows += [
                {
                    "R": context,
                    "layout": name,
                    "query": q,
                    "key": k,
                    "group": f"group {group[q]}",
                    "work": work[group[q]],
                }
                for q in range(pieces)
                for k in range(q + 1)
            ]
    return dressed(
        alt.Chart(alt.InlineData(rows), width=300, height=300)
        .transform_filter("datum.R == R && datum.layout == layout")
        .mark_rect(stroke=INK, strokeOpacity=0.25)
        .encode(
            x=alt.X("key:O", title="keys (from the gathered latent)", axis=alt.Axis(labels=False, ticks=False)),
            y=alt.Y("query:O", title="queries", axis=alt.Axis(labels=False, ticks=False)),
            color=alt.Color(
                "group:N",
                title=None,
                scale=alt.Scale(range=["#E69F00", "#56B4E9", "#009E73", "#CC79A7"][: max(contexts)]),
            ),
            tooltip=["group:N", alt.Tooltip("work:Q", title="tiles of this group")],
        )
        .add_params(
            choice("R", "Groups R ", list(contexts), value=contexts[-1]),
            choice("layout", "Layout ", ["zigzag", "contiguous"]),
        ),
        "The causal triangle of queries and keys in small tiles, coloured by the group of ranks that holds the query; "
        "buttons pick the number of groups and the layout. Zigzag gives every group the same number of tiles.",
    )
