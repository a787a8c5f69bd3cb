"""What decides the claims of the paper: one module for each family, and one for the paper's own consistency."""

from . import communication, consistency, correctness, field, memory, throughput, training
from .rules import FAMILIES, GONE, KINDS, REGISTRY, VERDICTS, Check, Claim, Finding, SourceMissing, check, show

__all__ = [
    "FAMILIES",
    "GONE",
    "KINDS",
    "REGISTRY",
    "VERDICTS",
    "Check",
    "Claim",
    "Finding",
    "SourceMissing",
    "check",
    "communication",
    "consistency",
    "correctness",
    "field",
    "memory",
    "show",
    "throughput",
    "training",
]
