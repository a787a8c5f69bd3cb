"""Explorers of a running notebook: they call the code, and show what the explorers in the book's pages show."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from drawing import drawn

from laga_core.charts import communication, live, throughput


@pytest.mark.parametrize("accounting", ["wire", "nodes", "paper"])
@pytest.mark.parametrize(("seq", "sp", "context"), [(16384, 8, 1), (65536, 16, 2)])
def test_communication_in_the_page_and_live(seq: int, sp: int, context: int, accounting: str) -> None:
    spec = communication.explorer().to_dict()
    _, page = drawn(spec, accounting=accounting, sp=sp, seq=seq, groups=context)
    for row in live.communication_rows("deepseek-v3", seq, sp, 1, context):
        (bar,) = [text for text in page if re.match(rf"{row['form']}\b.*: ", text)]
        assert f": {row[accounting]:,.1f} MB" in bar


@pytest.mark.parametrize(
    ("seq", "sp", "link", "latency", "rate"),
    [(16384, 8, 10, 30, 150), (131072, 16, 200, 500, 1000), (4096, 2, 1, 200, 10)],
)
def test_throughput_in_the_page_and_live(seq: int, sp: int, link: int, latency: int, rate: int) -> None:
    _, page = drawn(throughput.explorer().to_dict(), seq=seq, sp=sp, link=link, latency=latency, rate=rate)
    rows = live.throughput_rows("paper-v3", seq, sp, link, latency, rate)
    fastest = min(row["step_ms"] for row in rows)
    for row in rows:
        assert row["step_ms"] == pytest.approx(row["computing_ms"] + row["sending_ms"] + row["latency_ms"])
        assert f"{row['step_ms']:.1f} ms" + (", fastest" if row["step_ms"] == fastest else "") in page, (row, page)


@pytest.mark.parametrize("make", [live.communication_explorer, live.throughput_explorer, live.memory_explorer])
def test_a_control_changes_the_table_and_errors_are_told(make: Callable) -> None:
    box = make()
    shown = box.children[-1]
    controls = {control.description: control for control in box.children[:-1]}
    before = shown.value
    assert before.count("<tr>") >= 4
    controls["sequence"].value = 4096
    assert "<table" in shown.value and shown.value != before
    controls["model"].value = "deepseek-v2-lite"
    controls["ranks"].value = 64  # more ranks than heads
    assert "<table" not in shown.value and "sp" in shown.value
