"""The claims ledger: complete, well formed, decided by arithmetic, and no verdict changes unnoticed.

Run this file as a script to write the snapshot of verdicts anew, and read what changed before committing it.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from laga_core.charts.claims import ClaimsTable, verdict_chart
from laga_core.experiments import claims, paper
from laga_core.experiments.checks import REGISTRY, VERDICTS, Claim, Finding, SourceMissing, check, consistency, rules
from laga_core.experiments.claims import OPEN, decide, ledger, load_claims, verdict_table

SNAPSHOT = Path(__file__).parent / "data" / "claims_verdicts.json"
KEYS = {"sp", "seq", "n_heads", "d_model", "kernel", "hardware"}


@pytest.fixture(scope="module")
def entries() -> list[claims.Entry]:
    return ledger()


@pytest.fixture(scope="module")
def by_id(entries: list[claims.Entry]) -> dict[str, claims.Entry]:
    return {entry.claim.id: entry for entry in entries}


# ---------------------------------------------------------------- the claims


def test_there_are_many_and_none_twice() -> None:
    names = [claim.id for claim in load_claims()]
    assert len(names) > 250
    assert len(set(names)) == len(names)


def test_every_cell_of_every_table_is_one_claim() -> None:
    """Against the CSV files read afresh: the claims of a table hold exactly its filled cells, each once."""
    sources = yaml.safe_load((paper.folder() / "claims.yaml").read_text(encoding="utf-8"))["tables"]
    assert {table["file"] for table in sources} == {path.name for path in paper.folder().glob("*.csv")}
    for file in {table["file"] for table in sources}:
        with (paper.folder() / file).open(newline="") as handle:
            rows = list(csv.DictReader(handle))
        cells = Counter((c, plain(row[c])) for row in rows for c in row if c not in KEYS and row[c] != "")
        claimed: Counter[tuple[str, float | str]] = Counter()
        for table in (t for t in sources if t["file"] == file):
            names = {cell.get("as", column): column for column, cell in table["columns"].items()}
            for claim in load_claims():
                if claim.id.startswith(f"{table['id']}/"):
                    claimed[names[claim.id.rsplit("/", 1)[1]], plain(str(claim.value))] += 1
        assert claimed == cells, file


def plain(printed: str) -> float | str:
    return printed if printed == "OOM" else float(printed)


def test_tables_are_the_reported_ones() -> None:
    assert sum(1 for claim in load_claims() if claim.id.startswith("table1/")) == 24
    assert sum(1 for claim in load_claims() if claim.id.startswith("table2/")) == 15
    assert sum(1 for claim in load_claims() if claim.id.startswith("table3/")) == 28


def test_claims_say_where_they_stand_and_carry_no_verdict() -> None:
    for claim in load_claims():
        assert claim.where and claim.text and claim.check in REGISTRY, claim.id
    raw = yaml.safe_load((paper.folder() / "claims.yaml").read_text(encoding="utf-8"))
    assert not any("verdict" in entry or "ours" in entry for entry in raw["claims"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"check": "no_such"}, "unknown check"),
        ({"family": "no_such"}, "unknown family"),
        ({"bound": "~"}, "unknown bound"),
        ({"colour": "red"}, "unknown"),
        ({"with": {"seq": 4096, "sp": 8, "no_such": 1}}, "no_such"),
    ],
)
def test_a_malformed_claim_is_refused(change: dict[str, object], said: str) -> None:
    good = {"id": "x", "where": "§1", "family": "field", "text": "t", "value": 1, "check": "bytes_ratio"}
    good["with"] = {"seq": 4096, "sp": 8}
    claims._claim(dict(good))
    with pytest.raises(ValueError, match=said):
        claims._claim({**good, **change})


# ---------------------------------------------------------------- the rules


def _claim(value: rules.Value, **options: object) -> Claim:
    return Claim(id="x", where="", family="memory", text="", value=value, check="", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("claim", "ours", "agrees"),
    [
        (_claim(1.98, digits=2), 1.9849, True),
        (_claim(1.98, digits=2), 1.9851, False),
        (_claim(100, within=0.05), 105.0, True),
        (_claim(100, within=0.05), 94.9, False),
        (_claim(0.5, bound="<="), 0.5, True),
        (_claim(0.5, bound="<"), 0.5, False),
        (_claim(3), 3, True),
        (_claim(True), False, False),
        (_claim("OOM"), "OOM", True),
        (_claim(1), True, False),  # a count is no yes
    ],
)
def test_when_a_value_is_the_same(claim: Claim, ours: rules.Value, agrees: bool) -> None:
    assert claim.agrees(ours) is agrees


def test_the_rules_reach_every_verdict() -> None:
    claim = _claim(10.0, within=0.1)
    assert rules.plainly(claim, 10.5, "derived").verdict == "reproduced"
    assert rules.plainly(claim, 12.0, "derived").verdict == "not reproduced"
    assert rules.by_accounting(claim, {"wire": 10.0, "paper": 20.0}.__getitem__).verdict == "reproduced"
    assert (
        rules.by_accounting(claim, {"wire": 5.0, "paper": 10.0}.__getitem__).verdict
        == "holds under the paper's convention"
    )
    assert rules.by_accounting(claim, {"wire": 5.0, "paper": 20.0}.__getitem__).verdict == "not reproduced"
    assert rules.by_cause(claim, 10.0, 0.5).verdict == "reproduced, another cause"
    assert rules.by_cause(claim, 10.0, 9.0).verdict == "reproduced"
    assert rules.by_cause(claim, 5.0, 0.5).verdict == "not reproduced"
    assert rules.by_cause(_claim(True), True, False).verdict == "reproduced, another cause"
    assert rules.by_cause(_claim("OOM"), "OOM", "runs").verdict == "reproduced, another cause"
    assert rules.by_cause(claim, 15.0, 0.5, least=8.0).verdict == "reproduced, another cause"  # 10 lies in between
    assert rules.by_cause(claim, 15.0, 0.5, least=12.0).verdict == "not reproduced"
    assert rules.needs_hardware("").verdict in VERDICTS


def test_a_missing_source_is_never_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(claim: Claim) -> Finding:
        raise SourceMissing("records of 99_nothing")

    monkeypatch.setitem(REGISTRY, "waits", waits)
    claim = Claim(id="x", where="", family="field", text="", value=1, check="waits")
    with pytest.raises(SourceMissing, match="99_nothing"):
        decide(claim)
    assert decide(claim, strict=False).verdict == OPEN


def test_a_check_cannot_be_registered_twice() -> None:
    with pytest.raises(ValueError, match="two checks"):
        check(REGISTRY["bytes_sent"])


def test_printed_cells_stand_for_what_rounds_to_them() -> None:
    assert consistency.span("1.98") == pytest.approx((1.975, 1.985))
    assert consistency.span("4620") == pytest.approx((4619.5, 4620.5))
    assert consistency.parabola([(1, 6), (2, 11), (4, 27)]) == pytest.approx((3, 2, 1))


# ---------------------------------------------------------------- the verdicts


def test_verdicts_by_hand(by_id: dict[str, claims.Entry]) -> None:
    """A handful worked out here from nothing but the dimensions and the printed cells."""
    heads, nope, rope, v, latent = 128, 128, 64, 128, 512
    a2a = heads * (nope + rope + v)
    shard = 4096 / 8
    cell = by_id["table1/sp8/seq4096/laga"]
    paper_mb = shard * 2 * (2 * 7 / 8 * a2a + latent + rope) / 1e6
    wire_mb = shard * 2 * (7 / 8 * a2a + 7 * (latent + rope)) / 1e6
    assert round(paper_mb, 1) == cell.claim.value == 74.0 and round(wire_mb, 1) != 74.0
    assert cell.finding.ours == pytest.approx(paper_mb)
    assert cell.finding.verdict == "holds under the paper's convention"

    reduction = by_id["comm/reduction"].finding
    assert f"{7 / 8 * 2 * a2a / (7 / 8 * a2a + 7 * (latent + rope)):.3f}" in reduction.remark  # 1.798

    fused = by_id["memory/fused-unconfounded"].finding
    x, y = [4096.0, 8192.0, 16384.0], [3387 - 1796, 7541 - 2214, 22281 - 3044]
    curvature = ((y[2] - y[1]) / (x[2] - x[1]) - (y[1] - y[0]) / (x[1] - x[0])) / (x[2] - x[0])
    assert fused.ours == pytest.approx(curvature / (16 * 2 / 1e6)) == pytest.approx(2.0, abs=0.01)
    assert fused.verdict == "not reproduced"

    assert math.isclose(by_id["hardware/agreement"].finding.ours, 100 * (2362 - 2221) / 2362, rel_tol=1e-9)  # type: ignore[arg-type]
    assert by_id["throughput/absorbed-slowest-everywhere"].finding.ours == 18  # 37913 > 37761 > 27538 in table 5
    assert by_id["correctness/bounds-agree"].finding.verdict == "not reproduced"  # 7.7e-4 is not below 7e-4


def test_no_verdict_changes_unnoticed(entries: list[claims.Entry]) -> None:
    now = {entry.claim.id: entry.finding.verdict for entry in entries}
    then = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    changed = {name: (then.get(name), now.get(name)) for name in then | now if then.get(name) != now.get(name)}
    assert not changed, f"verdicts changed; if that is meant, run python {Path(__file__).name} and commit the snapshot"


def test_rows_for_the_page(entries: list[claims.Entry]) -> None:
    rows = verdict_table(entries)
    assert len(rows) == len(load_claims())
    root = Path(claims.__file__).parents[2]
    for row in rows:
        assert all(isinstance(cell, str) for cell in row.values())
        file, line = row["source"].split("#L")
        module, function = row["decided_by"].rsplit(".", 1)
        assert file == f"{module.replace('.', '/')}.py"
        lines = (root / file).read_text(encoding="utf-8").splitlines()
        assert any(f"def {function}(" in text for text in lines[int(line) - 1 : int(line) + 1])


def test_the_table_holds_every_claim_and_the_code_that_decides_it(entries: list[claims.Entry]) -> None:
    page = ClaimsTable(entries)._repr_html_()
    assert sorted(re.findall(r'<tr id="([^"]+)"', page)) == sorted(entry.claim.id for entry in entries)
    assert set(re.findall(r'href="#(check-[^"]+)"', page)) == set(re.findall(r'<details id="([^"]+)"', page))
    assert "def peak_memory(" in page
    assert len(page) < 500_000


def test_the_chart_counts_every_claim(entries: list[claims.Entry]) -> None:
    (rows,) = verdict_chart(entries).to_dict()["datasets"].values()
    assert sum(row["claims"] for row in rows) == len(entries)


if __name__ == "__main__":
    verdicts = {entry.claim.id: entry.finding.verdict for entry in ledger()}
    SNAPSHOT.parent.mkdir(exist_ok=True)
    SNAPSHOT.write_text(json.dumps(verdicts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(verdicts)} verdicts written to {SNAPSHOT}")
