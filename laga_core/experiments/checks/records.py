"""Committed records: what a claim may be decided from, the same in every checkout."""

from __future__ import annotations

from typing import Any

from ... import results
from ...results import Record
from .rules import SourceMissing


def published(experiment: str, **parameters: Any) -> list[Record]:
    """Records of an experiment under ``data/published``, of any hardware; ``SourceMissing`` if there are none."""
    found = results.published(experiment, **parameters)
    if not found:
        raise SourceMissing(
            f"a record of {experiment} with {parameters}" if parameters else f"a record of {experiment}"
        )
    return found


def hardware(records: list[Record]) -> str:
    """Where records come from, in words."""
    return ", ".join(sorted({str(record.provenance["hardware"]) for record in records}))
