"""The built book in a real browser: where the browser is, a visit to a page, a chart on it.

As a script: prints the browser's path, or exits 1.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page, Request

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
]
WIDE, NARROW = 1280, 390
SECONDS = 20  # no page needs this long; a page that does has failed

WATCH_LAYOUT = """
window.shifts = [];
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (!entry.hadRecentInput) window.shifts.push(entry.value);
  }
}).observe({ type: "layout-shift", buffered: true });
"""


def find_browser() -> str | None:
    """Path of the browser: $BROWSER_PATH if set, else the first one found."""
    candidates = [os.environ.get("BROWSER_PATH"), *map(shutil.which, NAMES), *PLACES]
    return next((path for path in candidates if path and Path(path).is_file()), None)


@dataclass
class Visit:
    """One page opened in a fresh context, and what went wrong there."""

    page: Page
    problems: list[str] = field(default_factory=list)
    busy_ms: float = 0.0  # of processor time the page took until it was ready, whatever else the machine did

    @property
    def chart_names(self) -> list[str]:
        return self.page.eval_on_selector_all(".laga-chart", "all => all.map(each => each.id)")

    def chart(self, name: str) -> Chart:
        return Chart(self.page, name)

    @property
    def weight(self) -> int:
        """Bytes of everything the page has loaded."""
        return self.page.evaluate(
            """["navigation", "resource"].flatMap(kind => performance.getEntriesByType(kind))
               .reduce((sum, each) => sum + each.encodedBodySize, 0)"""
        )

    @property
    def ready_ms(self) -> float:
        """From the start of navigation until the page was loaded and every chart was live."""
        return self.page.evaluate("performance.getEntriesByName('ready')[0].startTime")

    @property
    def layout_shift(self) -> float:
        return self.page.evaluate("window.shifts.reduce((sum, each) => sum + each, 0)")

    def close(self) -> None:
        self.page.context.close()


def visit(browser: Browser, base: str, path: str, width: int = WIDE, scheme: str = "light") -> Visit:
    """Open a page and wait until it is ready: loaded, and each chart live or failed."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(SECONDS * 1000)
    context.add_init_script(WATCH_LAYOUT)
    page = context.new_page()
    result = Visit(page)
    host = urlsplit(base).netloc

    def on_request(request: Request) -> None:
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob") and address.netloc != host:
            result.problems.append(f"request beyond its own host: {request.url}")

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            result.problems.append(f"console {message.type}: {message.text}")

    page.on("request", on_request)
    page.on("requestfailed", lambda request: result.problems.append(f"request failed: {request.url}"))
    page.on("pageerror", lambda error: result.problems.append(f"page error: {error}"))
    page.on("console", on_console)
    # Nothing leaves this machine, even if a page tries.
    context.route(lambda url: urlsplit(url).netloc != host, lambda route: route.abort())
    watched = context.new_cdp_session(page)
    watched.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(f"{base}/{path.lstrip('/')}", wait_until="load")
    page.wait_for_function(
        """() => document.readyState === "complete" && !document.querySelector(".laga-chart:not([data-state])")
           && performance.mark("ready")"""
    )
    metrics = {each["name"]: each["value"] for each in watched.send("Performance.getMetrics")["metrics"]}
    result.busy_ms = 1e3 * metrics["TaskDuration"]
    watched.detach()
    return result


@dataclass
class Chart:
    """One chart of the book: its controls, what it draws, and the data behind it."""

    page: Page
    name: str

    @property
    def root(self) -> Locator:
        return self.page.locator(f"[id='{self.name}']")

    @property
    def svg(self) -> str:
        return self.root.locator(".laga-plot svg").first.evaluate("svg => svg.innerHTML")

    @property
    def texts(self) -> list[str]:
        return self.root.locator(".laga-plot svg text").all_text_contents()

    @property
    def controls(self) -> list[str]:
        """The labels of the inputs to be seen."""
        names = self.root.locator(".laga-controls .vega-bind-name").filter(visible=True)
        return [text.strip() for text in names.all_text_contents()]

    def control(self, label: str) -> Locator:
        rows = self.root.locator(".laga-controls .vega-bind")
        return rows.filter(has=self.page.get_by_text(label, exact=True)).first

    def set(self, label: str, value: Any) -> None:
        """Set one input as a reader would, and wait until the chart has been drawn again."""
        row = self.control(label)
        if row.locator("select").count():
            row.locator("select").select_option(label=str(value))
        elif row.locator("input[type=radio]").count():
            row.locator("label", has_text=str(value)).last.click()
        elif row.locator("input[type=checkbox]").count():
            row.locator("input").set_checked(bool(value))
        else:
            row.locator("input").fill(str(value))
        self.settle()

    def settle(self) -> None:
        self.page.evaluate("() => new Promise(done => setTimeout(() => requestAnimationFrame(done), 60))")

    def rows(self, table: int = 0) -> list[dict[str, str]]:
        """The data behind the chart as it stands, in full precision: what its CSV would hold."""
        self.root.locator(".laga-data").evaluate("details => { details.open = true }")
        self.settle()
        links = self.root.locator(".laga-data a[download]")
        text = links.nth(table).evaluate("async link => (await fetch(link.href)).text()")
        return list(csv.DictReader(io.StringIO(text)))


if __name__ == "__main__":
    found = find_browser()
    print(found or "no Chrome or Chromium found")
    sys.exit(0 if found else 1)
