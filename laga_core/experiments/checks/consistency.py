"""Claims decided from the paper's own cells: does what the text says follow from the tables?

A printed cell stands for every number that rounds to it, so a claim fails only if no such numbers could bear it out.
Our value is of the kind "reported": it says that the paper's numbers fit together, not that they came out here.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from ..paper import read_table
from .rules import GONE, Claim, Finding, by_cause, check, plainly, show

Row = dict[str, str]
Span = tuple[float, float]


def span(printed: str) -> Span:
    """The numbers that print as this cell."""
    decimals = len(printed.partition(".")[2])
    half = 0.5 * 10.0**-decimals
    return float(printed) - half, float(printed) + half


def _ratio(over: str, under: str) -> Span:
    (a, b), (c, d) = span(over), span(under)
    return a / d, b / c


def _difference(over: str, under: str) -> Span:
    (a, b), (c, d) = span(over), span(under)
    return a - d, b - c


def _overlap(a: Span, b: Span) -> bool:
    return a[0] <= b[1] and b[0] <= a[1]


def _scaled(a: Span, factor: float) -> Span:
    return a[0] * factor, a[1] * factor


def _rows(table: str | None = None, tables: list[str] | None = None, **where: Any) -> list[Row]:
    return [row for name in tables or [str(table)] for row in read_table(name, **where)]


def _counted(claim: Claim, hits: list[bool], rows: list[Row] | None = None) -> Finding:
    missed = [_label(row) for row, hit in zip(rows or [], hits, strict=False) if not hit]
    remark = f"{sum(hits)} of {len(hits)} rows" + (f"; not: {', '.join(missed)}" if missed else "")
    return plainly(claim, sum(hits), "reported", remark)


def _label(row: Row) -> str:
    return " ".join(
        filter(None, (row.get("kernel"), row.get("hardware"), f"sp {row['sp']}" if "sp" in row else "", row["seq"]))
    )


# ---------------------------------------------------------------- ratios and differences of cells


@check
def ratio_column(
    claim: Claim, table: str, over: str, under: str, column: str | None = None, printed: str | None = None
) -> Finding:
    """Rows whose printed ratio (a column, or one number for all) follows from their cells."""
    rows = read_table(table)
    hits = [_overlap(_ratio(row[over], row[under]), span(row[column] if column else str(printed))) for row in rows]
    return _counted(claim, hits, rows)


@check
def difference_list(
    claim: Claim, table: str, over: str, under: str, printed: list[str], unit: str, **where: Any
) -> Finding:
    """Rows whose difference of two cells prints as listed."""
    rows = read_table(table, **where)
    scale = {"MB": 1.0, "GB": 1e-3}[unit]
    hits = [
        _overlap(_scaled(_difference(row[over], row[under]), scale), span(text))
        for row, text in zip(rows, printed, strict=True)
    ]
    return _counted(claim, hits, rows)


@check
def excess_range(claim: Claim, table: str, low: int, high: int) -> Finding:
    """Whether absorbed over explicit runs from ``low`` to ``high`` per cent."""
    excess = [_ratio(row["absorbed_mb"], row["explicit_mb"]) for row in read_table(table)]
    percent = [(100 * (a - 1), 100 * (b - 1)) for a, b in excess]
    lowest, highest = min(percent), max(percent)
    holds = _overlap(lowest, span(str(low))) and _overlap(highest, span(str(high)))
    return plainly(claim, holds, "reported", f"{sum(lowest) / 2:.1f} to {sum(highest) / 2:.1f} %")


@check
def cells_close(
    claim: Claim,
    table: str,
    over: str,
    under: str,
    percent: float | None = None,
    megabytes: float | None = None,
    **where: Any,
) -> Finding:
    """Whether one column could stay within a bound above another in every row."""
    rows = read_table(table, **where)
    if percent is not None:
        excess = [_scaled(_minus_one(_ratio(row[over], row[under])), 100) for row in rows]
        worst, bound = max(excess), percent
    else:
        excess = [_difference(row[over], row[under]) for row in rows]
        worst, bound = max(excess), float(megabytes or 0)
    unit = "%" if percent is not None else "MB"
    return plainly(claim, max(low for low, _ in excess) < bound, "reported", f"up to {show(sum(worst) / 2, unit)}")


def _minus_one(a: Span) -> Span:
    return a[0] - 1, a[1] - 1


@check
def tables_agree(claim: Claim, percent: float) -> Finding:
    """Whether tables 2 and 4 give one memory for one step."""
    differences = []
    for row in read_table("table4", kernel="eager"):
        (other,) = read_table("table2", sp=row["sp"], seq=row["seq"])
        for column in ("explicit_mb", "absorbed_mb", "laga_mb"):
            if row[column]:
                differences.append(100 * abs(float(row[column]) / float(other[column]) - 1))
    return plainly(claim, max(differences) <= percent, "reported", f"up to {max(differences):.2f} % apart")


@check
def doubles(claim: Claim, table: str, column: str, percent: float, minus: str | None = None, **where: Any) -> Finding:
    """Whether a column (or the difference of two) doubles from row to row."""
    values = [float(row[column]) - (float(row[minus]) if minus else 0) for row in read_table(table, **where)]
    growth = [b / a for a, b in itertools.pairwise(values)]
    holds = all(abs(g / 2 - 1) <= percent / 100 for g in growth)
    return plainly(claim, holds, "reported", "grows " + ", ".join(f"{g:.2f}×" for g in growth))


@check
def score_matrices(
    claim: Claim, table: str, column: str, minus: str | None = None, n_heads: int = 128, **where: Any
) -> Finding:
    """What grows as seq² in a column, in bf16 score matrices of heads/sp · seq² elements.

    The curvature of the parabola through the column's three points; its other two terms hold whatever does not grow or
    grows in proportion to the sequence.
    """
    rows = read_table(table, **where)
    points = [
        (float(row["seq"]), float(row[column]) - (float(row[minus]) if minus else 0)) for row in rows if row[column]
    ]
    per_matrix = n_heads / int(rows[0]["sp"]) * 2 / 1e6
    return plainly(claim, parabola(points)[2] / per_matrix, "reported", "curvature of the column's three points")


def parabola(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """a, b, c of a + b·x + c·x² through three points; ``ValueError`` for another number of points."""
    if len(points) != 3:
        raise ValueError(f"a parabola is set by three points, got {len(points)}")
    (x0, y0), (x1, y1), (x2, y2) = points
    first, second = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    c = (second - first) / (x2 - x0)
    b = first - c * (x0 + x1)
    return y0 - b * x0 - c * x0**2, b, c


@check
def cell_rounds(claim: Claim, table: str, column: str, unit: float, **where: Any) -> Finding:
    """A cell in another unit."""
    (row,) = read_table(table, **where)
    return plainly(claim, float(row[column]) / unit, "reported")


@check
def bound_covers(claim: Claim, reported: float, bound: float) -> Finding:
    """Whether a reported difference is below a reported bound."""
    return plainly(claim, float(reported) < float(bound), "reported")


# ---------------------------------------------------------------- who leads


def _rates(row: Row) -> dict[str, float]:
    """Tokens per second by form; a step that ran out of memory has none."""
    cells = {form: row[f"{form}_tok_s"] for form in ("explicit", "absorbed", "laga")}
    return {form: 0.0 if cell == "OOM" else float(cell) for form, cell in cells.items()}


@check
def fastest(claim: Claim, form: str, **where: Any) -> Finding:
    """Rows in which a form is ahead of both others."""
    rows = _rows(**where)
    return _counted(claim, [max(rates := _rates(row), key=rates.__getitem__) == form for row in rows], rows)


@check
def slowest(claim: Claim, form: str, **where: Any) -> Finding:
    """Rows in which a form is behind both others."""
    rows = _rows(**where)
    return _counted(claim, [min(rates := _rates(row), key=rates.__getitem__) == form for row in rows], rows)


@check
def lead(claim: Claim, table: str, **where: Any) -> Finding:
    """Laga's lead over explicit in per cent, from the rates of one row."""
    (row,) = read_table(table, **where)
    return plainly(claim, 100 * (_lead(row) - 1), "reported")


