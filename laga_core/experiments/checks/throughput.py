"""Claims about speed: a rate needs its hardware; a ratio of rates may follow from bytes and one link rate.

That is asked of a whole table at once: one rate, fitted to its step times, has to give every ratio of the table within
the tolerance. Where it does not, something else than bytes is at work, and only the hardware can tell.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from ..throughput import across_nodes, link_fit
from .memory import out_of_memory
from .rules import Claim, Finding, check, needs_hardware, plainly, show

CLOSE = 0.02
"""A table's ratios follow from its bytes if one link rate gives each of them to this relative distance."""

HARDWARE = {"table3": "Ascend 910B", "table4": "Ascend 910B", "table5": "two nodes of Ascend 910B"}


@check
def rate(claim: Claim, table: str, form: str, kernel: str, seq: int, sp: int, **setting: Any) -> Finding:
    """Tokens per second, forward and backward, of the four-layer stack; that it ran out of memory can be simulated."""
    if claim.value == "OOM":
        return out_of_memory(claim, kernel, seq, sp)
    return needs_hardware(f"tokens per second of {HARDWARE[table]}")


@check
def rate_ratio(
    claim: Claim, table: str, kernel: str, seq: int | None = None, reduce: str | None = None, **setting: Any
) -> Finding:
    """Laga over explicit: one cell, or the least or greatest of a table, by the bytes saved at one link rate."""
    if table == "table6" and setting["hardware"] == "a100":
        return needs_hardware("the paper gives no step times of A100")
    source = "table4" if table == "table6" else table  # table 6's Ascend column is table 4's
    fit = _fit(source, kernel)
    cells = [c for c in fit["predicted"] if seq in (None, c["seq"]) and setting.get("sp", c["sp"]) == c["sp"]]
    values = [float(cell["predicted"]) for cell in cells]
    ours = {"min": min, "max": max}[reduce](values) if reduce else values[0]
    named = source.replace("table", "table ")
    if not _explained(fit):
        return needs_hardware(f"{named}'s {kernel} ratios do not follow from bytes: at one link rate {show(ours, '×')}")
    remark = f"bytes saved at one link rate, {fit['gb_s']:.0f} GB/s, fitted to {named}'s {kernel} step times"
    return plainly(claim, ours, "derived", remark)


@cache
def _fit(table: str, kernel: str) -> dict[str, Any]:
    return link_fit(table.replace("table", "table "), kernel)


def _explained(fit: dict[str, Any]) -> bool:
    return all(abs(cell["predicted"] / cell["reported"] - 1) <= CLOSE for cell in fit["predicted"])


@check
def fitted_link(claim: Claim, seq: int) -> Finding:
    """The rate between nodes, GB/s, at which the bytes of a long step fill the time that computation leaves.

    The mean of explicit's and Laga's, fused; at shorter sequences fixed costs weigh more and the rate comes out lower.
    """
    rates = {row["form"]: row["implied_gb_s"] for row in across_nodes() if row["seq"] == seq}
    mean = float(sum(rates.values()) / len(rates))
    remark = ", ".join(f"{form} {rate:.1f} GB/s" for form, rate in rates.items())
    return plainly(claim, mean, "derived", f"{remark}, from tables 4 and 5")
