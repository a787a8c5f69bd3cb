"""Claims about what others ship, counted against published code and configurations (``observed`` in claims.yaml)."""

from __future__ import annotations

from datetime import date
from typing import Any

from ..paper import observed
from .rules import Claim, Finding, check, plainly


@check
def observations(claim: Claim, fact: str, before: date | None = None) -> Finding:
    """How many published works show this, all told or before a date."""
    seen = [o for o in observed() if fact in o["shows"] and (before is None or o["since"] < before)]
    return plainly(claim, len(seen), "reported", "; ".join(_cite(o) for o in seen))


@check
def observed_value(claim: Claim, fact: str) -> Finding:
    """A number from a published configuration."""
    (seen,) = [o for o in observed() if fact in o["shows"]]
    return plainly(claim, seen["value"], "reported", _cite(seen))


def _cite(seen: dict[str, Any]) -> str:
    return f"{seen['who']} ({seen['since']:%Y-%m}), {seen['link']}"