@check
def slowdown(claim: Claim, table: str, **where: Any) -> Finding:
    """How much slower Laga is than explicit, in per cent: the mean over the rows."""
    rows = read_table(table, **where)
    return plainly(claim, sum(100 * (1 - _lead(row)) for row in rows) / len(rows), "reported")


@check
def flips_with_heads(claim: Claim, seq: list[int]) -> Finding:
    """Whether explicit leads in table 3 (32 heads) where Laga leads in table 4 (128 heads), sp 8, eager."""
    few, many = read_table("table3", sp=8, seq=seq), read_table("table4", kernel="eager", seq=seq)
    holds = all(_lead(row) < 1 for row in few) and all(_lead(row) > 1 for row in many)
    return plainly(claim, holds, "reported", "table 3 runs eager, so table 4's eager rows are compared")


@check
def ratios_grow(claim: Claim, table: str, **where: Any) -> Finding:
    """Whether Laga's lead grows from row to row."""
    leads = [_lead(row) for row in read_table(table, **where)]
    return plainly(claim, leads == sorted(leads), "reported", ", ".join(f"{x:.2f}×" for x in leads))


@check
def quoted_range(claim: Claim, table: str, column: str, low: str, high: str, **where: Any) -> Finding:
    """Whether a quoted range is the least and the greatest cell of a column."""
    cells = [float(row[column]) for row in read_table(table, **where)]
    return plainly(
        claim, (min(cells), max(cells)) == (float(low), float(high)), "reported", f"{min(cells)} to {max(cells)}"
    )


