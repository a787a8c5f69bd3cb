"""The memory trap: the paper's tables beside a simulation of the same step, and what the difference is made of.

Source of the reported numbers: tables 2, 4 and 6 and figure 4 of the paper, read from ``data/paper``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from ..config import MLAConfig
from ..memory import MemorySimulation, simulate_memory
from ..results import Store, published, run_cell
from .paper import read_table

EXPERIMENT, ON_DEVICE = "memory", "device_memory"
FORMS = ("explicit", "absorbed", "laga")
FUSED = "fused"
"""What stands for the paper's fused kernel: what such a kernel has to keep, and no workspace."""


def paper_config(heads: int = 128, hidden: int = 7168) -> MLAConfig:
    """The paper's prototype (§4.1), with other heads or hidden size where a figure sweeps them."""
    return replace(MLAConfig.preset("paper-v3"), num_attention_heads=heads, hidden_size=hidden)


@lru_cache(maxsize=256)
def simulated_cell(
    form: str, kernel: str, seq: int, sp: int, heads: int = 128, hidden: int = 7168, score: str | None = None
) -> dict[str, int]:
    """Metrics of one cell: peak and saved bytes of one layer of the prototype; ``score`` is absorbed's option."""
    options: dict[str, Any] = {} if score is None else {"score": score}
    result = simulate_memory(paper_config(heads, hidden), form=form, kernel=kernel, seq=seq, sp=sp, **options)
    return {"peak_bytes": result.peak_bytes, "saved_bytes": result.saved_bytes}


def peak_mb(store: Store, **cell: Any) -> float:
    """Peak of one cell in MB, simulated and stored.

    It is not looked up: a record of an earlier version of the code would go on being shown.
    """
    parameters = {name: value for name, value in cell.items() if value is not None}
    record = run_cell(store, EXPERIMENT, parameters, simulated_cell, kind="simulated", rerun=True)
    return record.metrics["peak_bytes"] / 1e6


def beside_the_paper(store: Store) -> list[dict[str, Any]]:
    """Every memory cell of tables 2 and 4: reported and simulated peak in MB, and their ratio.

    Absorbed is simulated with two score products under the eager kernel (``score="split"``), as the paper's numbers
    imply, and with one under the memory-linear kernel, which takes no other.
    """
    cells = [("table 2", "eager", row) for row in read_table("table2")]
    cells += [("table 4", row["kernel"], row) for row in read_table("table4")]
    rows = []
    for source, kernel, row in cells:
        for form in FORMS:
            if not row[f"{form}_mb"]:
                continue  # the paper's run ended out of memory
            size = {"seq": int(row["seq"]), "sp": int(row["sp"])}
            run_kernel = "eager" if kernel == "eager" else FUSED
            peak = peak_mb(store, form=form, kernel=run_kernel, score=_score(form, run_kernel), **size)
            reported = float(row[f"{form}_mb"])
            common = {"source": source, "kernel": kernel, **size, "form": form}
            rows.append(common | {"reported_mb": reported, "simulated_mb": peak, "ratio": peak / reported})
    return rows


def heads_sweep(store: Store) -> list[dict[str, Any]]:
    """Figure 4's second axis: absorbed above explicit in MB as the heads grow, reported and simulated."""
    rows = []
    for row in read_table("figure4"):
        size = {key: int(row[key]) for key in ("seq", "sp")}
        size |= {"heads": int(row["n_heads"]), "hidden": int(row["d_model"])}
        explicit = peak_mb(store, form="explicit", kernel="eager", **size)
        split, joint = (peak_mb(store, form="absorbed", kernel="eager", score=s, **size) for s in ("split", "joint"))
        reported = float(row["absorbed_minus_explicit_mb"])
        values = {"reported_mb": reported, "split_mb": split - explicit, "joint_mb": joint - explicit}
        rows.append(size | values | {"ratio": values["split_mb"] / reported})
    return rows


def across_hardware(store: Store, sp: int = 8) -> list[dict[str, Any]]:
    """Table 6: absorbed above explicit in MB on two kinds of hardware, reported, beside the one simulation of both."""
    rows = []
    for row in read_table("table6"):
        size = {"seq": int(row["seq"]), "sp": sp}
        reported = float(row["absorbed_minus_explicit_mb"])
        explicit, split, joint = _eager_peaks_mb(store, **size)
        values = {"reported_mb": reported, "split_mb": split - explicit, "joint_mb": joint - explicit}
        rows.append({"hardware": row["hardware"], **size, **values, "one_matrix_mb": score_matrix_mb(**size),
                     "ratio": values["split_mb"] / reported})  # fmt: skip
    return rows


def measured() -> list[dict[str, Any]]:
    """Peaks that ``scripts/device_memory.py`` has found on devices, beside the simulation; an empty row without any."""
    records = published(ON_DEVICE)
    if not records:
        return [{"hardware": "none yet", "allocated_mb": None, "simulated_mb": None, "ratio": None}]
    return [
        {"hardware": record.provenance["hardware"], **{"score": None} | record.parameters}
        | {f"{kind}_mb": record.metrics[f"{kind}_bytes"] / 1e6 for kind in ("allocated", "simulated")}
        | {"ratio": record.metrics["simulated_over_allocated"]}
        for record in records
    ]


def score_matrix_mb(seq: int, sp: int, heads: int = 128) -> float:
    """One matrix of scores on one rank: heads/sp x seq x seq in bf16."""
    return heads / sp * seq**2 * 2 / 1e6


