"""Claims about peak memory: decided by simulating one rank of the prototype on tensors without data.

Absorbed is simulated as the paper's numbers imply, with its two score products kept apart (``score="split"``), and
again with one product (``"joint"``): what vanishes in between is not the n_h·d_kv mechanism. "fused" is what
any memory-linear kernel has to keep; a vendor's may need a workspace on top.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ...memory import simulate_memory
from ..paper import read_table
from .communication import prototype
from .rules import NEEDS_HARDWARE, Claim, Finding, by_cause, check, plainly, show

UNIT = {"MB": 1e6, "GB": 1e9}
DEVICES = (16, 24, 32, 40, 48, 64, 80, 96, 128, 141, 192)
"""Memory of the accelerators one can buy, GB."""
LEAST = "joint and a score matrix"
"""The least that a second score product can cost."""


@cache
def simulated(
    form: str,
    kernel: str,
    *,
    seq: int,
    sp: int,
    n_heads: int = 128,
    d_model: int = 7168,
    layers: int = 1,
    score: str | None = None,
) -> tuple[int, int]:
    """Peak and saved bytes of one rank; each configuration runs once."""
    options: dict[str, Any] = {} if score is None else {"score": score}
    result = simulate_memory(
        prototype(n_heads, d_model), form=form, kernel=kernel, seq=seq, sp=sp, layers=layers, **options
    )
    return result.peak_bytes, result.saved_bytes


def _peak(form: str, kernel: str, score: str = "split", **sizes: Any) -> int:
    return simulated(form, kernel, score=_score(form, kernel, score), **sizes)[0]


def _score(form: str, kernel: str, score: str) -> str | None:
    """Absorbed's option; only the eager kernel can keep two score products apart."""
    return (score if kernel == "eager" else "joint") if form == "absorbed" else None


def _excess(kernel: str, score: str, **sizes: Any) -> int:
    """Absorbed's peak minus explicit's."""
    if score == LEAST:
        return _excess(kernel, "joint", **sizes) + _score_matrix(**sizes)
    return _peak("absorbed", kernel, score, **sizes) - _peak("explicit", kernel, **sizes)


def _score_matrix(seq: int, sp: int, n_heads: int = 128, **_: Any) -> int:
    """Bytes of one bf16 score matrix on one rank."""
    return n_heads // sp * seq**2 * 2


def _share(kernel: str, score: str, **sizes: Any) -> float:
    """Absorbed's excess in per cent of explicit's peak."""
    return 100 * _excess(kernel, score, **sizes) / _peak("explicit", kernel, **sizes)


def _sizes(table: str, kernel: str) -> list[dict[str, Any]]:
    """The settings of a table's rows."""
    where = {"kernel": kernel} if table == "table4" else {}
    return [{"sp": int(row["sp"]), "seq": int(row["seq"])} for row in read_table(table, **where)]


@check
def peak_memory(claim: Claim, form: str, kernel: str, seq: int, sp: int, unit: str = "MB") -> Finding:
    """One rank's peak, weights and gradients included.

    A fused kernel's peak above ours is a matter of its workspace, which only its hardware can tell, as long as the gap
    is smaller than one score matrix: beyond that the kernel was not memory-linear.
    """
    ours = _peak(form, kernel, seq=seq, sp=sp) / UNIT[unit]
    if kernel == "eager" or claim.agrees(ours):
        joint = _peak(form, kernel, "joint", seq=seq, sp=sp) / UNIT[unit]
        remark = f"two score products; with one: {show(joint, unit)}" if joint != ours else ""
        return plainly(claim, ours, "simulated", remark)
    gap = float(claim.value) - ours
    matrix = _score_matrix(seq, sp) / UNIT[unit]
    remark = f"{gap / matrix:.2f} score matrices above a memory-linear kernel"
    if 0 < gap < matrix:
        return Finding(ours, "simulated", NEEDS_HARDWARE, f"the vendor kernel's workspace: {show(gap, unit)} more")
    return plainly(claim, ours, "simulated", remark)


@check
def inflation(
    claim: Claim, kernel: str, seq: int, sp: int, unit: str = "MB", hardware: str = "", **config: int
) -> Finding:
    """Absorbed's peak minus explicit's."""
    sizes = {"seq": seq, "sp": sp, **config}
    split, joint, least = (_excess(kernel, score, **sizes) / UNIT[unit] for score in ("split", "joint", LEAST))
    return by_cause(claim, split, joint, least) if kernel == "eager" else plainly(claim, joint, "simulated")


@check
def inflation_share(
    claim: Claim,
    kernel: str | list[str],
    reduce: str,
    over: str | None = None,
    sp: int | None = None,
    seq: int | None = None,
) -> Finding:
    """The least or greatest excess in per cent of explicit's peak: over a table's rows, or over kernels at one size."""
    kernels = [kernel] if isinstance(kernel, str) else kernel

    def extreme(score: str) -> float:
        settings = [(k, s) for k in kernels for s in (_sizes(over, k) if over else [{"sp": sp or 1, "seq": seq or 1}])]
        return {"min": min, "max": max}[reduce](_share(k, score, **s) for k, s in settings)

    least = extreme(LEAST) if "fused" not in kernels else None
    return by_cause(claim, extreme("split"), extreme("joint"), least)


