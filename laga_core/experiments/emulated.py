"""Nodes on slow links, emulated: real ranks in network namespaces whose links are shaped, timed and counted.

One rank a node, gloo between them. Each link speed is measured with all forms in turn, repeated, and the median
taken, so that what else the machine does falls on all alike.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..attention import MLAAttention
from ..config import MLAConfig
from ..costs import communication, transfers
from ..parallel import all_reduce_gradients
from ..results import Store, run_cell
from . import netns

EXPERIMENT = "emulated"
FORMS = ("explicit", "absorbed", "laga")
RATES: tuple[float | None, ...] = (100, 200, 500, 1000, 2000, None)
"""Megabits a second of each node's link; ``None`` is not shaped."""

_HEAD = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def config(heads: int = 32, hidden: int = 1024) -> MLAConfig:
    """DeepSeek-V3's head sizes with fewer heads and a narrower model, so that two cores are enough."""
    return MLAConfig(hidden_size=hidden, num_attention_heads=heads, q_lora_rank=None, **_HEAD)


def sweep(
    store: Store, degrees: Sequence[int] = (2, 4), rates: Sequence[float | None] = RATES, **sizes: Any
) -> list[dict[str, Any]]:
    """Step times and bytes at each degree: one record a degree, taken from the store if it is there.

    ``sizes`` go to :func:`measure`. Raises ``RuntimeError`` where this machine cannot emulate a cluster.
    """
    rows = []
    for sp in degrees:
        parameters = {"sp": sp, "rates": list(rates), **sizes}
        record = run_cell(store, EXPERIMENT, parameters, measure, kind="emulated", backend="gloo", ranks=sp)
        rows += record.metrics["rows"]
    return rows


def measure(
    sp: int, rates: Sequence[float | None], heads: int = 32, hidden: int = 1024, seq: int = 1024, repeats: int = 5
) -> dict[str, Any]:
    """Forward and backward of one layer, bf16 and eager, for each form at each rate; metrics of one record."""
    timeout = 60.0 + 30.0 * repeats * len(rates)
    return netns.run(_on_rank, rates, heads, hidden, seq, repeats, nodes=sp, timeout=timeout)[0]


def _on_rank(rates: Sequence[float | None], heads: int, hidden: int, seq: int, repeats: int) -> dict[str, Any]:
    sp = dist.get_world_size()
    shape = config(heads, hidden)
    steps = {form: _Step(shape, form, seq) for form in FORMS}
    probe = _probe(seq * hidden)
    rows = []
    for rate in rates:
        netns.shape(rate)
        times: dict[str, list[float]] = {name: [] for name in (*FORMS, "probe")}
        sent: dict[str, int] = {}
        for turn in range(repeats + 1):
            for name, call in (*steps.items(), ("probe", probe)):
                seconds, count = _timed(call)
                if turn:  # the first fills buffers
                    times[name].append(seconds)
                    sent[name] = count
        for form in FORMS:
            wire = 2 * communication(shape, form, seq, sp).total_bytes
            rows.append(
                {"sp": sp, "mbit_s": rate, "form": form, "ms": 1000 * statistics.median(times[form])}
                | {"sent_bytes": sent[form], "wire_bytes": wire, "collectives": 2 * len(transfers(form))}
                | {"probe_ms": 1000 * statistics.median(times["probe"]), "probe_bytes": probe.bytes}
            )
    return {"rows": rows}


class _Step:
    """Forward and backward of one layer on this rank's shard; gradients stay where they are made."""

    def __init__(self, shape: MLAConfig, form: str, seq: int) -> None:
        torch.manual_seed(0)
        group = dist.group.WORLD
        self.layer = MLAAttention(shape, form, "eager", group, dtype=torch.bfloat16)
        self.hidden = torch.randn(1, seq // dist.get_world_size(), shape.hidden_size, dtype=torch.bfloat16)

    def __call__(self) -> None:
        self.layer(self.hidden.requires_grad_()).sum().backward()
        self.layer.zero_grad()


class _probe:
    """An all-to-all of a known size: how fast the link is when nothing else happens."""

    def __init__(self, elements: int) -> None:
        sp = dist.get_world_size()
        self.data = torch.zeros(elements // sp * sp, dtype=torch.bfloat16)
        self.bytes = self.data.nbytes // sp * (sp - 1)

    def __call__(self) -> None:
        dist.all_to_all_single(torch.empty_like(self.data), self.data)


def _timed(call: Any) -> tuple[float, int]:
    """Seconds until the slowest rank is done, and bytes this node sent meanwhile."""
    dist.barrier()
    before, start = netns.sent_bytes(), time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - start, netns.sent_bytes() - before
