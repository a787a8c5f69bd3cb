"""The experiments on communication and equivalence: records, rows, and that they can say no."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from laga_core import MLAConfig
from laga_core.experiments import communication, equivalence
from laga_core.results import Store


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def records(root: Path) -> list:
    return equivalence.sweep(
        Store(root), "toy", [1, 2], ["float32", "float64"], seq=12, batch=2, device="cpu", timeout=60
    )


def test_a_record_for_each_form_degree_and_dtype(root: Path, records: list) -> None:
    assert len(records) == 3 * 2 * 2
    stored = Store(root).load("equivalence", kind="measured")
    assert {r.key for r in stored} == {r.key for r in records}
    for record in records:
        assert record.provenance["ranks"] == record.parameters["sp"] and record.provenance["backend"] == "gloo"
        limit = {"float32": 1e-5, "float64": 1e-13}[record.parameters["dtype"]]
        assert max(record.metrics["relative"].values()) <= limit
        names = {"output", "hidden", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
        assert names <= record.metrics["absolute"].keys() == record.metrics["relative"].keys()


def test_laga_is_bit_identical_on_one_rank(records: list) -> None:
    for record in records:
        p = record.parameters
        if (p["sp"], p["form"]) == (1, "laga"):
            assert [record.metrics["absolute"][name] for name in ("output", "q_b_proj", "kv_b_proj", "o_proj")] == [
                0.0
            ] * 4


def test_the_papers_statements(records: list) -> None:
    statements = equivalence.beside_the_paper(records)
    assert all(statement["holds"] for statement in statements)
    assert {("2", "output", 5.6e-6), ("2", "kv_b_proj", 7.7e-4), ("1", "output", 0.0)} <= {
        (statement["sp"], statement["tensor"], statement["reported"]) for statement in statements
    }


def test_a_statement_that_does_not_hold_says_so(records: list) -> None:
    worse = [
        replace(r, metrics={**r.metrics, "absolute": {**r.metrics["absolute"], "output": 1e-3}})
        if r.parameters["form"] == "laga"
        else r
        for r in records
    ]
    found = {(s["sp"], s["tensor"]): s["holds"] for s in equivalence.beside_the_paper(worse)}
    assert found["1", "output"] is False and found["2", "output"] is False and found["2", "kv_b_proj"] is True


def test_rows_of_a_tensor(records: list) -> None:
    rows = equivalence.table(records, "kv_b_proj")
    assert [row["bound"] for row in rows if row["sp"] == 1] == [None] * 6
    assert {row["bound"] for row in rows if row["sp"] == 2 and row["dtype"] == "float32"} == {7.7e-4}
    with pytest.raises(ValueError, match=r"no tensor 'kv_c_proj'.*kv_b_proj"):
        equivalence.table(records, "kv_c_proj")


def test_the_ledger_of_real_ranks_at_deepseek_v3s_dimensions(root: Path) -> None:
    counts = communication.ledger_check(Store(root), "deepseek-v3", [2], tokens_per_rank=2, device="cpu", timeout=100)
    assert len(counts) == 2 * len(communication.VARIANTS)
    assert all(count["agrees"] and count["measured_bytes"] == count["derived_bytes"] > 0 for count in counts)
    kept = Store(root).load("communication", form="laga", sp=2)
    assert len(kept) == 1 and set(kept[0].metrics) == {"forward_bytes", "backward_bytes"}


def test_table_1_figure_3b_and_the_crossover() -> None:
    assert [cell["agrees"] for cell in communication.table_1()] == [True] * 24
    assert [cell["agrees"] for cell in communication.figure_3b()] == [True] * 4
    v3 = MLAConfig.preset("paper-v3")
    assert communication.crossover(v3) == pytest.approx(71.11, abs=0.01)
    assert [f"{row['wire']:.2f}" for row in communication.ratios(v3, (4, 8, 16), 16384)] == ["1.89", "1.80", "1.63"]
