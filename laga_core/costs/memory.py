"""Closed forms of memory: what one rank keeps between forward and backward, and the most it holds at once.

A training step has few moments at which memory can peak: in backward of the output projection (everything saved, and
the first new gradient of a weight), in attention, in backward of the query projection. Each is a sum of named tensors
(:mod:`laga_core.costs.moments`); the peak is the largest of the sums. :func:`laga_core.simulate_memory` runs the step
itself, and the tests hold the closed forms to it within 2 %.

What is kept has a closed form for every form, kernel and option. Two combinations have none for the peak, because it
is not a function of the sizes alone: ``context`` > 1 under a causal mask, where each rank sees another number of keys
(with ``eager`` that goes for what is kept, too), and ``head_chunk`` without ``recompute``, where autograd pads the
gradients of slices one by one and the largest pile depends on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy
import torch

from ..config import MLAConfig
from ..forms import resolve_form
from .moments import KERNELS, case
from .symbols import (
    BATCH,
    CONTEXT,
    HEADS,
    HIDDEN,
    ITEMSIZE,
    KV_LORA,
    LATEX,
    NOPE,
    Q_LORA,
    ROPE,
    SEQ,
    SP,
    VALUE,
    check_sizes,
    substitutions,
)
from .tensors import CAUSAL, DIRECT, ROTARY, WEIGHTS, Case, Roles, add

LAYERS = sympy.Symbol("layers", nonnegative=True, integer=True)
LATEX[LAYERS] = "L"


@dataclass(frozen=True)
class Moment:
    """A point of the step at which memory may peak: what is held there, by role, in bytes."""

    name: str
    roles: Roles

    @property
    def total(self) -> sympy.Expr:
        """All of it."""
        return sympy.Add(*self.roles.values())


def saved_roles(form: str, kernel: str, **form_options: Any) -> Roles:
    """What one layer keeps for backward besides weights and gradients, its input included: bytes by role."""
    return _case(form, kernel, form_options).saved


def saved_expression(form: str, kernel: str, **form_options: Any) -> sympy.Expr:
    """The sum of :func:`saved_roles`."""
    return sympy.Add(*saved_roles(form, kernel, **form_options).values())


def memory_moments(form: str, kernel: str, **form_options: Any) -> list[Moment]:
    """The moments at which a step of ``LAYERS`` layers may peak, weights and gradients included.

    Raises ``ValueError`` for an unknown form, kernel or option, and for ``head_chunk`` without ``recompute``.
    """
    found = _case(form, kernel, form_options)
    if form_options.get("head_chunk") and not form_options.get("recompute"):
        raise ValueError(
            "no closed form of the peak for head_chunk without recompute: it depends on the order of autograd's sums; "
            "simulate_memory has it"
        )
    earlier = {role: (LAYERS - 1) * size for role, size in found.saved.items()}
    resident = {"weights": LAYERS * WEIGHTS, "gradients": LAYERS * WEIGHTS}
    return [Moment(name, add(resident, earlier, roles)) for name, roles in found.moments.items()]


def peak_expression(form: str, kernel: str, **form_options: Any) -> sympy.Expr:
    """Most bytes held at once: the largest of the moments."""
    return sympy.Max(*(m.total for m in memory_moments(form, kernel, **form_options)), evaluate=False)


@dataclass(frozen=True)
class MemoryCost:
    """Bytes of one rank's training step, as closed forms give them; fields as in ``MemorySimulation``.

    ``moment`` is where it peaks.
    """

    peak_bytes: int
    saved_bytes: int
    breakdown: dict[str, int]
    saved_breakdown: dict[str, int]
    moment: str


def memory_cost(
    config: MLAConfig,
    form: str,
    kernel: str,
    seq: int,
    sp: int,
    batch: int = 1,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **form_options: Any,
) -> MemoryCost:
    """Memory of one rank in a training step, like :func:`laga_core.simulate_memory` but from the closed forms.

    Raises ``ValueError`` for an unknown form, kernel or option, one that has no closed form, and sizes that cannot be
    split evenly.
    """
    check_sizes(config, seq, sp, batch, form, **form_options)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ValueError(f"layers must be a whole number of at least 1, got {layers!r}")
    context = form_options.get("context", 1)
    if context > 1 and config.causal:
        raise ValueError(
            "no closed form of the peak for context > 1 under a causal mask: each rank sees another number of keys; "
            "simulate_memory has rank 0's bytes, saved_expression what is kept"
        )
    values = memory_values(config, seq=seq, sp=sp, batch=batch, layers=layers, dtype=dtype, context=context)
    key = tuple(sorted(form_options.items()))
    moments = _compiled(form, kernel, key)(*(values[symbol] for symbol in _SYMBOLS))
    saved = {role: layers * size for role, size in moments.pop("saved").items()}
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    return MemoryCost(sum(moments[peak].values()), sum(saved.values()), moments[peak], saved, peak)


def memory_values(
    config: MLAConfig,
    *,
    seq: int,
    sp: int,
    batch: int = 1,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    context: int = 1,
) -> dict[sympy.Symbol, int]:
    """Numbers for every symbol of these closed forms."""
    values = {Q_LORA: 0, **substitutions(config, seq=seq, sp=sp, batch=batch, dtype=dtype, context=context)}
    flags = {CAUSAL: config.causal, DIRECT: config.q_lora_rank is None, ROTARY: config.rope_theta is not None}
    return values | {HIDDEN: config.hidden_size, LAYERS: layers} | {symbol: int(flag) for symbol, flag in flags.items()}


def longest_sequence(
    config: MLAConfig,
    form: str,
    kernel: str,
    sp: int,
    memory_bytes: float,
    batch: int = 1,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **form_options: Any,
) -> int:
    """The longest sequence, in tokens and a multiple of ``sp``, whose step fits into ``memory_bytes``; 0 if none."""

    def fits(shard: int) -> bool:
        cost = memory_cost(config, form, kernel, shard * sp, sp, batch, layers, dtype, **form_options)
        return cost.peak_bytes <= memory_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * sp


def _case(form: str, kernel: str, form_options: Mapping[str, Any]) -> Case:
    _, options = resolve_form(form, form_options)
    if kernel not in KERNELS:
        raise ValueError(f"no closed form of memory for kernel {kernel!r}; there is one for: {', '.join(KERNELS)}")
    return case(form, kernel, options)


@cache
def _compiled(form: str, kernel: str, key: tuple[tuple[str, Any], ...]) -> Callable[..., dict[str, dict[str, int]]]:
    """A function of the values of :data:`_SYMBOLS`: what is saved, and each moment, by role."""
    options = dict(key)
    wanted = {"saved": saved_roles(form, kernel, **options)}
    wanted |= {moment.name: moment.roles for moment in memory_moments(form, kernel, **options)}
    sizes = [list(roles.values()) for roles in wanted.values()]
    function = sympy.lambdify(_SYMBOLS, sizes, modules=[{"Max": max, "Min": min}, "math"])

    def numbers(*values: int) -> dict[str, dict[str, int]]:
        found = zip(wanted.items(), function(*values), strict=True)
        return {
            name: {role: round(size) for role, size in zip(roles, numbers, strict=True) if round(size)}
            for (name, roles), numbers in found
        }

    return numbers


_SYMBOLS = (
    SEQ,
    SP,
    BATCH,
    HEADS,
    NOPE,
    ROPE,
    VALUE,
    KV_LORA,
    Q_LORA,
    ITEMSIZE,
    HIDDEN,
    CONTEXT,
    LAYERS,
    CAUSAL,
    DIRECT,
    ROTARY,
)
