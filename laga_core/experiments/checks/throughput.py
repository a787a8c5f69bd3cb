"""Claims about speed: a rate needs the hardware it was taken on; what bytes explain, the cost model predicts."""

from __future__ import annotations

from typing import Any

from .memory import out_of_memory
from .rules import Claim, Finding, SourceMissing, check, needs_hardware

HARDWARE = {"table3": "ascend-910b", "table4": "ascend-910b", "table5": "ascend-910b"}


@check
def rate(claim: Claim, table: str, form: str, kernel: str, seq: int, sp: int, **setting: Any) -> Finding:
    """Tokens per second, forward and backward, of the four-layer stack; that it ran out of memory can be simulated."""
    if claim.value == "OOM":
        return out_of_memory(claim, kernel, seq, sp)
    return needs_hardware(f"tokens per second of {HARDWARE[table]}")


@check
def rate_ratio(claim: Claim, table: str, **setting: Any) -> Finding:
    """Laga over explicit."""
    raise SourceMissing("laga_core.experiments.throughput")


@check
def fitted_link(claim: Claim) -> Finding:
    """The rate between nodes that the reported step times imply."""
    raise SourceMissing("laga_core.experiments.throughput")
