"""Nodes on slow links, emulated: real ranks in network namespaces whose links are shaped, timed and counted.

One rank a node, gloo between them. Every round times all forms at all link speeds in turn, and the median over the
rounds is taken, so that what else the machine does falls on all alike.

The interface counters agree with the wire formula up to frames and headers, but for one collective: gloo makes a
reduce-scatter of an all-reduce, which sends twice what is needed (:func:`gloo_bytes`).

    python -m laga_core.experiments.emulated    # measures again what data/published/cpu has, on a quiet machine
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .. import results
from ..attention import MLAAttention
from ..config import MLAConfig
from ..costs import communication
from ..results import Store, data_dir, run_cell
from . import netns
from .quiet import Quiet, timed

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
    store: Store,
    degrees: Sequence[int] = (2, 4),
    rates: Sequence[float | None] = RATES,
    patience: float = 0.0,
    rerun: bool = False,
    **sizes: int,
) -> list[dict[str, Any]]:
    """Step times and bytes at each degree: one record a degree, taken from the store if it is there.

    ``sizes`` replace some of :data:`SIZES`. On a busy machine up to ``patience`` seconds a degree are spent waiting for
    moments when nobody else computes. Raises ``RuntimeError`` where this machine cannot emulate a cluster.
    """
    rows = []
    for sp in degrees:
        parameters = {"sp": sp, "rates": list(rates), **SIZES, **sizes}
        notes: dict[str, Any] = {"backend": "gloo", "ranks": sp, "load_before": round(os.getloadavg()[0], 1)}
        run = partial(measure, patience=patience)
        rows += run_cell(store, EXPERIMENT, parameters, run, kind="emulated", rerun=rerun, **notes).metrics["rows"]
    return rows


def published() -> list[dict[str, Any]]:
    """The rows of the committed records, of every machine that has some."""
    rows = [row for record in results.published(EXPERIMENT) for row in record.metrics["rows"]]
    return sorted(rows, key=lambda row: row["sp"])  # stable: the rates stay in their order


def wire_bytes(shape: MLAConfig, form: str, seq: int, sp: int) -> dict[str, int]:
    """Bytes one rank sends in forward and backward by the closed forms, by collective."""
    sides = (communication(shape, form, seq, sp, direction=side).by_collective for side in ("forward", "backward"))
    return dict(sum(map(Counter, sides), Counter()))


def gloo_bytes(sent: Mapping[str, int]) -> int:
    """What gloo makes of :func:`wire_bytes`: reduce-scatters count once more."""
    return sum(sent.values()) + sent.get("reduce_scatter", 0)


def measure(
    sp: int, rates: Sequence[float | None], heads: int, hidden: int, seq: int, repeats: int, patience: float = 0.0
) -> dict[str, Any]:
    """Forward and backward of one layer, bf16 and eager, for each form at each rate; metrics of one record.

    ``ms`` is the slowest rank's. ``probes`` are milliseconds and bytes of each collective alone at that rate, and
    ``quiet`` the part of the form's steps during which nobody else computed.
    """
    timeout = 300.0 + 40.0 * repeats * len(rates) + patience
    per_rank = netns.run(_on_rank, rates, heads, hidden, seq, repeats, patience, nodes=sp, timeout=timeout)
    ms = {
        key: statistics.median(
            1000 * max(each) for each in zip(*(rank["seconds"][key] for rank in per_rank), strict=True)
        )
        for key in per_rank[0]["seconds"]
    }
    shape, first, rows = config(heads, hidden), per_rank[0], []
    for rate in rates:
        probes = {name: {"ms": ms[rate, name], "bytes": size} for name, size in first["probe_bytes"].items()}
        for form in FORMS:
            wire = wire_bytes(shape, form, seq, sp)
            counted = {"sent_bytes": first["sent"][rate, form], "gloo_bytes": gloo_bytes(wire), "wire_bytes": wire}
            row = {"sp": sp, "mbit_s": rate, "form": form, "ms": ms[rate, form], "quiet": first["quiet"][rate, form]}
            rows.append({**row, **counted, "probes": probes})
    return {"rows": rows}


def _on_rank(
    rates: Sequence[float | None], heads: int, hidden: int, seq: int, repeats: int, patience: float
) -> dict[str, Any]:
    sp, shape = dist.get_world_size(), config(heads, hidden)
    probes = _probes(shape, seq, sp)
    calls = {form: _step(shape, form, seq // sp) for form in FORMS} | {name: call for name, (call, _) in probes.items()}
    keys = [(rate, name) for rate in rates for name in calls]
    seconds: dict[Any, list[float]] = {key: [] for key in keys}
    alone: dict[Any, list[bool]] = {key: [] for key in keys}
    sent, quiet = {}, Quiet(patience)
    for call in calls.values():
        timed(call)  # fills buffers and opens connections
    for rate, name in keys:
        netns.shape(rate)
        sent[rate, name] = timed(calls[name])[1]
    for _ in range(repeats):
        for rate, name in keys:
            netns.shape(rate)
            took, nobody = quiet.timed(calls[name])
            seconds[rate, name].append(took)
            alone[rate, name].append(nobody)
    return {
        "seconds": seconds,
        "quiet": {key: statistics.mean(each) for key, each in alone.items()},
        "sent": sent,
        "probe_bytes": {name: size for name, (_, size) in probes.items()},
    }


def _step(shape: MLAConfig, form: str, tokens: int) -> Callable[[], None]:
    """Forward and backward of one layer on this rank's shard; gradients stay where they are made."""
    torch.manual_seed(0)
    layer = MLAAttention(shape, form, "eager", dist.group.WORLD, dtype=torch.bfloat16)
    hidden = torch.randn(1, tokens, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        layer(hidden).sum().backward()
        layer.zero_grad()

    return step


def _probes(shape: MLAConfig, seq: int, sp: int) -> dict[str, tuple[Callable[[], None], int]]:
    """Each collective alone, as large as a query's or the latent's, and the bytes that it has to send."""
    query = torch.zeros(sp, seq // sp * shape.num_attention_heads // sp * shape.qk_head_dim, dtype=torch.bfloat16)
    shard = torch.zeros(seq // sp, shape.latent_dim, dtype=torch.bfloat16)
    whole, others = torch.zeros(seq, shape.latent_dim, dtype=torch.bfloat16), (sp - 1) * shard.nbytes
    received = torch.empty_like(query)

    def all_to_all() -> None:
        dist.all_to_all_single(received, query)

    def all_gather() -> None:
        dist.all_gather_single(whole, shard)

    def reduce_scatter() -> None:
        dist.reduce_scatter_single(shard, whole)

    return {
        "all_to_all": (all_to_all, query.nbytes // sp * (sp - 1)),
        "all_gather": (all_gather, others),
        "reduce_scatter": (reduce_scatter, others),
    }


def predicted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Explicit's step time in units of the others', for each degree and rate, beside what two measurements predict.

    They are the unshaped step, and each collective alone: what it takes at this rate more than without a limit, for a
    byte, is charged for every byte that the closed forms say the step sends by it. No step on a slow link is used.
    """
    cells = {(row["sp"], row["mbit_s"], row["form"]): row for row in rows}

    def ms(sp: int, rate: float | None, form: str) -> float:
        (sent, probes), free = _charges(cells[sp, rate, form]), cells[sp, None, form]
        unshaped = _charges(free)[1]
        waits = (
            size * (probes[name]["ms"] - unshaped[name]["ms"]) / probes[name]["bytes"] for name, size in sent.items()
        )
        return float(free["ms"]) + sum(waits)

    found = []
    for (sp, rate, form), row in cells.items():
        if form != "explicit":
            emulated = cells[sp, rate, "explicit"]["ms"] / row["ms"]
            ratio = ms(sp, rate, "explicit") / ms(sp, rate, form)
            found.append({"sp": sp, "mbit_s": rate, "form": form, "emulated": emulated, "predicted": ratio})
    return found


def _charges(row: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, dict[str, float]]]:
    """Bytes sent by each collective, and the probe of each. In older records an all-to-all stands for all of them."""
    if "probes" in row:
        return row["wire_bytes"], row["probes"]
    return {"all_to_all": row["gloo_bytes"]}, {"all_to_all": {"ms": row["probe_ms"], "bytes": row["probe_bytes"]}}


if __name__ == "__main__":
    for each in predicted(sweep(Store(data_dir() / "published" / "cpu"), patience=90.0, rerun=True)):
        print("sp {sp}, {mbit_s} Mbit/s, {form}: emulated {emulated:.2f}, predicted {predicted:.2f}".format(**each))
