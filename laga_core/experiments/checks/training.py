"""Claims about training runs: read from the records of experiments 05 to 07."""

from __future__ import annotations

from typing import Any

from .rules import Claim, Finding, SourceMissing, check


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
def measured_on(claim: Claim, hardware: str, experiment: str) -> Finding:
    raise SourceMissing("results")
