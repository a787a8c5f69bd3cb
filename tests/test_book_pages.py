"""Every page of the built book, in a real browser: offline, free of errors, legible, light, quick, and alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from browser import NARROW, WIDE, Visit, visit
from conftest import HTML, book_pages

pytestmark = pytest.mark.browser

MB = 1e6
READY_MS = 2000
Open = Callable[..., Visit]


def has_chart(page_path: str) -> bool:
    return (HTML / page_path).is_file() and 'class="laga-chart"' in (HTML / page_path).read_text(encoding="utf-8")


WRONG_WITH_CHARTS = """async () => {
  const wrong = [];
  for (const chart of document.querySelectorAll(".laga-chart")) {
    const must = (holds, what) => holds || wrong.push(`${chart.id} ${what}`);
    must(chart.dataset.state === "live", "is not live");
    const plot = chart.querySelector(".laga-plot");
    must(plot.getAttribute("aria-label"), "has no alternative text");
    must(plot.querySelector("svg path"), "draws nothing");
    must(plot.scrollWidth <= plot.clientWidth + 1, "is cut off at the side");
    chart.querySelector(".laga-data").open = true;
    await new Promise(done => setTimeout(() => requestAnimationFrame(done), 60));
    must(chart.querySelector(".laga-table table tbody tr"), "has an empty table");
    const data = await (await fetch(chart.querySelector(".laga-data a[download]").href)).text();
    must(data.trim().split("\\n").length > 1, "offers no data");
    for (const control of chart.querySelectorAll(".laga-controls :is(input, select)")) {
      if (!control.checkVisibility()) continue;
      control.focus();
      must(control === document.activeElement && control.tabIndex >= 0, "has a control that no key reaches");
    }
  }
  return wrong;
}"""


@pytest.mark.parametrize(("width", "scheme", "other"), [(WIDE, "light", "dark"), (NARROW, "dark", "light")])
def test_page_is_sound(
    open_page: Open,
    page_path: str,
    width: int,
    scheme: str,
    other: str,
    record_property: Callable[[str, object], None],
) -> None:
    """Opened wide in the light and on a phone in the dark; then each of them in the other scheme, switched in place.

    A page is quick by the clock or, where other work slows the clock, by the processor time that it takes itself.
    """
    seen = open_page(page_path, width=width, scheme=scheme)
    if width == WIDE:
        seen.page.wait_for_load_state("networkidle")  # what a page asks for late counts, and must be its own as well
        record_property("page", {"path": page_path, "ready_s": seen.ready_ms / 1e3, "mb": seen.weight / MB})
    assert seen.weight < (3 if seen.chart_names else 1.5) * MB
    assert min(seen.ready_ms, seen.busy_ms) < READY_MS, f"{seen.ready_ms:.0f} ms, {seen.busy_ms:.0f} of work"
    assert seen.layout_shift < 0.01
    for now in (scheme, other):
        seen.page.emulate_media(color_scheme=now)
        seen.page.wait_for_function("now => document.documentElement.dataset.theme === now", arg=now)
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
        assert seen.page.evaluate(WRONG_WITH_CHARTS) == []
    assert seen.problems == []


ANOTHER_VALUE = """row => {
  const select = row.querySelector("select");
  if (select) return [...select.options].find(each => !each.selected).label;
  const radio = row.querySelector("input[type=radio]:not(:checked)");
  if (radio) return radio.closest("label").textContent.trim();
  const input = row.querySelector("input");
  if (input.type === "checkbox") return !input.checked;
  if (input.type === "range") return input.value === input.max ? input.min : input.max;
  return null;
}"""


def test_controls_change_charts_and_settings_can_be_shared(open_page: Open, page_path: str) -> None:
    if not has_chart(page_path):
        return
    seen = open_page(page_path)
    for name in seen.chart_names:  # charts that share a name for a control do not take each other's choice away
        chosen = seen.chart(name).root.locator(".vega-bind-radio")
        assert all(row.locator("input:checked").count() == 1 for row in chosen.all()), name
    changeable = []
    for name in seen.chart_names:
        chart = seen.chart(name)
        if not chart.controls:
            continue
        changed = []
        for label in chart.controls:
            before = chart.svg
            value = chart.control(label).evaluate(ANOTHER_VALUE)
            if value is not None:
                chart.set(label, value)
                if chart.svg != before:
                    changed.append(label)
        assert changed, f"no control of {name} changes the chart"
        changeable.append(chart)
    if not changeable:
        return
    seen.page.wait_for_function("() => location.search.length > 1")
    seen.page.wait_for_timeout(200)  # longer than the pause after which the address follows
    shared = open_page(seen.page.url.split("/", 3)[3])
    assert shared.problems == []
    for chart in changeable:
        same = shared.chart(chart.name)
        # What is written and the data behind it; ids, and the order of ticks and of rows, differ between visits.
        assert sorted(same.texts) == sorted(chart.texts)
        assert sorted(map(str, same.rows())) == sorted(map(str, chart.rows()))


def test_slider_changes_the_chart(open_page: Open) -> None:
    """Known settings give known numbers: what Laga sends at DeepSeek-V3's dimensions, worked out by hand here."""
    chart = open_page("book/experiments/01_communication.html").chart("chart-2")

    def laga_mb() -> float:
        return sum(float(row["sent"]) for row in chart.rows() if row["variant"] == "Laga")

    def by_hand(seq: int, sp: int) -> float:
        query_and_output = (sp - 1) / sp * seq / sp * 128 * (192 + 128)
        latent_and_rotary_key = (sp - 1) * seq / sp * 576
        return (query_and_output + latent_and_rotary_key) * 2 / 1e6

    assert laga_mb() == pytest.approx(by_hand(16384, 8), rel=1e-9)
    chart.set("Sequence length", 65536)
    assert laga_mb() == pytest.approx(by_hand(65536, 8), rel=1e-9)
    chart.set("Ranks", 32)
    assert laga_mb() == pytest.approx(by_hand(65536, 32), rel=1e-9)
    assert any(f"{by_hand(65536, 32):.1f}" in text for text in chart.texts)


def test_a_chapter_on_paper(open_page: Open) -> None:
    """Printed from a dark page: black on white, no controls, solutions unfolded, nothing beside the text."""
    page = open_page("book/communication.html", scheme="dark").page
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.locator(".laga-plot svg").first.is_visible()
    hidden = ".laga-controls, .laga-data, .bd-sidebar-primary, .bd-sidebar-secondary, .prev-next-area"
    assert not [each for each in page.locator(hidden).all() if each.is_visible()]
    assert page.locator("details.sd-dropdown .sd-summary-content").first.bounding_box()["height"] > 20
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_pages_work_from_files(browser: Any) -> None:
    """The book can be read with no server at all."""
    with_charts = [page for page in book_pages() if has_chart(page)]
    assert with_charts
    for page_path in ("index.html", with_charts[0]):
        seen = visit(browser, HTML.as_uri(), page_path)
        assert seen.problems == []
        assert all(seen.chart(name).root.get_attribute("data-state") == "live" for name in seen.chart_names)
        seen.close()


def test_search_finds_a_page(open_page: Open) -> None:
    seen = open_page("search.html?q=latent")
    seen.page.locator("#search-results li").first.wait_for()
    assert seen.problems == []
