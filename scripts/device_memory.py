"""Simulated against allocated memory, on one GPU or NPU: one rank of eight at DeepSeek-V3's size.

    python scripts/device_memory.py [--device cuda|npu] [--store FOLDER]

A fake process group stands in for the other ranks: buffers have the right size, nothing is sent. Each cell runs two
steps and reads the allocator's peak of the second, which the simulation should meet within 2 %. No new cell starts
after four minutes; records go to data/published/<hardware>. Until there are any, only CPUs vouch for the simulation.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from typing import Any

import torch

from laga_core.attention import MLAAttention
from laga_core.device import describe, peak_memory_bytes, reset_peak_memory, resolve_device, synchronize
from laga_core.experiments.memory import ON_DEVICE, paper_config
from laga_core.memory import simulate_memory
from laga_core.memory.fake import fake_group
from laga_core.results import Store, data_dir, run_cell

SECONDS = 240.0
WITHIN = 0.02
VARIANTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("explicit", {}),
    ("absorbed", {"score": "split"}),
    ("absorbed", {"score": "joint"}),
    ("laga", {}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", help="default: this machine's accelerator")
    parser.add_argument("--store", help="default: data/published/<hardware>")
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if device.type == "cpu":
        parser.error("there is no GPU or NPU here, and a CPU's allocator keeps no peak (the tests read its profiler)")
    slug = re.sub(r"[^a-z0-9]+", "-", describe(device).lower()).strip("-")
    store = Store(options.store or data_dir() / "published" / slug)
    deadline = time.monotonic() + SECONDS
    off = []
    for seq in (4096, 8192, 16384):
        for kernel in ("eager", "tiled"):
            for form, form_options in VARIANTS:
                if kernel == "tiled" and form_options.get("score") == "split":
                    continue
                cell = {"form": form, "kernel": kernel, "seq": seq, "sp": 8, **form_options}
                if time.monotonic() > deadline:
                    print(cell, "left out: time is over")
                    continue
                record = run_cell(store, ON_DEVICE, cell, compare, device=device)
                ratio = record.metrics.get("simulated_over_allocated")
                print(cell, record.status, ratio, flush=True)
                if ratio is not None and abs(ratio - 1) > WITHIN:
                    off.append(cell)
    print(f"{len(off)} cells off by more than {WITHIN:.0%}: {off}" if off else f"all cells within {WITHIN:.0%}")
    return 1 if off else 0


def compare(
    form: str, kernel: str, seq: int, sp: int, heads: int = 128, hidden: int = 7168, **options: Any
) -> dict[str, Any]:
    """Allocated and simulated peak bytes of one layer's second step, and their ratio."""
    device, config = resolve_device(), paper_config(heads, hidden)
    with fake_group(sp, device) as group:
        layer = MLAAttention(config, form, kernel, group, dtype=torch.bfloat16, device=device, **options)
        tokens = torch.zeros(1, seq // sp, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
        for _ in range(2):
            tokens.grad = None
            reset_peak_memory(device)
            layer(tokens).sum().backward()
            synchronize(device)
        allocated = peak_memory_bytes(device)
    simulated = simulate_memory(config, form, kernel, seq, sp, **options).peak_bytes
    found = {"allocated_bytes": allocated, "simulated_bytes": simulated}
    return found | {"simulated_over_allocated": simulated / allocated if allocated else None}


if __name__ == "__main__":
    sys.exit(main())
