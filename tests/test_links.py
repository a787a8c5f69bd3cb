"""Links of the built book: within it each leads to a page and a place that exist; beyond it each is well formed.

Whether other hosts answer is for `make linkcheck`, on a machine that may ask them.
"""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from conftest import HTML

HOST = re.compile(r"(?:[a-z0-9-]+\.)+[a-z]{2,}")


class Links(HTMLParser):
    """What a page refers to, and the places in it that can be referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.places.add(value)
            elif name in ("href", "src"):
                self.targets.add(value)


@cache
def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def broken(page: Path, target: str) -> str | None:
    """What is wrong with a link, if anything."""
    address = urlsplit(target)
    if address.scheme in ("data", "blob"):
        return None
    if address.scheme or address.netloc:
        sound = address.scheme == "https" and HOST.fullmatch(address.netloc) and not re.search(r"[\s<>\"')\]}]", target)
        return None if sound and target[-1] not in ".,;:" else "is not a well-formed https address"
    file = (page.parent / unquote(address.path)).resolve() if address.path else page
    if file.is_dir():
        file /= "index.html"
    if not file.is_file():
        return f"leads to no file ({file.name})"
    place = unquote(address.fragment)
    if place and file.suffix == ".html" and place not in read(file).places:
        return f"leads to no place in {file.name}"
    return None


def test_links_lead_somewhere(page_path: str) -> None:
    page = HTML / page_path
    if not page.is_file():
        pytest.fail("the book is not built: run `make book` first")
    found = {target: broken(page, target) for target in sorted(read(page).targets)}
    assert {target: why for target, why in found.items() if why} == {}


def test_every_page_can_be_reached() -> None:
    """From the first page, by the links that a reader has."""
    reached, waiting = set(), [HTML / "book" / "index.html"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".html" or not page.is_file():
            continue
        reached.add(page)
        paths = (urlsplit(target) for target in read(page).targets if not urlsplit(target).netloc)
        waiting += [(page.parent / unquote(path.path)).resolve() for path in paths if path.path]
    chapters = set((HTML / "book").rglob("*.html"))
    assert chapters - reached == set()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gone.html", "no file"),
        ("index.html#gone", "no place"),
        ("#gone", "no place"),
        ("http://example.org", "not a well-formed"),
        ("https://example", "not a well-formed"),
        ("https://example.org/a).", "not a well-formed"),
        ("index.html", None),
        ("https://example.org/a#b", None),
    ],
)
def test_what_is_broken(tmp_path: Path, target: str, said: str | None) -> None:
    page = tmp_path / "index.html"
    page.write_text("<p id='here'></p>", encoding="utf-8")
    why = broken(page, target)
    assert why is None if said is None else said in (why or "")