@check
def inflation_power(claim: Claim, axis: str, values: list[int], kernel: str, **sizes: int) -> Finding:
    """The power with which the excess grows along an axis, from its ends: 1 is in proportion, 2 is quadratic."""

    def power(score: str) -> float:
        first, last = (_excess(kernel, score, **{**sizes, axis: value}) for value in (values[0], values[-1]))
        return math.log(last / first) / math.log(values[-1] / values[0])

    return plainly(claim, power("split"), "simulated", f"with one score product: power {power('joint'):.2f}")


@check
def inflation_share_grows(claim: Claim, kernel: str, seq: list[int], sp: int) -> Finding:
    """Whether the excess in per cent grows with the sequence."""

    def grows(score: str) -> bool:
        return _increases([_share(kernel, score, seq=s, sp=sp) for s in seq])

    return by_cause(claim, grows("split"), grows("joint"))


@check
def inflation_follows_hidden_size(claim: Claim, kernel: str, seq: int, sp: int, d_model: list[int]) -> Finding:
    """Whether the excess grows with the hidden size."""
    excess = [_excess(kernel, "split", seq=seq, sp=sp, d_model=d) / 1e6 for d in d_model]
    remark = "; ".join(f"hidden size {d}: {x:.0f} MB" for d, x in zip(d_model, excess, strict=True))
    return plainly(claim, excess[-1] > 1.01 * excess[0], "simulated", remark)


@check
def inflation_grows_without_scores(claim: Claim, seq: int, sp: int) -> Finding:
    """Whether the excess is larger under a memory-linear kernel than under eager."""
    eager, fused = _excess("eager", "split", seq=seq, sp=sp), _excess("fused", "joint", seq=seq, sp=sp)
    return plainly(claim, fused > eager, "simulated", f"eager {eager / 1e9:.1f} GB, memory-linear {fused / 1e9:.1f} GB")


@check
def laga_overhead(claim: Claim, kernel: str, over: str, unit: str) -> Finding:
    """The greatest distance of Laga's peak from explicit's over a table's rows."""
    worst = 0.0
    for sizes in _sizes(over, kernel):
        explicit, laga = _peak("explicit", kernel, **sizes), _peak("laga", kernel, **sizes)
        worst = max(worst, abs(laga - explicit) / (explicit / 100 if unit == "%" else UNIT[unit]))
    return plainly(claim, worst, "simulated")


@check
def decides_fit(claim: Claim, kernel: str, seq: int, sp: int) -> Finding:
    """Whether some device's memory lies between explicit's peak and absorbed's."""
    split, joint = (bool(_between(kernel, score, seq=seq, sp=sp)) for score in ("split", "joint"))
    return by_cause(claim, split, joint)


def out_of_memory(claim: Claim, kernel: str, seq: int, sp: int, layers: int = 4) -> Finding:
    """Whether absorbed's stack of layers fails where explicit's runs: on a device whose memory lies in between."""

    def outcome(score: str) -> str:
        return "OOM" if _between(kernel, score, seq=seq, sp=sp, layers=layers) else "runs"

    found = by_cause(claim, outcome("split"), outcome("joint"))
    peaks = [
        show(_peak(form, kernel, score, seq=seq, sp=sp, layers=layers) / 1e9, "GB")
        for form, score in (("explicit", ""), ("absorbed", "split"), ("absorbed", "joint"))
    ]
    remark = f"{layers} layers: explicit {peaks[0]}, absorbed {peaks[1]}, with one score product {peaks[2]}"
    return replace(found, remark=remark)


def _between(kernel: str, score: str, **sizes: Any) -> list[int]:
    """Device memories, GB, that hold explicit and not absorbed."""
    explicit, absorbed = _peak("explicit", kernel, **sizes), _peak("absorbed", kernel, score, **sizes)
    return [size for size in DEVICES if explicit < size * 1e9 < absorbed]


@check
def absorbed_saves_more(claim: Claim, kernel: str, seq: int, sp: int) -> Finding:
    """Whether absorbed holds more between forward and backward than explicit."""
    absorbed, explicit = (
        simulated(form, kernel, score=_score(form, kernel, "joint"), seq=seq, sp=sp)[1]
        for form in ("absorbed", "explicit")
    )
    return plainly(
        claim,
        absorbed > explicit,
        "simulated",
        f"saved for backward: {absorbed / 1e6:.0f} against {explicit / 1e6:.0f} MB",
    )


@check
def latent_tensors_exceed(claim: Claim) -> Finding:
    """Whether absorbed query and accumulator outgrow key and value exactly where d_kv > d_head, over a grid."""
    rope = 64
    outcomes = set()
    for d_kv in range(32, 1025, 16):
        for d_head in (32, 64, 96, 128, 192, 256, 512):
            absorbed = (d_kv + rope) + d_kv  # query joined with its rotary band, accumulator
            explicit = (d_head + rope) + d_head  # key joined with its rotary band, value
            outcomes.add((absorbed > explicit) == (d_kv > d_head))
    return plainly(
        claim, outcomes == {True}, "derived", "two tensors against two; one of absorbed's against both takes 2·d_head"
    )


def _increases(values: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))