def _lead(row: Row) -> float:
    return float(row["laga_tok_s"]) / float(row["explicit_tok_s"])


# ---------------------------------------------------------------- what ran


@check
def runs_elsewhere(claim: Claim, table: str, column: str, seq: int, failed: str, ran: str) -> Finding:
    """Whether a step that ran out of memory under one kernel ran under another."""
    cell = _by_kernel(table, column, seq)
    return plainly(
        claim,
        cell[failed] == "OOM" and cell[ran] != "OOM",
        "reported",
        f"{failed}: {cell[failed]}; {ran}: {cell[ran]} tokens/s",
    )


@check
def fails_elsewhere(claim: Claim, table: str, column: str, seq: int, failed: str, other: str) -> Finding:
    """Whether a step ran out of memory under both kernels."""
    cell = _by_kernel(table, column, seq)
    return plainly(
        claim,
        cell[failed] == cell[other] == "OOM",
        "reported",
        f"{failed}: {cell[failed]}; {other}: {cell[other]} tokens/s",
    )


def _by_kernel(table: str, column: str, seq: int) -> dict[str, str]:
    return {row["kernel"]: row[column] for row in read_table(table, seq=seq)}


@check
def cells_that_ran(claim: Claim, column: str, tables: list[str], **where: Any) -> Finding:
    """How many cells of a column hold a rate."""
    cells = [row[column] for row in _rows(tables=tables, **where)]
    ran = sum(cell not in ("OOM", "") for cell in cells)
    return plainly(claim, ran, "reported", f"{ran} of {len(cells)} ran")


@check
def cell_rounds_to(claim: Claim, table: str, column: str, printed: str, unit: float, **where: Any) -> Finding:
    """Whether a number quoted elsewhere is this cell in another unit."""
    (row,) = read_table(table, **where)
    return plainly(
        claim, _overlap(_scaled(span(row[column]), 1 / unit), span(printed)), "reported", f"{row[column]} in {table}"
    )


# ---------------------------------------------------------------- across hardware


@check
def hardware_agreement(claim: Claim) -> Finding:
    """The largest gap between A100's and Ascend's excess, in per cent of Ascend's."""
    excess = {
        name: [float(row["absorbed_minus_explicit_mb"]) for row in read_table("table6", hardware=name)]
        for name in ("ascend-910b", "a100")
    }
    gaps = [100 * abs(a / b - 1) for a, b in zip(excess["a100"], excess["ascend-910b"], strict=True)]
    return plainly(claim, max(gaps), "reported", ", ".join(f"{gap:.1f} %" for gap in gaps))


@check
def table6_from_tables(claim: Claim) -> Finding:
    """Rows of table 6's Ascend excess that are a difference of cells of table 4, or of table 2."""
    rows = read_table("table6", hardware="ascend-910b")
    hits = []
    for row in rows:
        sources = read_table("table4", kernel="eager", seq=row["seq"]) + read_table("table2", sp=8, seq=row["seq"])
        hits.append(
            any(
                _overlap(
                    _difference(source["absorbed_mb"], source["explicit_mb"]), span(row["absorbed_minus_explicit_mb"])
                )
                for source in sources
                if source["absorbed_mb"]
            )
        )
    return _counted(claim, hits, rows)


@check
def table6_ratios(claim: Claim) -> Finding:
    """Rows of table 6's Ascend ratios that are table 4's eager ones."""
    rows = read_table("table6", hardware="ascend-910b")
    hits = [
        row["laga_over_explicit_throughput"]
        == read_table("table4", kernel="eager", seq=row["seq"])[0]["laga_over_explicit"]
        for row in rows
    ]
    return _counted(claim, hits, rows)


@check
def ratios_above_one(claim: Claim, table: str, column: str) -> Finding:
    """Rows whose ratio is above one."""
    rows = read_table(table)
    return _counted(claim, [float(row[column]) > 1 for row in rows], rows)


@check
def excess_without_scores(claim: Claim, hardware: str) -> Finding:
    """Whether absorbed's excess is there, and whether most of it stays once what grows as seq² is taken off."""
    points = [
        (float(row["seq"]), float(row["absorbed_minus_explicit_mb"])) for row in read_table("table6", hardware=hardware)
    ]
    seq, excess = points[-1]
    quadratic = parabola(points)[2] * seq**2
    matrices = quadratic / (128 / 8 * seq**2 * 2 / 1e6)
    found = by_cause(claim, excess > 0, excess - quadratic >= GONE * excess, kind="reported")
    return replace(found, remark=f"{quadratic:.0f} of {excess:.0f} MB grow as seq²: {matrices:.2f} score matrices")
