"""Nodes on slow links, emulated: real ranks in network namespaces whose links are shaped, timed and counted.

One rank a node, gloo between them. Every round times all forms at all link speeds in turn, and the median over the
rounds is taken, so that what else the machine does falls on all alike.

The interface counters agree with the wire formula up to frames and headers, but for one collective: gloo makes a
reduce-scatter of an all-reduce, which sends twice what is needed (:func:`gloo_bytes`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..attention import MLAAttention
from ..config import MLAConfig
from ..costs import communication
from ..results import Store, data_dir, run_cell
from . import netns

EXPERIMENT = "emulated"
FORMS = ("explicit", "absorbed", "laga")
RATES: tuple[float | None, ...] = (100, 200, 500, 1000, 2000, None)
"""Megabits a second of each node's link; ``None`` is not shaped."""

SIZES = {"heads": 32, "hidden": 1024, "seq": 512, "repeats": 7}
"""One layer that two cores can run; a tenth of a second of computation and more."""

_HEAD: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def config(heads: int = 32, hidden: int = 1024) -> MLAConfig:
    """DeepSeek-V3's head sizes with fewer heads and a narrower model, so that two cores are enough."""
    return MLAConfig(hidden_size=hidden, num_attention_heads=heads, q_lora_rank=None, **_HEAD)


def sweep(
    store: Store, degrees: Sequence[int] = (2, 4), rates: Sequence[float | None] = RATES, **sizes: int
) -> list[dict[str, Any]]:
    """Step times and bytes at each degree: one record a degree, taken from the store if it is there.

    ``sizes`` replace some of :data:`SIZES`. Raises ``RuntimeError`` where this machine cannot emulate a cluster.
    """
    rows = []
    for sp in degrees:
        parameters = {"sp": sp, "rates": list(rates), **SIZES, **sizes}
        notes: dict[str, Any] = {"backend": "gloo", "ranks": sp, "load_before": round(os.getloadavg()[0], 1)}
        rows += run_cell(store, EXPERIMENT, parameters, measure, kind="emulated", **notes).metrics["rows"]
    return rows


def published() -> list[dict[str, Any]]:
    """The rows of the committed records, of every machine that has some."""
    folders = sorted((data_dir() / "published").iterdir())
    rows = [row for f in folders for record in Store(f).load(EXPERIMENT) for row in record.metrics["rows"]]
    return sorted(rows, key=lambda row: row["sp"])  # stable: the rates stay in their order


def gloo_bytes(shape: MLAConfig, form: str, seq: int, sp: int) -> int:
    """Bytes one rank sends in forward and backward under gloo: the wire formula, and reduce-scatters once more."""
    back = communication(shape, form, seq, sp, direction="backward")
    forward = communication(shape, form, seq, sp)
    return forward.total_bytes + back.total_bytes + back.by_collective.get("reduce_scatter", 0)


def measure(sp: int, rates: Sequence[float | None], heads: int, hidden: int, seq: int, repeats: int) -> dict[str, Any]:
    """Forward and backward of one layer, bf16 and eager, for each form at each rate; metrics of one record."""
    timeout = 120.0 + 15.0 * repeats * len(rates)
    return netns.run(_on_rank, rates, heads, hidden, seq, repeats, nodes=sp, timeout=timeout)[0]


def _on_rank(rates: Sequence[float | None], heads: int, hidden: int, seq: int, repeats: int) -> dict[str, Any]:
    sp, shape = dist.get_world_size(), config(heads, hidden)
    probe = _Probe(seq // sp * heads * shape.qk_head_dim)
    calls = {form: _Step(shape, form, seq) for form in FORMS} | {"probe": probe}
    times: dict[tuple[float | None, str], list[float]] = {(rate, name): [] for rate in rates for name in calls}
    sent: dict[tuple[float | None, str], int] = {}
    for call in calls.values():
        _timed(call)  # fills buffers and opens connections
    for _ in range(repeats):
        for rate in rates:
            netns.shape(rate)
            for name, call in calls.items():
                seconds, sent[rate, name] = _timed(call)
                times[rate, name].append(1000 * seconds)
    return {
        "rows": [
            {"sp": sp, "mbit_s": rate, "form": form, "ms": statistics.median(times[rate, form])}
            | {"sent_bytes": sent[rate, form], "gloo_bytes": gloo_bytes(shape, form, seq, sp)}
            | {"wire_bytes": 2 * communication(shape, form, seq, sp).total_bytes}
            | {"probe_ms": statistics.median(times[rate, "probe"]), "probe_bytes": probe.bytes}
            for rate in rates
            for form in FORMS
        ]
    }


class _Step:
    """Forward and backward of one layer on this rank's shard; gradients stay where they are made."""

    def __init__(self, shape: MLAConfig, form: str, seq: int) -> None:
        torch.manual_seed(0)
        self.layer = MLAAttention(shape, form, "eager", dist.group.WORLD, dtype=torch.bfloat16)
        self.hidden = torch.randn(1, seq // dist.get_world_size(), shape.hidden_size, dtype=torch.bfloat16)

    def __call__(self) -> None:
        self.layer(self.hidden.requires_grad_()).sum().backward()
        self.layer.zero_grad()


class _Probe:
    """An all-to-all as large as a query's: how fast the link is when nothing else happens."""

    def __init__(self, elements: int) -> None:
        sp = dist.get_world_size()
        self.data = torch.zeros(elements // sp * sp, dtype=torch.bfloat16)
        self.bytes = self.data.nbytes // sp * (sp - 1)

    def __call__(self) -> None:
        dist.all_to_all_single(torch.empty_like(self.data), self.data)


def _timed(call: Callable[[], None]) -> tuple[float, int]:
    """Seconds until the slowest rank is done, and bytes this node sent meanwhile."""
    dist.barrier()
    before, start = netns.sent_bytes(), time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start, netns.sent_bytes() - before


def predicted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Explicit / Laga of each degree and rate, beside what two measurements predict: no step on a slow link is used.

    The unshaped step, and the probe at both rates: ``step + sent * (probe - unshaped probe) / probe_bytes``, where
    ``sent`` is what the closed forms and gloo's reduce-scatter say.
    """
    cells = {(row["sp"], row["mbit_s"], row["form"]): row for row in rows}
    found = []
    for sp, rate in dict.fromkeys((row["sp"], row["mbit_s"]) for row in rows):
        ms = {}
        for form in FORMS:
            free, row = cells[sp, None, form], cells[sp, rate, form]
            ms_per_byte = (row["probe_ms"] - free["probe_ms"]) / row["probe_bytes"]
            ms[form] = free["ms"] + row["gloo_bytes"] * ms_per_byte
        ratio = cells[sp, rate, "explicit"]["ms"] / cells[sp, rate, "laga"]["ms"]
        found.append({"sp": sp, "mbit_s": rate, "emulated": ratio, "predicted": ms["explicit"] / ms["laga"]})
    return found
