"""Throughput: what the reported step times say about bytes and links, and what this machine measures.

Reported: tables 3, 4 and 5 of the paper, tokens per second of forward and backward of a four-layer stack.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ..attention import MLAAttention
from ..costs import communication
from ..device import backend_for, resolve_device, synchronize
from ..experts import MLP
from ..launch import launch
from ..model import Block
from ..results import Store, data_dir, run_cell
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


def across_nodes(kernel: str = "fused") -> list[dict[str, Any]]:
    """Table 5 (16 ranks): what communication is left when computation is taken from one node.

    Twice the ranks have half the work each, so half of table 4's step, less what its bytes take at table 4's own rate,
    is the computation. What remains of a cross-node step is divided by the bytes sent.
    """
    node_gb_s = link_fit("table 4", "fused")["gb_s"]
    steps = {(s["source"], s["kernel"], s["seq"], s["form"]): s for s in reported_steps()}
    rows = []
    for seq in (4096, 8192, 16384):
        for form in ("explicit", "laga"):
            node, cross = (steps[f"table {n}", kernel, seq, form] for n in (4, 5))
            compute_ms = (node["ms"] - node["sent_mb"] / node_gb_s) / 2
            left_ms = cross["ms"] - compute_ms
            rows.append(
                {"seq": seq, "form": form, "step_ms": cross["ms"], "compute_ms": compute_ms, "left_ms": left_ms}
                | {"sent_mb": cross["sent_mb"], "implied_gb_s": cross["sent_mb"] / left_ms}
            )
    return rows


def across_nodes_fit(kernel: str = "fused") -> dict[str, Any]:
    """Fit what is left of table 5's steps by a fixed time and a rate: ``left = fixed + sent / rate``.

    ``predicted`` sets the reported ratio beside the fit's; ``bytes_only`` beside what the paper's 11 GB/s alone gives.
    """
    rows = across_nodes(kernel)
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


# --- measured on this machine ---

EXPERIMENT = "throughput"


def sweep(
    store: Store,
    forms: Sequence[str] = FORMS,
    kernels: Sequence[str] = ("eager",),
    seqs: Sequence[int] = (512,),
    sps: Sequence[int] = (2,),
    heads: int = 16,
    hidden: int = 256,
    layers: int = LAYERS,
    repeats: int = 3,
    device: str | None = None,
    rerun: bool = False,
    **launch_options: Any,
) -> list[dict[str, Any]]:
    """Tokens per second of each cell, forward and backward of a stack of MLA and MLP.

    Cells in the store are kept, whatever code measured them (``commit`` says which), unless they are to ``rerun``.
    A cell that runs out of memory is a row with status ``oom`` and no rate. ``sps`` counts all ranks; with several
    nodes give ``nnodes`` among the ``launch_options``, and each runs its share.
    """
    where, nnodes = resolve_device(device), launch_options.get("nnodes", 1)
    rows = []
    for kernel, seq, sp, form in itertools.product(kernels, seqs, sps, forms):
        if sp % nnodes:
            raise ValueError(f"sp={sp} ranks cannot be shared evenly by nnodes={nnodes}")
        size = {"seq": seq, "heads": heads, "hidden": hidden, "layers": layers, "repeats": repeats}
        cell = {"form": form, "kernel": kernel, "sp": sp, **size}
        hardware: dict[str, Any] = {"device": device, "backend": backend_for(where), "ranks": sp}

        def run(sp: int, **cell: Any) -> dict[str, float]:
            options = {"device": device, "nproc": sp // nnodes, **launch_options}
            return {"ms": max(launch(_step_ms, cell, **options))}

        machine = {"device": where.type, "nnodes": nnodes}
        record = run_cell(
            store,
            EXPERIMENT,
            cell | machine,
            lambda device, nnodes, run=run, **cell: run(**cell),
            rerun=rerun,
            **hardware,
        )
        rate = 1000 * seq / record.metrics["ms"] if record.status == "ok" else None
        commit = (record.provenance["commit"] or "")[:7]
        rows.append({**cell, "status": record.status, "tok_s": rate, "commit": commit})
    return rows


def _step_ms(cell: dict[str, Any]) -> float:
    """Median milliseconds of a step on this rank, by device events where there are any."""
    device = resolve_device(None) if dist.get_backend() != "gloo" else torch.device("cpu")
    where: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    config, hidden = paper_config(cell["heads"], cell["hidden"]), cell["hidden"]
    torch.manual_seed(0)
    stack = nn.Sequential(
        *(
            Block(
                hidden,
                MLAAttention(config, cell["form"], cell["kernel"], dist.group.WORLD, **where),
                MLP(hidden, 4 * hidden, **where),
                config.norm_eps,
                **where,
            )
            for _ in range(cell["layers"])
        )
    )
    x = torch.randn(1, cell["seq"] // dist.get_world_size(), hidden, **where)
    times = []
    for _ in range(cell["repeats"] + 1):
        dist.barrier()
        times.append(step_time_ms(lambda: stack(x).sum().backward(), device))
        stack.zero_grad()
    return statistics.median(times[1:])


def tokens_per_second(store: Store) -> list[dict[str, Any]]:
    """Tables 3 to 5 as reported, and what ``store`` and the published records have measured: a row for each setting.

    Rows with ``kind`` and ``source``, the setting, tokens per second of each form (a status such as ``OOM`` where there
    is no rate, ``None`` where nothing was run), and Laga's over explicit's.
    """
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name in ("table3", "table4", "table5"):
        for cell in read_table(name):
            setting = {"kernel": "eager", "n_heads": "128", **cell}  # what table 3, and what the others have in common
            sizes = (int(setting[column]) for column in ("n_heads", "sp", "seq"))
            place = ("reported", name.replace("table", "table "), setting["kernel"], *sizes)
            rates = {form: cell[f"{form}_tok_s"] for form in FORMS}
            rows[place] = {form: rate if rate == "OOM" else float(rate) for form, rate in rates.items()}
    stores = [*(Store(f) for f in sorted((data_dir() / "published").glob("*"))), store]
    for record in (record for each in stores for record in each.load(EXPERIMENT)):
        p = record.parameters
        place = (record.kind, record.provenance["hardware"], *(p[x] for x in ("kernel", "heads", "sp", "seq")))
        rate = 1000 * p["seq"] / record.metrics["ms"] if record.status == "ok" else record.status.upper()
        rows.setdefault(place, dict.fromkeys(FORMS))[p["form"]] = rate
    columns = ("kind", "source", "kernel", "heads", "sp", "seq")
    return [
        {**dict(zip(columns, place, strict=True)), **rates, "laga / explicit": _over(rates["laga"], rates["explicit"])}
        for place, rates in rows.items()
    ]


def _over(a: Any, b: Any) -> float | None:
    return a / b if isinstance(a, float) and isinstance(b, float) else None


def step_time_ms(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds that ``step`` takes, by the device's own events where it has them."""
    if device.type == "cpu":
        start = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - start)
    start_event, end_event = (torch.Event(device, enable_timing=True) for _ in range(2))
    start_event.record()
    step()
    end_event.record()
    synchronize(device)
    return float(start_event.elapsed_time(end_event))
