"""The claims ledger in a real browser: it filters, keeps its filters in the address, and shows what decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from browser import Visit

from laga_core.experiments.claims import load_claims

pytestmark = pytest.mark.browser

PAGE = "book/experiments/10_claims.html"


def test_filters_unfold_and_count_what_the_ledger_holds(open_page: Callable[..., Visit]) -> None:
    page = open_page(PAGE).page
    shown = page.locator(".laga-claims tbody tr:visible")
    assert shown.count() == 0  # folded
    for family, number in Counter(claim.family for claim in load_claims()).items():
        page.select_option(".laga-claims select[name=family]", family)
        assert page.locator(".laga-claims output").inner_text() == f"{number} claims"
        assert shown.count() == number
    page.select_option(".laga-claims select[name=family]", "communication")
    page.fill(".laga-claims input[name=words]", "table1 sp16")
    assert shown.count() == 9  # three lengths, three forms
    assert "claims.family=communication" in page.url

    again = open_page(f"{PAGE}?{page.url.split('?')[1]}").page
    assert again.locator(".laga-claims tbody tr:visible").count() == 9
    again.fill(".laga-claims input[name=words]", "")
    again.select_option(".laga-claims select[name=family]", "")
    assert again.locator(".laga-claims tbody tr:visible").count() == len(load_claims())


def test_a_family_unfolds_by_keyboard(open_page: Callable[..., Visit]) -> None:
    page = open_page(PAGE, width=390).page
    summary = page.locator(".laga-family > summary").first
    family = summary.locator("b").inner_text()
    number = Counter(claim.family for claim in load_claims())[family]
    assert f"{number} claims" in summary.inner_text()
    summary.focus()
    page.keyboard.press("Enter")
    assert page.locator(".laga-claims tbody tr:visible").count() == number
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_link_unfolds_its_claim_which_leads_to_the_code_that_decides_it(open_page: Callable[..., Visit]) -> None:
    page = open_page(f"{PAGE}#table2/sp8/seq16384/absorbed", width=390, scheme="dark").page
    page.locator("[id='table2/sp8/seq16384/absorbed'] a").click()
    source = page.locator("#check-peak_memory pre")
    assert source.is_visible() and "def peak_memory(" in source.inner_text()
