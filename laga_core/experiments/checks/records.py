"""Committed records: what a claim may be decided from, the same in every checkout."""

from __future__ import annotations

from typing import Any

from ...results import Record, Store, data_dir
from .rules import SourceMissing


def published(experiment: str, **parameters: Any) -> list[Record]:
    """Records of an experiment under ``data/published``, of any hardware; ``SourceMissing`` if there are none."""
    stores = sorted(path for path in (data_dir() / "published").glob("*") if path.is_dir())
    found = [record for path in stores for record in Store(path).load(experiment, status="ok", **parameters)]
    if not found:
        raise SourceMissing(
            f"a record of {experiment} with {parameters}" if parameters else f"a record of {experiment}"
        )
    return found


def hardware(records: list[Record]) -> str:
    """Where records come from, in words."""
    return ", ".join(sorted({str(record.provenance["hardware"]) for record in records}))
