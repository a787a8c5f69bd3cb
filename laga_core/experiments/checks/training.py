"""Claims about training runs: read from the records of experiments 05 to 07."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from ...results import Record
from ..convergence import PAPER_RUN
from ..routing_noise import factors, growth
from .records import published
from .rules import NOT_REPRODUCED, REPRODUCED, Claim, Finding, SourceMissing, check, needs_hardware, plainly, show


@check
def convergence(claim: Claim, metric: str) -> Finding:
    """A figure of the memorisation run at the paper's size: the worst over the numbers of ranks."""
    records = published("convergence", **PAPER_RUN)
    degrees = sorted({record.parameters["sp"] for record in records})
    values = []
    for sp in degrees:
        losses = {r.parameters["form"]: r.metrics["loss"] for r in records if r.parameters["sp"] == sp}
        values.append(_CURVES[metric](losses["explicit"], losses["absorbed"], losses["laga"]))
    return plainly(claim, max(values), "measured", f"sp {', '.join(map(str, degrees))}, fp32")


def _apart(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [abs(x - y) for x, y in zip(a, b, strict=True)]


# losses of explicit, absorbed and Laga, step by step
_CURVES: dict[str, Callable[[list[float], list[float], list[float]], float]] = {
    "first_loss": lambda *curves: max(curve[0] for curve in curves),
    "last_loss": lambda *curves: max(curve[-1] for curve in curves),
    "last_loss_spread": lambda *curves: max(c[-1] for c in curves) - min(c[-1] for c in curves),
    "laga_minus_explicit": lambda explicit, absorbed, laga: max(_apart(laga, explicit)),
    "laga_minus_absorbed": lambda explicit, absorbed, laga: max(_apart(laga, absorbed)),
    "divergence_difference": lambda explicit, absorbed, laga: max(
        _apart(_apart(laga, explicit), _apart(absorbed, explicit))
    ),
}


@check
def experts_interleave(claim: Claim) -> Finding:
    """Calls of attention's or the experts' collectives that are out of place, under any expert degree."""
    records = published("experts", form="laga")
    worst = max(record.metrics["interleaved"] for record in records)
    return plainly(claim, worst, "measured", f"calls of one step at ep {_degrees(records)}")


@check
def experts_gradients(claim: Claim) -> Finding:
    """The largest deviation of any gradient from one process without ranks, fp64, under any expert degree."""
    records = published("experts", form="laga")
    worst = max(record.metrics["gradient_error"] for record in records)
    return plainly(claim, worst, "measured", f"fp64, sp {records[0].parameters['sp']}, ep {_degrees(records)}")


@check
def expert_degrees(claim: Claim) -> Finding:
    """Expert degrees among 1, sp and what divides it under which every gradient is right, of those there are."""
    records = published("experts", form="laga")
    right = {r.parameters["ep"] for r in records if r.metrics["gradient_error"] <= 1e-12}
    sp = records[0].parameters["sp"]
    divisors = {degree for degree in range(1, sp + 1) if sp % degree == 0}
    return plainly(claim, right == divisors, "measured", f"sp {sp}: right at ep {_degrees(records)}")


def _degrees(records: list[Record]) -> str:
    return ", ".join(str(ep) for ep in sorted({record.parameters["ep"] for record in records}))


@check
def routing_noise(claim: Claim, metric: str) -> Finding:
    """A factor of the routing experiment, as the median over its seeds.

    The paper's figure comes from one pair of runs, so it counts as the same if it lies within the spread of our seeds.
    """
    records = published("routing_noise", noise=True)
    values = sorted(row[metric] for row in factors(records) if row[metric] is not None)
    within = values[0] <= float(claim.value) <= values[-1]
    spread = f"{show(values[0], claim.unit)} to {show(values[-1], claim.unit)}"
    remark = f"median of {len(values)} seeds, {spread}; noise supplied on a CPU"
    return Finding(float(statistics.median(values)), "measured", REPRODUCED if within else NOT_REPRODUCED, remark)


@check
def jump_is_first_flip(claim: Claim) -> Finding:
    """Whether the difference of two runs with experts grows most at the first step that routes a token elsewhere.

    Growth is the difference over the median of the ten steps before, as where the experiment reports its jump.
    """
    hits = []
    for record in published("routing_noise", noise=True, model="experts"):
        difference, first = record.metrics["difference"], record.metrics["first_flip"]
        grown = [growth(difference, step) or 0.0 for step in range(len(difference))]
        hits.append(first is not None and grown[first] == max(grown))
    return plainly(claim, all(hits), "measured", f"in {sum(hits)} of {len(hits)} seeds")


@check
def noise_vanishes(claim: Claim) -> Finding:
    """Whether two runs with one fixed order of summation are the same, bit for bit."""
    records = published("routing_noise", noise=False)
    worst = max(max(record.metrics["difference"]) for record in records)
    return plainly(claim, worst == 0, "measured", f"{len(records)} pairs of runs, largest difference {worst}")


@check
def measured_on(claim: Claim, device: str, experiment: str) -> Finding:
    """What only a run on this kind of device can tell."""
    try:
        here = [record for record in published(experiment) if record.provenance["device"] == device]
    except SourceMissing:
        here = []
    if here:  # somebody ran it: the claim wants reading, not a shrug
        raise SourceMissing(f"a check that reads the records of {experiment} on {device}")
    return needs_hardware(f"{experiment} has not run on {device}")
