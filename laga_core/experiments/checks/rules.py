"""What a claim is, when a value of ours counts as the same, and the rules that turn comparisons into verdicts.

No verdict is ever written down: each is the outcome of one of the rules below, all of them arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

REPRODUCED = "reproduced"
ANOTHER_CAUSE = "reproduced, another cause"
CONVENTION = "holds under the paper's convention"
NOT_REPRODUCED = "not reproduced"
NEEDS_HARDWARE = "needs hardware not at hand"
VERDICTS = (REPRODUCED, ANOTHER_CAUSE, CONVENTION, NOT_REPRODUCED, NEEDS_HARDWARE)

FAMILIES = ("communication", "memory", "throughput", "correctness", "training", "hardware", "field")
KINDS = ("reported", "derived", "simulated", "emulated", "measured")

GONE = 0.5
"""An effect has another cause when less than this share of it is left once that cause is removed."""

Value = float | int | bool | str


@dataclass(frozen=True)
class Claim:
    """One claim of the paper: where it stands, what it says, and the check that decides it.

    ``digits``, ``within`` and ``bound`` say when a value of ours counts as the same (see ``agrees``); ``params`` go to
    the check as keyword arguments.
    """

    id: str
    where: str
    family: str
    text: str
    value: Value
    check: str
    params: Mapping[str, Any] = field(default_factory=dict)
    unit: str = ""
    digits: int | None = None
    within: float | None = None
    bound: str | None = None
    note: str = ""

    def agrees(self, ours: Value) -> bool:
        """Whether ``ours`` is what the paper says, at its printed precision or the stated tolerance."""
        if isinstance(self.value, (bool, str)) or isinstance(ours, (bool, str)):
            return type(ours) is type(self.value) and ours == self.value
        if self.bound:
            return {"<": ours < self.value, "<=": ours <= self.value, ">=": ours >= self.value}[self.bound]
        if self.within is not None:
            return abs(ours - self.value) <= self.within * abs(self.value)
        if self.digits is not None:  # half a unit of the last printed digit, with room for binary rounding
            return abs(ours - self.value) <= 0.5 * 10.0**-self.digits * (1 + 1e-9)
        return ours == self.value


@dataclass(frozen=True)
class Finding:
    """Our value for a claim, how it was come by (``kind``), and the verdict of a rule."""

    ours: Value | None
    kind: str | None
    verdict: str
    remark: str = ""


class SourceMissing(RuntimeError):
    """What decides a claim (a module, a record) does not exist yet: an open end, which no verdict may cover up."""


Check = Callable[..., Finding]
REGISTRY: dict[str, Check] = {}
"""Every check by its name; its module tells the family it was written for."""


def check(function: Check) -> Check:
    """Register ``function(claim, **params) -> Finding`` under its name."""
    if function.__name__ in REGISTRY:
        raise ValueError(f"two checks are called {function.__name__!r}")
    REGISTRY[function.__name__] = function
    return function


# ---------------------------------------------------------------- the rules


def plainly(claim: Claim, ours: Value, kind: str, remark: str = "") -> Finding:
    """Reproduced when our value agrees, not reproduced otherwise."""
    return Finding(ours, kind, REPRODUCED if claim.agrees(ours) else NOT_REPRODUCED, remark)


def by_accounting(claim: Claim, counted: Callable[[str], Value], kind: str = "derived") -> Finding:
    """Count as a wire does, then as the paper does: holding only the second way is a convention.

    ``counted`` gives our value under an accounting, ``"wire"`` or ``"paper"``.
    """
    wire, paper = counted("wire"), counted("paper")
    if claim.agrees(wire):
        return Finding(wire, kind, REPRODUCED)
    if claim.agrees(paper):
        return Finding(paper, kind, CONVENTION, f"what a rank really sends gives {show(wire, claim.unit)}")
    return Finding(wire, kind, NOT_REPRODUCED, f"counted as the paper counts: {show(paper, claim.unit)}")


def by_cause(claim: Claim, split: Value, joint: Value, least: float | None = None, kind: str = "simulated") -> Finding:
    """Reproduce with two score matrices, then take the second one away: what vanishes with it was caused by it.

    ``split`` is our value with absorbed's two score products kept apart, ``joint`` with one product. The mechanism the
    paper names, tensors of n_h·d_kv elements a token, is the same in both. How much more than one score matrix the
    second product costs depends on the moment of the peak: a printed value between ``least`` (joint and one score
    matrix, nothing more) and ``split`` counts as the same.
    """
    between = least is not None and not isinstance(claim.value, str) and least <= claim.value <= float(split)
    agrees = claim.agrees(split) or between or (least is not None and claim.agrees(least))
    without = f"with one score product{' instead of two' if agrees else ''}: {show(joint, claim.unit)}"
    if least is not None:
        without = f"one score matrix and absorbed's own tensors: {show(least, claim.unit)}; {without}"
    if not agrees:
        return Finding(split, kind, NOT_REPRODUCED, without)
    yes_or_no = isinstance(split, (bool, str))
    gone = joint != split if yes_or_no else abs(float(joint)) < GONE * abs(float(split))
    return Finding(split, kind, ANOTHER_CAUSE if gone else REPRODUCED, without)


def needs_hardware(remark: str) -> Finding:
    """Only the named hardware can tell, and no record of ours comes from it."""
    return Finding(None, None, NEEDS_HARDWARE, remark)


def show(value: Value | None, unit: str = "", digits: int | None = None) -> str:
    """A value as it is printed in the table, to ``digits`` decimals or to four significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        value = _decimal(value, digits)
    return f"{value}{'' if unit in ('', '%', '×') else ' '}{unit}"


def _decimal(value: float, digits: int | None) -> str:
    if digits is not None:
        return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 turns -0.0 into 0.0
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
