"""Claims about speed: a rate needs the hardware it was taken on; what bytes explain, the cost model predicts."""

from __future__ import annotations

from typing import Any

from .rules import Claim, Finding, SourceMissing, check, needs_hardware

HARDWARE = {"table3": "ascend-910b", "table4": "ascend-910b", "table5": "ascend-910b"}


@check
def rate(claim: Claim, table: str, form: str, **setting: Any) -> Finding:
    """Tokens per second, forward and backward, of the four-layer stack."""
    return needs_hardware(f"tokens per second of {HARDWARE[table]}")


@check
def rate_ratio(claim: Claim, table: str, **setting: Any) -> Finding:
    """Laga over explicit."""
    raise SourceMissing("laga_core.experiments.throughput")


@check
def fitted_link(claim: Claim) -> Finding:
    """The rate between nodes that the reported step times imply."""
    raise SourceMissing("laga_core.experiments.throughput")
