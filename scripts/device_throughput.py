"""What one rank of eight computes, on one GPU or NPU: three forms, eager and fused, no communication.

    python scripts/device_throughput.py [--device cuda|npu] [--store FOLDER]
    python scripts/device_throughput.py --toy [--device cpu]    # to see it work: small sizes, records in data/local

A fake process group stands in for the other ranks, so that one device runs one rank's share at DeepSeek-V3's size. The
kernels are first compared with fp64. No new cell starts after five minutes; records go to data/published/<hardware>.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from laga_core.attention import MLAAttention
from laga_core.device import describe, peak_memory_bytes, reset_peak_memory, resolve_device
from laga_core.experiments.memory import paper_config
from laga_core.experiments.throughput import FORMS, step_time_ms
from laga_core.kernels import attention
from laga_core.memory.fake import fake_group
from laga_core.results import Store, data_dir, run_cell

FUSED = {"cpu": "tiled", "cuda": "auto", "npu": "npu"}
SECONDS = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", help="default: this machine's accelerator")
    parser.add_argument("--toy", action="store_true", help="sizes that a CPU can run")
    parser.add_argument("--store", help="default: data/published/<hardware>, or data/local with --toy")
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if device.type == "cpu" and not options.toy:
        parser.error("there is no GPU or NPU here, and these sizes are none for a CPU; --toy takes small ones")
    slug = re.sub(r"[^a-z0-9]+", "-", describe(device).lower()).strip("-")
    store = Store(options.store or data_dir() / ("local" if options.toy else f"published/{slug}"))
    heads, hidden, seqs = (16, 256, [256]) if options.toy else (128, 7168, [4096, 8192, 16384])
    deadline = time.monotonic() + SECONDS

    def cell(experiment: str, fn: Callable[..., dict[str, Any]], **parameters: Any) -> None:
        if time.monotonic() > deadline:
            print(experiment, parameters, "left out: time is over")
            return
        try:
            record = run_cell(store, experiment, parameters, fn, device=device)
            print(experiment, parameters, record.status, record.metrics, flush=True)
        except Exception as error:  # recorded as failed; the others still get their turn
            print(experiment, parameters, "failed:", error, flush=True)

    for kernel in ("eager", FUSED[device.type]):
        cell("kernel_parity", parity, device=device.type, kernel=kernel, seq=256 if options.toy else 1024, heads=4)
    for seq in seqs:
        for kernel in ("eager", FUSED[device.type]):
            for form in FORMS:
                size = {"seq": seq, "sp": 8, "heads": heads, "hidden": hidden}
                cell("rank_compute", compute, device=device.type, form=form, kernel=kernel, **size)


def parity(device: str, kernel: str, seq: int, heads: int) -> dict[str, float]:
    """Largest deviation from fp64, relative to its largest element, of output and gradients in bf16, causal 192/128."""
    torch.manual_seed(0)
    exact = [torch.randn(1, seq, heads, dim).bfloat16().double() for dim in (192, 192, 128)]
    found = {}
    results = []
    for dtype, where, name in ((torch.float64, "cpu", "eager"), (torch.bfloat16, device, kernel)):
        q, k, v = (x.to(where, dtype).requires_grad_() for x in exact)
        out = attention(q, k, v, scale=192**-0.5, causal=True, kernel=name)
        results.append([x.detach().cpu().double() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v)))])
    for tensor, true, ours in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        found[tensor] = float((true - ours).abs().max() / true.abs().max())
    return found


def compute(device: str, form: str, kernel: str, seq: int, sp: int, heads: int, hidden: int) -> dict[str, Any]:
    """Milliseconds of one layer's forward and backward on one rank, and its peak memory (``None`` on a CPU)."""
    where = resolve_device(device)
    with fake_group(sp, where) as group:
        layer = MLAAttention(paper_config(heads, hidden), form, kernel, group, dtype=torch.bfloat16, device=where)
        x = torch.randn(1, seq // sp, hidden, dtype=torch.bfloat16, device=where)
        reset_peak_memory(where)
        times = []
        for _ in range(6):
            times.append(step_time_ms(lambda: layer(x).sum().backward(), where))
            layer.zero_grad()
    return {"ms": statistics.median(times[1:]), "peak_bytes": peak_memory_bytes(where)}


if __name__ == "__main__":
    main()
