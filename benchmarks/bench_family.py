"""Laga's family: what it sends, what it keeps, and its step time over shaped links against both explicit forms.

Step times are of one layer (32 heads of DeepSeek-V3's sizes, hidden 1024), forward and backward, on two ranks in
network namespaces; they need Linux and root, and are left out elsewhere. In bf16, but on a CPU that has no instructions
for it in float32, as the committed records: there bf16 halves what is sent and none of the computing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from laga_core import MLAConfig, communication
from laga_core.experiments import family, netns
from laga_core.kernels import products

from .harness import Comparison

V3 = MLAConfig.preset("deepseek-v3")


def compare() -> Iterator[Comparison]:
    yield from _bytes()
    yield from _kept()
    if reason := netns.unavailable():
        print(f"no emulated links: {reason}")
        return
    dtype = "float32" if products.slow(torch.empty(0, dtype=torch.bfloat16)) else "bfloat16"
    print(f"steps over links, in {dtype}:", flush=True)
    yield from _links(dtype)
    yield from _recompute(dtype)


def _bytes() -> Iterator[Comparison]:
    explicit = communication(V3, "explicit", 16384, 8).total_bytes
    wanted: list[tuple[str, dict[str, Any], float]] = [("Laga", {}, 0.56), ("query latent", {"query": "latent"}, 0.41)]
    for name, options, at_most in wanted:
        yield _part(
            f"{name}: bytes sent, V3, sp 8",
            communication(V3, "laga", 16384, 8, **options).total_bytes,
            explicit,
            at_most,
        )
    rows = family.node_bytes() if netns.unavailable() is None else []
    for row in rows:
        if row["member"] == "latent across":
            yield _part("latent across: bytes between nodes, 2 x 2", row["link_bytes"], rows[0]["link_bytes"], 1 / 30)


def _kept() -> Iterator[Comparison]:
    rows = {row["member"]: row for row in family.saved()}
    explicit = rows["explicit"]
    for name, at_most in (("recompute", 0.66), ("recompute, query latent", 0.37)):
        yield _part(f"{name}: kept a layer", rows[name]["saved_bytes"], explicit["saved_bytes"], at_most)
    last = rows["recompute, query latent, 2 heads at a time"]
    yield _part("2 heads at a time: peak, four layers", last["peak_above_bytes"], explicit["peak_above_bytes"], 0.75)


def _links(dtype: str) -> Iterator[Comparison]:
    rows = family.step_times(repeats=9, dtype=dtype)
    wanted = {
        (200, "explicit"): 3.0,
        (200, "strong explicit"): 2.7,
        (1000, "explicit"): 1.3,
        (1000, "strong explicit"): 1.2,
    }
    for against in ("strong explicit", "explicit"):
        base = {row["link"]: row["seconds"] for row in rows if row["member"] == against}
        for row in family.speedups(rows, against):
            if row["member"] in ("Laga", "query latent", "latent only, overlap"):
                at_least = wanted.get((row["link"], against)) if row["member"].startswith("latent only") else None
                link = f"{row['link']} Mbit/s" if row["link"] else "unshaped"
                ours, theirs = (f"{1e3 * x:.0f} ms" for x in (row["seconds"], base[row["link"]]))
                name = f"{row['member']}, {against}: {link}"
                yield Comparison(name, ours, theirs, row["ratio"], at_least=at_least)


def _recompute(dtype: str) -> Iterator[Comparison]:
    rows = family.recompute_cost(dtype=dtype)
    for row in rows:
        kept = next(r for r in rows if r["member"] == f"{row['member'].split(',')[0]}, keep")
        if row is not kept:
            ours, theirs = (f"{1e3 * r['seconds']:.0f} ms" for r in (row, kept))
            yield Comparison(f"{row['member']}, keep: time, seq 4096", ours, theirs, row["ratio"], at_most=1.10)


def _part(name: str, ours: float, theirs: float, at_most: float) -> Comparison:
    return Comparison(name, f"{ours / 1e6:.1f} MB", f"{theirs / 1e6:.1f} MB", ours / theirs, at_most=at_most)
