"""Prose is spelled as a dictionary has it; words of the field, and names, are listed in ``tests/data/words.txt``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
import yaml
from spellchecker import SpellChecker

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted((ROOT / "book").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NO_PROSE = re.compile(
    r"```(?:python|console|sh|yaml)\n.*?```|```\{(?:eval-rst|literalinclude).*?```|^:[\w-]+:"  # code, options
    r"|\$\$.*?\$\$|\$[^$]*\$|`[^`\n]*`|https?://\S+|\]\([^)]*\)|<a [^>]*>|\{[a-z:-]+\}",  # formulas, links, roles
    re.DOTALL | re.MULTILINE,
)
WORD = re.compile(r"(?<!\w)[A-Za-z]?[a-z]+(?:['’][a-z]+)?(?!\w)")


@pytest.fixture(scope="module")
def dictionary() -> SpellChecker:
    known = SpellChecker()
    listed = (ROOT / "tests" / "data" / "words.txt").read_text(encoding="utf-8").split()
    assert listed == sorted(set(listed)), "tests/data/words.txt: one word a line, in order"
    known.word_frequency.load_words(listed)
    return known


def unknown(text: str, dictionary: SpellChecker) -> set[str]:
    words = (word.lower().replace("’", "'").removesuffix("'s") for word in WORD.findall(NO_PROSE.sub(" ", text)))
    return {word for word in words if word not in dictionary}


def texts(notebook: Path) -> Iterator[str]:
    cells = nbformat.read(notebook, as_version=4).cells
    return (cell.source for cell in cells if cell.cell_type == "markdown")


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda path: path.name)
def test_page_is_spelled_well(page: Path, dictionary: SpellChecker) -> None:
    text = "\n".join(texts(page)) if page.suffix == ".ipynb" else page.read_text(encoding="utf-8")
    assert unknown(text, dictionary) == set(), "misspelled, or a word to add to tests/data/words.txt"


def test_claims_are_spelled_well(dictionary: SpellChecker) -> None:
    source = yaml.safe_load((ROOT / "data" / "paper" / "claims.yaml").read_text(encoding="utf-8"))
    told = "\n".join(f"{claim['text']}\n{claim.get('note', '')}" for claim in source["claims"])
    assert unknown(told, dictionary) == set()


def test_a_misspelled_word_is_noticed(dictionary: SpellChecker) -> None:
    assert unknown("The lattent is `gahtered` by all rnaks, $S/P$ tokens each.", dictionary) == {"lattent", "rnaks"}
