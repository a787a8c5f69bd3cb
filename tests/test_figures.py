"""The paper's figures drawn again: dots are the printed cells, bars and lines are what the code computes."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any

import pytest
from test_chapter_numbers import states

from laga_core import MLAConfig, communication, simulate_memory
from laga_core.charts import figures

ROOT = Path(__file__).resolve().parent.parent
PAPER = MLAConfig.preset("paper-v3")


def printed(file: str, **where: object) -> list[dict[str, str]]:
    with (ROOT / "data" / "paper" / file).open(newline="") as handle:
        return [row for row in csv.DictReader(handle) if all(row[key] == str(value) for key, value in where.items())]


def datasets(chart: Any) -> list[list[dict[str, Any]]]:
    return list(chart.to_dict()["datasets"].values())


def test_figure_1() -> None:
    sent, eager, fused = datasets(figures.figure_1())
    cells = [
        printed("table1_communication.csv", sp=8, seq=16384)[0],
        printed("table2_memory_eager.csv", sp=8, seq=16384)[0],
        printed("table4_single_node.csv", kernel="fused", seq=16384)[0],
    ]
    for rows, cell, unit in ((sent, cells[0], 1), (eager, cells[1], 1e3), (fused, cells[2], 1e3)):
        assert [row["form"] for row in rows] == ["explicit", "absorbed", "laga"]
        assert [row["reported"] * unit for row in rows] == pytest.approx(
            [float(cell[f"{row['form']}_mb"]) for row in rows]
        )
    assert [round(row["ours"]) for row in sent] == [294, 163, 163]  # the page's words
    assert sent[0]["ours"] == communication(PAPER, "explicit", 16384, 8).total_bytes / 1e6
    assert eager[1]["ours"] == simulate_memory(PAPER, "absorbed", "eager", 16384, 8, score="split").peak_bytes / 1e9
    assert all(abs(row["ours"] / row["reported"] - 1) < 0.02 for row in eager)


def test_figure_3() -> None:
    ranks, heads = datasets(figures.figure_3())
    dots = [row["ratio"] for row in ranks if row["kind"] == "reported"]
    assert len(dots) == len(printed("table1_communication.csv")) == 8
    lines = {(row["ranks"], row["kind"]): row["ratio"] for row in ranks if row["kind"] != "reported"}
    for row in ranks:
        if row["kind"] == "reported":  # each side is printed to 0.1 MB
            assert row["ratio"] == pytest.approx(lines[row["ranks"], "as the paper counts"], rel=2e-3)
    assert [f"{lines[sp, 'on the wire']:.2f}" for sp in (4, 8, 16)] == ["1.89", "1.80", "1.63"]
    reported = {row["heads"]: row["ratio"] for row in heads if row["kind"] == "reported"}
    assert reported == {
        int(r["n_heads"]): float(r["explicit_over_laga"]) for r in printed("fig3b_communication_heads.csv")
    }
    assert [f"{row['ratio']:.2f}" for row in heads if row["kind"] == "on the wire"][::3] == ["1.05", "1.80"]


def test_figure_5() -> None:
    rows = max(datasets(figures.figure_5()), key=len)
    for row in rows:
        (cell,) = printed("table5_cross_node.csv", kernel=row["kernel"], seq=row["tokens"])
        assert f"{row['reported']:.2f}" == cell["laga_over_explicit"]
    for kernel in ("fused", "eager"):
        told = [
            ", ".join(f"{r[kind]:.2f}" for r in rows if r["kernel"] == kernel) for kind in ("reported", "predicted")
        ]
        states("figures", f"{kernel}: {told[0]}; predicted {told[1]}")


def test_figure_6() -> None:
    largest = max(row["difference"] for rows in datasets(figures.figure_6_differences()) for row in rows)
    assert 0 < largest < 5e-7


def test_every_figure_is_on_the_page() -> None:
    page = (ROOT / "book" / "figures.md").read_text(encoding="utf-8")
    drawn = [name for name, _ in inspect.getmembers(figures, inspect.isfunction) if name.startswith("figure_")]
    assert len(drawn) == 7
    assert [name for name in drawn if f"```{{chart}} figures.{name}\n" not in page] == []
    assert all(f"## Figure {number}:" in page for number in range(1, 7))