def quadratic_fits(sp: int = 8) -> list[dict[str, Any]]:
    """Fit ``a + b seq + c seq^2`` through each reported column with three sequence lengths at ``sp``.

    ``c`` is given in score matrices and ``b`` in MB for every 4096 tokens: what grows with the square of the sequence
    and what grows with the sequence, told apart by the paper's own numbers.
    """
    columns: dict[str, list[tuple[int, float]]] = {}
    for row in read_table("table2", sp=sp):
        for form in FORMS:
            columns.setdefault(f"{form}, eager", []).append((int(row["seq"]), float(row[f"{form}_mb"])))
    for row in read_table("table4", sp=sp, kernel="fused"):
        for form in FORMS:
            columns.setdefault(f"{form}, fused", []).append((int(row["seq"]), float(row[f"{form}_mb"])))
    for row in read_table("table6"):
        name = {"ascend-910b": "absorbed − explicit, Ascend", "a100": "absorbed − explicit, A100"}[row["hardware"]]
        columns.setdefault(name, []).append((int(row["seq"]), float(row["absorbed_minus_explicit_mb"])))
    return [{"column": name} | _fit(points, sp) for name, points in columns.items()]


def decomposition(store: Store, sp: int = 8) -> list[dict[str, Any]]:
    """Absorbed above explicit, in MB: under the eager kernel split into the two things it is made of.

    ``score_mb`` goes away when the two score products are joined; ``latent_mb`` is what is left: tensors of the
    latent's size for each head. ``linear_mb`` is what they add under a kernel that holds no scores.
    """
    rows = []
    for row in read_table("table2", sp=sp):
        size = {"seq": int(row["seq"]), "sp": sp}
        explicit, split, joint = _eager_peaks_mb(store, **size)
        linear = [peak_mb(store, form=form, kernel=FUSED, score=_score(form, FUSED), **size) for form in FORMS[:2]]
        reported = float(row["absorbed_mb"]) - float(row["explicit_mb"])
        values = {"reported_mb": reported, "simulated_mb": split - explicit}
        parts = {"score_mb": split - joint, "one_matrix_mb": score_matrix_mb(**size), "latent_mb": joint - explicit}
        rows.append(size | values | parts | {"linear_mb": linear[1] - linear[0]})
    return rows


def timeline(
    config: MLAConfig, seq: int, sp: int, kernel: str = "eager", score: str | None = "split", roles: int = 9
) -> list[dict[str, Any]]:
    """Memory through forward and backward of the three forms: one row for each form, slot and role that is held.

    A slot is a place on the axis that the forms share. Each has the form's ``operator`` of the moment, the role that it
    ``changed``, and by how much. The ``roles`` largest are told apart, the rest are "other".
    """
    options: dict[str, dict[str, Any]] = {"absorbed": {} if score is None else {"score": score}}
    runs = {
        form: simulate_memory(config, form=form, kernel=kernel, seq=seq, sp=sp, **options.get(form, {}))
        for form in FORMS
    }
    kept = _largest_roles(runs.values(), roles)
    rows = []
    slot = 0
    for phase in ("forward", "backward"):
        states = {form: _states(run, phase) for form, run in runs.items()}
        length = max(len(each) for each in states.values())
        for place in range(length):
            for form, each in states.items():
                operator, role, change, held = each[place * len(each) // length]
                common = {"form": form, "slot": slot + place, "phase": phase}
                common |= {"operator": operator, "changed": role, "change_mb": round(change / 1e6, 1)}
                rows += [common | {"role": name, "mb": mb} for name, mb in _grouped(held, kept).items()]
        slot += length
    return rows


def _eager_peaks_mb(store: Store, **size: int) -> tuple[float, float, float]:
    """Peaks under the eager kernel: explicit's, and absorbed's with two score products and with one."""
    split, joint = (peak_mb(store, form="absorbed", kernel="eager", score=s, **size) for s in ("split", "joint"))
    return peak_mb(store, form="explicit", kernel="eager", **size), split, joint


def _score(form: str, kernel: str) -> str | None:
    return None if form != "absorbed" else "split" if kernel == "eager" else "joint"


def _fit(points: list[tuple[int, float]], sp: int) -> dict[str, float]:
    seq, mb = np.array(points).T
    c, b, a = np.polyfit(seq / 4096, mb, deg=2)
    values = {"fixed_mb": a, "linear_mb_per_4096": b, "score_matrices": c / score_matrix_mb(4096, sp)}
    return {name: float(value) for name, value in values.items()}


def _states(run: MemorySimulation, phase: str) -> list[tuple[str, str, int, dict[str, int]]]:
    """After each change of a phase worth seeing: operator, role that changed, by how much, and bytes held by role."""
    held: dict[str, int] = {}
    states = []
    for event in run.timeline:
        held[event.role] = held.get(event.role, 0) + event.delta
        if event.phase == phase and abs(event.delta) > run.peak_bytes / 2000:
            states.append((event.operator, event.role, event.delta, dict(held)))
    return states


def _largest_roles(runs: Any, count: int) -> set[str]:
    largest: dict[str, int] = {}
    for run in runs:
        held: dict[str, int] = {}
        for event in run.timeline:
            held[event.role] = held.get(event.role, 0) + event.delta
            largest[event.role] = max(largest.get(event.role, 0), held[event.role])
    return set(sorted(largest, key=lambda role: -largest[role])[:count])


def _grouped(held: dict[str, int], kept: set[str]) -> dict[str, float]:
    grouped: dict[str, float] = {}
    for role, size in held.items():
        name = role if role in kept else "other"
        grouped[name] = grouped.get(name, 0) + size / 1e6
    return {name: round(mb, 1) for name, mb in grouped.items() if mb > 0.05}
