"""Throughput: what the reported step times say about bytes and links, and what this machine measures.

Reported: tables 3, 4 and 5 of the paper, tokens per second of forward and backward of a four-layer stack.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..costs import communication
from .memory import paper_config
from .paper import read_table

LAYERS = 4  # the paper's stack (§4.1)
FORMS = ("explicit", "absorbed", "laga")
PAPER_LINK_GB_S = 11.0
"""The rate that the paper gives for the RoCE link between its nodes (§4.1)."""


def wire_bytes(form: str, seq: int, sp: int, heads: int = 128) -> int:
    """Bytes one rank sends in a step of the four-layer stack: forward, and the same again in backward."""
    return 2 * LAYERS * communication(paper_config(heads), form, seq, sp).total_bytes


def reported_steps() -> list[dict[str, Any]]:
    """Every throughput cell of tables 3 to 5 as a step time: ``ms`` = seq / tokens per second; OOM is left out."""
    cells = [("table 3", "eager", int(row["n_heads"]), row) for row in read_table("table3")]
    cells += [(f"table {n}", row["kernel"], 128, row) for n in (4, 5) for row in read_table(f"table{n}")]
    steps = []
    for source, kernel, heads, row in cells:
        seq, sp = int(row["seq"]), int(row["sp"])
        for form in FORMS:
            if row[f"{form}_tok_s"] == "OOM":
                continue
            common = {"source": source, "kernel": kernel, "heads": heads, "sp": sp, "seq": seq, "form": form}
            ms = 1000 * seq / float(row[f"{form}_tok_s"])
            steps.append(common | {"ms": ms, "sent_mb": wire_bytes(form, seq, sp, heads) / 1e6})
    return steps


def savings() -> list[dict[str, Any]]:
    """Explicit against Laga in every reported cell: time and bytes saved, and the link rate that would explain it.

    Their computation is the same (§4.4), so if bytes are what differs, ``saved_mb / saved_ms`` is the rate at which
    they travelled. A negative rate says that Laga was slower although it sent less: bytes do not explain the cell.
    """
    rows = []
    for explicit, laga in _pairs(reported_steps()):
        saved_ms, saved_mb = explicit["ms"] - laga["ms"], explicit["sent_mb"] - laga["sent_mb"]
        rows.append(
            {key: explicit[key] for key in ("source", "kernel", "heads", "sp", "seq")}
            | {
                "explicit_ms": explicit["ms"],
                "laga_ms": laga["ms"],
                "saved_ms": saved_ms,
                "saved_mb": saved_mb,
                "implied_gb_s": saved_mb / saved_ms,
                "ratio": explicit["ms"] / laga["ms"],
            }
        )
    return rows


def link_fit(source: str, kernel: str) -> dict[str, Any]:
    """One link rate for a table: least squares of the time saved on the bytes saved, through the origin.

    ``predicted`` compares, for each cell, the reported ratio with the one that this rate gives when explicit's step
    time is taken as it is.
    """
    rows = [row for row in savings() if (row["source"], row["kernel"]) == (source, kernel)]
    if not rows:
        raise ValueError(f"no cells for {source!r} and kernel {kernel!r}; sources: table 3, table 4, table 5")
    mb, ms = (np.array([row[name] for row in rows]) for name in ("saved_mb", "saved_ms"))
    ms_per_mb = float((mb * ms).sum() / (mb * mb).sum())
    predicted = []
    for row in rows:
        laga_ms = row["explicit_ms"] - ms_per_mb * row["saved_mb"]
        predicted.append(
            {key: row[key] for key in ("heads", "sp", "seq")}
            | {
                "reported": row["ratio"],
                "predicted": row["explicit_ms"] / laga_ms,
                "residual_ms": row["laga_ms"] - laga_ms,
            }
        )
    return {"source": source, "kernel": kernel, "gb_s": 1 / ms_per_mb, "predicted": predicted}


def across_nodes() -> list[dict[str, Any]]:
    """Table 5 (16 ranks, fused): what communication is left when computation is taken from one node.

    Twice the ranks have half the work each, so half of table 4's step, less what its bytes take at table 4's own rate,
    is the computation. What remains of a cross-node step is divided by the bytes sent.
    """
    node_gb_s = link_fit("table 4", "fused")["gb_s"]
    steps = {(s["source"], s["kernel"], s["seq"], s["form"]): s for s in reported_steps()}
    rows = []
    for seq in (4096, 8192, 16384):
        for form in ("explicit", "laga"):
            node, cross = (steps[f"table {n}", "fused", seq, form] for n in (4, 5))
            compute_ms = (node["ms"] - node["sent_mb"] / node_gb_s) / 2
            left_ms = cross["ms"] - compute_ms
            rows.append(
                {"seq": seq, "form": form, "step_ms": cross["ms"], "compute_ms": compute_ms, "left_ms": left_ms}
                | {"sent_mb": cross["sent_mb"], "implied_gb_s": cross["sent_mb"] / left_ms}
            )
    return rows


def across_nodes_fit() -> dict[str, Any]:
    """Fit what is left of table 5's fused steps by a fixed time and a rate: ``left = fixed + sent / rate``.

    ``predicted`` sets the reported ratio beside the fit's; ``bytes_only`` beside what the paper's 11 GB/s alone gives.
    """
    rows = across_nodes()
    sent, left = (np.array([row[name] for row in rows]) for name in ("sent_mb", "left_ms"))
    slope, fixed = np.polyfit(sent, left, deg=1)

    def step(row: dict[str, Any], ms_per_mb: float, start: float) -> float:
        return row["compute_ms"] + start + row["sent_mb"] * ms_per_mb

    predicted = []
    for explicit, laga in zip(rows[::2], rows[1::2], strict=True):
        by_fit, by_bytes = (
            step(explicit, *terms) / step(laga, *terms) for terms in ((slope, fixed), (1 / PAPER_LINK_GB_S, 0.0))
        )
        reported = explicit["step_ms"] / laga["step_ms"]
        predicted.append({"seq": explicit["seq"], "reported": reported, "fit": by_fit, "bytes_only": by_bytes})
    return {"gb_s": float(1 / slope), "fixed_ms": float(fixed), "predicted": predicted}


def _pairs(steps: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for step in steps:
        cells.setdefault(tuple(step[k] for k in ("source", "kernel", "heads", "sp", "seq")), {})[step["form"]] = step
    return [(cell["explicit"], cell["laga"]) for cell in cells.values()]
