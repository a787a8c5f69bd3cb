"""The claims ledger: every claim of the paper, our value beside it, and a verdict computed from code and records.

``data/paper/claims.yaml`` says what is claimed; :mod:`laga_core.experiments.checks` decides. Nothing here is typed in.
"""

from __future__ import annotations

import csv
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .checks import FAMILIES, REGISTRY, VERDICTS, Claim, Finding, SourceMissing, show
from .paper import folder, ledger_source

_CLAIM_FIELDS = {"id", "where", "family", "text", "value", "check", "unit", "digits", "within", "bound", "note", "with"}
_BLANK = {"", "—"}
_REPOSITORY = Path(__file__).resolve().parents[2]
OPEN = "not decided yet"
"""Stands where a check's source does not exist yet; never in a finished ledger (see ``strict``)."""


@dataclass(frozen=True)
class Entry:
    """A claim and what became of it."""

    claim: Claim
    finding: Finding


# ---------------------------------------------------------------- the claims


@lru_cache(maxsize=1)
def load_claims() -> tuple[Claim, ...]:
    """Every claim: the filled cells of the paper's tables, then what its text says.

    Raises ``ValueError`` for a claim that is malformed, unknown to the checks, or there twice.
    """
    source = ledger_source()
    claims = [claim for table in source["tables"] for claim in _cells(table)]
    claims += [_claim(dict(entry)) for entry in source["claims"]]
    twice = [name for name, count in Counter(claim.id for claim in claims).items() if count > 1]
    if twice:
        raise ValueError(f"claims.yaml: more than one claim is called {', '.join(twice)}")
    return tuple(claims)


def _claim(entry: dict[str, Any]) -> Claim:
    name = entry.get("id", entry)
    unknown = set(entry) - _CLAIM_FIELDS
    missing = {"id", "where", "family", "text", "value", "check"} - set(entry)
    if unknown or missing:
        raise ValueError(f"claims.yaml, {name}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    if entry["family"] not in FAMILIES:
        raise ValueError(f"claims.yaml, {name}: unknown family {entry['family']!r}; known: {', '.join(FAMILIES)}")
    if entry["check"] not in REGISTRY:
        raise ValueError(f"claims.yaml, {name}: unknown check {entry['check']!r}; known: {', '.join(sorted(REGISTRY))}")
    if entry.get("bound", "<") not in ("<", "<=", ">="):
        raise ValueError(f"claims.yaml, {name}: unknown bound {entry['bound']!r}; known: <, <=, >=")
    params = entry.pop("with", {})
    try:
        inspect.signature(REGISTRY[entry["check"]]).bind(None, **params)
    except TypeError as error:
        raise ValueError(f"claims.yaml, {name}: check {entry['check']} {error}") from None
    return Claim(**entry, params=params)


def _cells(table: Mapping[str, Any]) -> Iterator[Claim]:
    """One claim for each filled cell of a table's claimed columns."""
    with (folder() / table["file"]).open(newline="", encoding="utf-8") as handle:
        for row in csv.DictReader(handle):
            keys = {key: _number(row[key]) for key in table["keys"]}
            for column, cell in table["columns"].items():
                if row[column] not in _BLANK:
                    yield _claim(_cell(table, column, cell, keys, row[column]))


def _cell(
    table: Mapping[str, Any], column: str, cell: Mapping[str, Any], keys: dict[str, Any], printed: str
) -> dict[str, Any]:
    value = _number(printed)
    entry = {
        "id": f"{table['id']}/{table['slug'].format(**keys)}/{cell.get('as', column)}",
        "where": table["where"],
        "family": table["family"],
        "unit": table.get("unit", ""),
        "value": value,
        **{key: part for key, part in cell.items() if key not in ("as", "with")},
        "with": {**keys, **table.get("with", {}), **cell.get("with", {})},
    }
    if "within" not in cell and not isinstance(value, str):
        entry["digits"] = len(printed.partition(".")[2])
    return entry


def _number(printed: str) -> int | float | str:
    if re.fullmatch(r"-?\d+", printed):
        return int(printed)
    return float(printed) if re.fullmatch(r"-?\d*\.\d+", printed) else printed


# ---------------------------------------------------------------- the verdicts


def decide(claim: Claim, strict: bool = True) -> Finding:
    """Our value and the verdict for one claim.

    A check whose source does not exist raises ``SourceMissing``; with ``strict=False`` it is left ``OPEN`` instead.
    """
    try:
        finding = REGISTRY[claim.check](claim, **claim.params)
    except SourceMissing as missing:
        if strict:
            raise SourceMissing(f"{claim.id}: {missing} does not exist yet") from None
        return Finding(None, None, OPEN, f"waits for {missing}")
    if finding.verdict not in VERDICTS:
        raise ValueError(f"{claim.id}: {claim.check} gave the unknown verdict {finding.verdict!r}")
    return finding


def ledger(strict: bool = True, families: Iterable[str] | None = None) -> list[Entry]:
    """Every claim with its verdict, or those of some families."""
    wanted = set(FAMILIES if families is None else families)
    return [Entry(claim, decide(claim, strict)) for claim in load_claims() if claim.family in wanted]


def counts(entries: Iterable[Entry]) -> dict[str, int]:
    """How many claims came to each verdict, in the order of ``VERDICTS``."""
    tally = Counter(entry.finding.verdict for entry in entries)
    return {verdict: tally[verdict] for verdict in (*VERDICTS, OPEN) if verdict in VERDICTS or tally[verdict]}


def verdict_table(entries: Iterable[Entry] | None = None, strict: bool = True) -> list[dict[str, str]]:
    """Plain rows for a page: where, what the paper says, our value and its kind, the verdict, and what decided it.

    ``decided_by`` is the dotted name of the check; ``source`` its file and line, relative to the repository.
    """
    return [_row(entry) for entry in (ledger(strict) if entries is None else entries)]


def _row(entry: Entry) -> dict[str, str]:
    claim, finding = entry.claim, entry.finding
    function = REGISTRY[claim.check]
    path = Path(inspect.getsourcefile(function) or "").resolve().relative_to(_REPOSITORY)
    return {
        "id": claim.id,
        "family": claim.family,
        "where": claim.where,
        "claim": claim.text,
        "paper": f"{claim.bound + ' ' if claim.bound else ''}{show(claim.value, claim.unit, claim.digits)}",
        "ours": show(finding.ours, claim.unit, None if claim.digits is None else claim.digits + 1),
        "kind": finding.kind or "–",
        "verdict": finding.verdict,
        "remark": "; ".join(filter(None, (finding.remark, claim.note))),
        "decided_by": f"{function.__module__}.{function.__name__}",
        "source": f"{path.as_posix()}#L{inspect.getsourcelines(function)[1]}",
    }
