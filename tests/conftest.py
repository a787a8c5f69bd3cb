"""Shared fixtures: the built book on localhost, and a real browser to open it in."""

from __future__ import annotations

import functools
import http.server
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from browser import FLAGS, Visit, find_browser, visit
from needs import namespaces as namespaces  # a fixture for all tests
from needs import unavailable

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background jobs ignore it, and so would their children
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the tests' products are small: threads would mostly wait for each other


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="session")
def book_url() -> Iterator[str]:
    """The built book, served on localhost from a thread."""
    if not (HTML / "index.html").is_file():
        pytest.fail("the book is not built: run `make book` first, or `make test`, which does both")
    handler = functools.partial(QuietHandler, directory=str(HTML))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chrome or Chromium of this machine. Without one: skipped, or failed where CI=true."""
    path = find_browser()
    if path is None:
        missing = "no Chrome or Chromium on this machine: browser tests cannot run (name one in $BROWSER_PATH)"
        unavailable(missing)
    from playwright.sync_api import sync_playwright

    # Per module, not per session: while it is open, Playwright's event loop is in the way of tests that run their own.
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any, book_url: str) -> Iterator[Callable[..., Visit]]:
    """open_page("book/index.html", width=390, scheme="dark") -> Visit; every page is closed after the test."""
    visits: list[Visit] = []

    def open_one(path: str, **options: Any) -> Visit:
        visits.append(visit(browser, book_url, path, **options))
        return visits[-1]

    yield open_one
    for each in visits:
        each.close()


def book_pages() -> list[str]:
    """Every page of the built book, as paths below its root (templates the theme copies along are no pages)."""
    pages = (page.relative_to(HTML).as_posix() for page in sorted(HTML.rglob("*.html")))
    return [page for page in pages if not page.startswith("_")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "page_path" in metafunc.fixturenames:
        # With no book there is one page to ask for, so that the tests fail instead of vanishing.
        metafunc.parametrize("page_path", book_pages() or ["index.html"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the pages of the book came to: a test says yes or no, this says how near."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.stats.get(outcome, [])]
    pages = [value for report in reports for name, value in report.user_properties if name == "page"]
    if pages and all(report.when == "call" for report in reports if report.user_properties):
        slowest, heaviest = (max(pages, key=lambda page, by=by: page[by]) for by in ("ready_s", "mb"))
        terminalreporter.write_line(
            f"{len(pages)} pages: ready in at most {slowest['ready_s']:.2f} s ({slowest['path']}), "
            f"at most {heaviest['mb']:.2f} MB ({heaviest['path']})"
        )
