"""Claims about training runs: read from the records of experiments 05 to 07."""

from __future__ import annotations

from typing import Any

from .records import published
from .rules import Claim, Finding, SourceMissing, check, needs_hardware


@check
def convergence(claim: Claim, metric: str) -> Finding:
    raise SourceMissing("records of 05_convergence")


@check
def experts(claim: Claim, metric: str, **options: Any) -> Finding:
    raise SourceMissing("records of 06_experts")


@check
def routing_noise(claim: Claim, metric: str) -> Finding:
    raise SourceMissing("records of 07_routing_noise")


@check
def measured_on(claim: Claim, device: str, experiment: str) -> Finding:
    """What only a run on this kind of device can tell."""
    try:
        here = [record for record in published(experiment) if record.provenance["device"] == device]
    except SourceMissing:
        here = []
    if here:  # somebody ran it: the claim wants reading, not a shrug
        raise SourceMissing(f"a check that reads the records of {experiment} on {device}")
    return needs_hardware(f"{experiment} has not run on {device}")
