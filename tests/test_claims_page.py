"""The claims ledger in a real browser: it filters, keeps its filters in the address, and shows what decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from browser import Visit

from laga_core.experiments.claims import load_claims

pytestmark = pytest.mark.browser

PAGE = "book/experiments/10_claims.html"


def test_filters_count_what_the_ledger_holds(open_page: Callable[..., Visit]) -> None:
    page = open_page(PAGE).page
    shown = page.locator(".laga-claims tbody tr:visible")
    assert shown.count() == len(load_claims())
    for family, number in Counter(claim.family for claim in load_claims()).items():
        page.select_option(".laga-claims select[name=family]", family)
        assert page.locator(".laga-claims output").inner_text() == f"{number} claims"
    page.select_option(".laga-claims select[name=family]", "communication")
    page.fill(".laga-claims input[name=words]", "table1 sp16")
    assert shown.count() == 9  # three lengths, three forms
    assert "claims.family=communication" in page.url

    again = open_page(f"{PAGE}?{page.url.split('?')[1]}").page
    assert again.locator(".laga-claims tbody tr:visible").count() == 9


def test_a_claim_leads_to_the_code_that_decides_it(open_page: Callable[..., Visit]) -> None:
    page = open_page(PAGE, width=390, scheme="dark").page
    page.locator("[id='table2/sp8/seq16384/absorbed'] a").click()
    source = page.locator("#check-peak_memory pre")
    assert source.is_visible() and "def peak_memory(" in source.inner_text()
