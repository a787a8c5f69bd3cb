"""No line of a page ends within a number, or between a number and its unit."""

from __future__ import annotations

import pytest
from docutils import nodes
from docutils.utils import new_document
from laga_book.numbers import keep_whole

WHOLE = "\N{NO-BREAK SPACE}"


def shown(*children: nodes.Node) -> str:
    document = new_document("page")
    document += nodes.paragraph("", "", *children)
    keep_whole(document)
    return document.astext()


@pytest.mark.parametrize(
    "text",
    ["16_384 tokens", "1_048_576 of 9_247_MB", "within 8_%.", "at 200_Mbit/s, 1_Gbit/s", "11_GB/s", "3_s, 40_ms"],
)
def test_numbers_stay_whole(text: str) -> None:
    assert shown(nodes.Text(text.replace("_", " "))) == text.replace("_", WHOLE)


@pytest.mark.parametrize("text", ["8 ranks", "4096, 8192 and 16", "2 seconds", "of 18 settings", "table 4 says"])
def test_other_spaces_may_break(text: str) -> None:
    assert shown(nodes.Text(text)) == text


def test_code_and_formulas_are_as_written() -> None:
    assert shown(nodes.literal("", "seq 16 384"), nodes.math("", "16 384")) == "seq 16 38416 384"
