"""Communication: the paper's table 1 and figure 3b under both accountings, and the ledger of real ranks beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from ..attention import MLAAttention
from ..config import MLAConfig
from ..costs import ACCOUNTINGS, communication, crossover_expression, substitutions
from ..launch import launch
from ..parallel import record_bytes
from ..results import Record, Store, provenance
from .paper import read_table

EXPERIMENT = "communication"
FORMS = ("explicit", "absorbed", "laga")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("explicit", {"key_rope": "replicated"}),
    ("explicit", {"key_rope": "headless"}),
    ("absorbed", {"score": "joint"}),
    ("absorbed", {"score": "split"}),
    ("laga", {}),
)
PAPER = MLAConfig.preset("paper-v3")


def table_1() -> list[dict[str, Any]]:
    """Every cell of table 1 in MB: reported, and derived under both accountings; ``agrees`` to the printed digit."""
    rows = []
    for row in read_table("table1"):
        seq, sp = int(row["seq"]), int(row["sp"])
        for form in FORMS:
            sent = {a: communication(PAPER, form, seq, sp, a).total_bytes / 1e6 for a in ACCOUNTINGS}
            rows.append(
                {
                    "sp": sp,
                    "seq": seq,
                    "form": form,
                    "reported_mb": float(row[f"{form}_mb"]),
                    "paper_mb": sent["paper"],
                    "wire_mb": sent["wire"],
                    "agrees": f"{sent['paper']:.1f}" == row[f"{form}_mb"],
                }
            )
    return rows


def figure_3b() -> list[dict[str, Any]]:
    """Explicit / Laga as the heads grow: reported, derived under both accountings, against a headless rotary key."""
    rows = []
    for row in read_table("figure3b"):
        config = replace(PAPER, num_attention_heads=int(row["n_heads"]))
        size = {"sp": int(row["sp"]), "seq": int(row["seq"])}
        found = ratios(config, [size["sp"]], size["seq"])[0]
        agrees = f"{found['paper']:.2f}" == row["explicit_over_laga"]
        rows.append(
            {
                "heads": config.num_attention_heads,
                "reported": float(row["explicit_over_laga"]),
                **found,
                "agrees": agrees,
            }
        )
    return rows


def ratios(config: MLAConfig, degrees: Iterable[int], seq: int) -> list[dict[str, Any]]:
    """Explicit / Laga at each degree: as the paper counts, on the wire, and against an explicit form whose rotary key
    is sent once (``wire_headless``)."""

    def sent(form: str, sp: int, accounting: str, **options: Any) -> int:
        return communication(config, form, seq, sp, accounting, **options).total_bytes

    return [
        {
            "sp": sp,
            "paper": sent("explicit", sp, "paper") / sent("laga", sp, "paper"),
            "wire": sent("explicit", sp, "wire") / sent("laga", sp, "wire"),
            "wire_headless": sent("explicit", sp, "wire", key_rope="headless") / sent("laga", sp, "wire"),
        }
        for sp in degrees
    ]


def crossover(config: MLAConfig) -> float:
    """The degree at which explicit and Laga send alike on the wire."""
    return float(crossover_expression().subs(substitutions(config, seq=1, sp=1, batch=1, dtype=torch.bfloat16)))


def ledger_check(
    store: Store,
    preset: str,
    degrees: Sequence[int],
    tokens_per_rank: int = 4,
    batch: int = 1,
    device: str | None = None,
    timeout: float = 300.0,
    **launch_options: Any,
) -> list[dict[str, Any]]:
    """Count what real ranks send, forward and backward, and set the closed form beside it; bf16.

    Each degree is one launch that runs every form with every option; each count becomes a measured record. ``preset``
    names the dimensions. Raises ``RuntimeError`` where the ranks of a launch sent different amounts.
    """
    rows = []
    for sp in degrees:
        size = {"preset": preset, "sp": sp, "seq": sp * tokens_per_rank, "batch": batch, "dtype": "bfloat16"}
        per_rank = launch(_count, size, nproc=sp, device=device, timeout=timeout, **launch_options)
        if any(counts != per_rank[0] for counts in per_rank):
            raise RuntimeError(f"the ranks of a launch at sp={sp} sent different amounts: {per_rank}")
        where = provenance(device=device, ranks=sp, backend=per_rank[0]["backend"])
        for (form, options), counts in zip(VARIANTS, per_rank[0]["counts"], strict=True):
            parameters = {"form": form, **options, **size}
            record = Record(
                experiment=EXPERIMENT, kind="measured", parameters=parameters, metrics=counts, provenance=where
            )
            store.write(record)
            rows += _beside(form, options, size, counts)
    return rows


def _beside(form: str, options: Mapping[str, Any], size: Mapping[str, Any], counts: Mapping[str, Any]) -> list[dict]:
    """Measured and derived bytes, a row for each direction."""
    config, seq, sp, batch = MLAConfig.preset(size["preset"]), size["seq"], size["sp"], size["batch"]
    rows = []
    for direction in ("forward", "backward"):
        derived = communication(config, form, seq, sp, batch=batch, direction=direction, **options)
        row = {"sp": sp, "form": form, "option": next(iter(options.values()), ""), "direction": direction}
        measured = counts[f"{direction}_bytes"]
        rows.append(
            {
                **row,
                "measured_bytes": sum(measured.values()),
                "derived_bytes": derived.total_bytes,
                "agrees": measured == derived.by_collective,
            }
        )
    return rows


def _count(size: Mapping[str, Any]) -> dict[str, Any]:
    """On a rank: bytes by collective and direction, for each variant in turn."""
    counts = [_count_variant(form, options, size) for form, options in VARIANTS]
    return {"backend": dist.get_backend(), "counts": counts}


def _count_variant(form: str, options: Mapping[str, Any], size: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    config, group = MLAConfig.preset(size["preset"]), dist.group.WORLD
    device = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else torch.device("cpu")
    # Bytes do not depend on values: weights are left as the memory comes, and have no gradient.
    layer = MLAAttention(config, form, group=group, dtype=torch.bfloat16, device="meta", **options)
    layer = layer.to_empty(device=device).requires_grad_(False)
    shape = (size["batch"], size["seq"] // size["sp"], config.hidden_size)
    hidden = torch.zeros(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    with record_bytes() as ledger:
        out = layer(hidden)
        out.backward(torch.zeros_like(out))
    return {f"{direction}_bytes": ledger.by_collective("wire", direction) for direction in ("forward", "backward")}
