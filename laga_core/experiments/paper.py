"""The paper's tables as reported: CSV files under ``data/paper``, every cell kept as it was printed."""

from __future__ import annotations

import csv
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..results import data_dir

FILES = {
    "table1": "table1_communication.csv",
    "table2": "table2_memory_eager.csv",
    "table3": "table3_throughput_small.csv",
    "table4": "table4_single_node.csv",
    "table5": "table5_cross_node.csv",
    "table6": "table6_cross_hardware.csv",
    "figure3b": "fig3b_communication_heads.csv",
    "figure4": "fig4_memory_heads.csv",
}


def folder() -> Path:
    """Where the paper's numbers lie; ``FileNotFoundError`` outside a checkout."""
    return data_dir() / "paper"


@cache
def _rows(file: str) -> tuple[dict[str, str], ...]:
    with (folder() / file).open(newline="", encoding="utf-8") as handle:
        return tuple(csv.DictReader(handle))


def read_table(name: str, **where: object) -> list[dict[str, str]]:
    """Rows of a table or figure, printed cells as strings; ``where`` keeps the rows with these values.

    A value of ``where`` may be a list of values. Raises ``ValueError`` for an unknown table or column.
    """
    if name not in FILES:
        raise ValueError(f"unknown table {name!r}; known: {', '.join(FILES)}")
    rows = _rows(FILES[name])
    unknown = set(where) - set(rows[0])
    if unknown:
        raise ValueError(f"{name} has no column {', '.join(sorted(unknown))}; it has {', '.join(rows[0])}")
    wanted = {
        column: {str(v) for v in (value if isinstance(value, list) else [value])} for column, value in where.items()
    }
    return [dict(row) for row in rows if all(row[column] in values for column, values in wanted.items())]


@lru_cache(maxsize=1)
def ledger_source() -> dict[str, Any]:
    """The content of ``claims.yaml``: ``tables``, ``claims`` and ``observed``."""
    import yaml

    source = yaml.safe_load((folder() / "claims.yaml").read_text(encoding="utf-8"))
    if set(source) != {"tables", "claims", "observed"}:
        raise ValueError(f"claims.yaml: expected tables, claims and observed, found {', '.join(source)}")
    return source


def observed() -> list[dict[str, Any]]:
    """What others have published, by link and date: the evidence for claims about the field."""
    return ledger_source()["observed"]
