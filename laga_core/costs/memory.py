"""Closed forms of memory: what one rank keeps between forward and backward, and the most it holds at once.

A training step has few moments at which memory can peak: in backward of the output projection (everything saved, and
the first new gradient of a weight), in attention, in backward of the query projection. Each is a sum of named tensors;
the peak is the largest of the sums. :func:`laga_core.simulate_memory` runs the step itself, and the tests hold the
closed forms to it within 2 %.
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
from .symbols import (
    BATCH,
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

Roles = dict[str, sympy.Expr]


def _count(name: str, latex: str) -> sympy.Symbol:
    symbol = sympy.Symbol(name, nonnegative=True, integer=True)
    LATEX[symbol] = latex
    return symbol


LAYERS = _count("layers", "L")
CAUSAL = _count("causal", r"[\text{causal}]")
DIRECT = _count("direct_query", r"[\text{no query latent}]")
ROTARY = _count("rotary", r"[\text{rotary}]")
"""The last three are 1 or 0: a causal mask, a query projected directly from the hidden state, a rotation."""

KERNELS = ("eager", "fused")
"""Kernels whose memory has a closed form. ``tiled`` keeps what ``fused`` keeps, its tiles on top: simulate it."""

_W = ITEMSIZE
_LOCAL = BATCH * SEQ / SP  # tokens of this rank
_ALL = BATCH * SEQ
_HEADS = HEADS / SP  # heads of this rank
_QK = NOPE + ROPE
_LATENT = KV_LORA + ROPE
_MANY = sympy.Ne(SP, 1)
_Q = _LOCAL * HEADS * _QK * _W  # bytes of the query, whether split by tokens or by heads; so for the others
_K = _Q
_V = _LOCAL * HEADS * VALUE * _W
_SCORES = _ALL * _HEADS * SEQ * _W
_SUMS = sympy.Max(4, _W)  # bytes of an element of what is summed in float32 at least


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
    return _FORMS[form](kernel, _options(form, kernel, form_options)).saved


def saved_expression(form: str, kernel: str, **form_options: Any) -> sympy.Expr:
    """The sum of :func:`saved_roles`."""
    return sympy.Add(*saved_roles(form, kernel, **form_options).values())


def memory_moments(form: str, kernel: str, **form_options: Any) -> list[Moment]:
    """The moments at which a step of ``LAYERS`` layers may peak, weights and gradients included."""
    case = _FORMS[form](kernel, _options(form, kernel, form_options))
    earlier = {role: (LAYERS - 1) * size for role, size in case.saved.items()}
    resident = {"weights": LAYERS * WEIGHTS, "gradients": LAYERS * WEIGHTS}
    moments = {"output projection": _output_projection(case.saved), **case.attention, **_END}
    return [Moment(name, _sum(resident, earlier, roles)) for name, roles in moments.items()]


def peak_expression(form: str, kernel: str, **form_options: Any) -> sympy.Expr:
    """Most bytes held at once: the largest of the moments."""
    return sympy.Max(*(m.total for m in memory_moments(form, kernel, **form_options)), evaluate=False)


def breakdown_expressions(form: str, kernel: str, **form_options: Any) -> Roles:
    """Role -> its bytes at whichever moment is the largest: what a stacked bar shows, and its height is the peak."""
    moments = memory_moments(form, kernel, **form_options)
    largest = [sympy.And(*(sympy.Ge(m.total, other.total) for other in moments if other is not m)) for m in moments]
    roles = list(dict.fromkeys(role for m in moments for role in m.roles))
    zero = sympy.S.Zero
    return {
        role: sympy.Piecewise(
            *((m.roles.get(role, zero), first) for m, first in zip(moments[:-1], largest, strict=False)),
            (moments[-1].roles.get(role, zero), True),
            evaluate=False,
        )
        for role in roles
    }


_OTHERS = (SP - 1) / SP  # of what is gathered, the part that this rank cannot make again by itself

FLOOR: Roles = {
    "hidden": _LOCAL * HIDDEN * _W,
    "latent": _OTHERS * _ALL * _LATENT * _W,
    "q": sympy.Min(_Q, _OTHERS * _ALL * Q_LORA * _W + DIRECT * _Q),
    "output": _V,
}
"""What any exact method has to keep for each layer if its backward does not send again what forward sent. Each is the
least form of something that backward multiplies by: ``hidden``, from which this rank's own latents follow; the other
ranks' ``latent``, from which keys and values are rebuilt; the query of this rank's heads, or the others' query latents
it is built from (``q``), whichever is smaller; the ``output`` for the gradient of the last projection.
``laga(query="latent", recompute=True)`` keeps just that. Below it, only hidden is indispensable, at the price of the
whole forward again with its communication."""


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
    values = memory_values(config, seq=seq, sp=sp, batch=batch, layers=layers, dtype=dtype)
    key = tuple(sorted(form_options.items()))
    moments = {name: _numbers(f, values) for name, f in _compiled(form, kernel, key).items()}
    saved = {role: layers * size for role, size in moments.pop("saved").items()}
    peak = max(moments, key=lambda name: sum(moments[name].values()))
    return MemoryCost(sum(moments[peak].values()), sum(saved.values()), moments[peak], saved, peak)


def memory_values(
    config: MLAConfig, *, seq: int, sp: int, batch: int = 1, layers: int = 1, dtype: torch.dtype = torch.bfloat16
) -> dict[sympy.Symbol, int]:
    """Numbers for every symbol of these closed forms."""
    values = {Q_LORA: 0, **substitutions(config, seq=seq, sp=sp, batch=batch, dtype=dtype)}
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


# --- the forms ------------------------------------------------------------------------------------------------------

WEIGHTS: sympy.Expr = _W * (
    DIRECT * HIDDEN * HEADS * _QK
    + (1 - DIRECT) * Q_LORA * (HIDDEN + 1 + HEADS * _QK)
    + HIDDEN * _LATENT
    + KV_LORA
    + KV_LORA * HEADS * (NOPE + VALUE)
    + HEADS * VALUE * HIDDEN
)
"""Bytes of one layer's weights."""


@dataclass(frozen=True)
class _Case:
    """A form under a kernel: what it saves, and what is held at each moment of attention that may be the peak."""

    saved: Roles
    attention: dict[str, Roles]


def _explicit(kernel: str, options: Mapping[str, Any]) -> _Case:
    latent = _LOCAL * (_LATENT + KV_LORA) * _W
    one_rank = {"v": _LOCAL * HEADS * (NOPE + VALUE) * _W}  # a view of the product of keys and values
    if kernel == "eager" or options["packed"]:
        one_rank = {}
    case = _per_head(kernel, latent, one_rank)
    return _Case(case.saved, {**case.attention, "exchange": _packed(options)}) if options["packed"] else case


def _laga(kernel: str, options: Mapping[str, Any]) -> _Case:
    return _per_head(kernel, (_LOCAL + _ALL) * _LATENT * _W, {})


def _per_head(kernel: str, latent: sympy.Expr, one_rank: Roles) -> _Case:
    """Attention over keys and values of each head."""
    common = {**_BEFORE, "latent": latent, "q": _QUERY_LATENT + _Q, "k": _K, "v": _V}
    if kernel == "eager":
        saved = _sum(common, _MATRICES, {"output": _V})
        backward = _sum(common, _MATRICES, {"gradient of probabilities": _SCORES, "gradient of scores": _SCORES})
        backward["gradient of v"] = backward.pop("v")
        return _Case(saved, {"softmax backward": backward})
    common["v"] = _if_one_rank(one_rank["v"], _V) if one_rank else _V
    common["log-sum-exp"] = _ALL * _HEADS * _SUMS
    saved = _sum(common, {"output": _V + _if_one_rank(sympy.S.Zero, _V)})
    gradients = {"gradient of output": _V, "gradient of q": _Q, "gradient of k": _K, "gradient of v": _V}
    held = _sum(common, {"output": _V}, gradients)
    return _Case(saved, {"attention backward": held})


def _absorbed(kernel: str, options: Mapping[str, Any]) -> _Case:
    split = options["score"] == "split"
    query = _ALL * _HEADS * (KV_LORA if split else _LATENT) * _W
    accumulator = _ALL * _HEADS * KV_LORA * _W
    gathered, value = _ALL * _LATENT * _W, _ALL * KV_LORA * _W
    rope = _ALL * _HEADS * ROPE * _W if split else sympy.S.Zero
    common = {**_BEFORE, "latent": _LOCAL * _LATENT * _W + gathered, "q": _QUERY_LATENT + _Q, "q_absorbed": query}
    up_value = {"gradient of weights": _HEADS * KV_LORA * VALUE * _W}
    if kernel == "eager":
        common = _sum(common, {"q": rope}, _MATRICES)
        saved = _sum(common, {"latent": value, "latent accumulator": accumulator, "output": _V})
        # In forward the values of the function's own variables are there too: scores, the query before scaling, ...
        scores = _SCORES * (3 if split else 1)
        names = {"scores": scores, "q_absorbed": query, "latent accumulator": accumulator}
        locals_ = _LOCAL * (KV_LORA + ROTARY * ROPE) * _W + value + (gathered if split else 0)
        forward = _sum(common, names, {"latent": locals_})
        gradients = {"gradient of probabilities": _SCORES, "gradient of scores": _SCORES, "gradient of latent": value}
        backward = _sum(common, gradients, up_value)
        return _Case(saved, {"attention forward": forward, "softmax backward": backward})
    common = _sum(common, {"latent accumulator": accumulator, "log-sum-exp": _ALL * _HEADS * _SUMS})
    gradients = {
        "gradient of latent accumulator": accumulator,
        "gradient of q_absorbed": query,
        "gradient of latent": gathered + value,
    }
    held = _sum(common, gradients, up_value)
    return _Case(_sum(common, {"output": _V}), {"attention backward": held})


_FORMS: dict[str, Callable[[str, Mapping[str, Any]], _Case]] = {
    "explicit": _explicit,
    "absorbed": _absorbed,
    "laga": _laga,
}


def _if_one_rank(one: sympy.Expr, many: sympy.Expr) -> sympy.Expr:
    return sympy.Piecewise((many, _MANY), (one, True))


def _if_many_heads(size: sympy.Expr) -> sympy.Expr:
    """A rank with a single head needs no copy to lay tensors out by head."""
    return sympy.Piecewise((size, sympy.Ne(HEADS, SP)), (0, True))


_QUERY_LATENT = (1 - DIRECT) * 2 * _LOCAL * Q_LORA * _W  # before and after its norm
_BEFORE: Roles = {"hidden": _LOCAL * HIDDEN * _W, "rotary tables": ROTARY * SEQ / SP * ROPE * _W}
_MATRICES: Roles = {"probabilities": _SCORES, "causal mask": CAUSAL * SEQ**2}


def _output_projection(saved: Roles) -> Roles:
    """Backward's first product: its weight's new gradient, the output's, and the loss's gradient made dense."""
    return _sum(
        saved,
        {
            "gradient of weights": HEADS * VALUE * HIDDEN * _W,
            "gradient of output": _V,
            "kernel workspace": _LOCAL * HIDDEN * _W,
        },
    )


# The end of backward: the query's last gradients, and both contributions to the gradient of hidden with their sum.
_TOKENS = _LOCAL * HIDDEN * _W
_END: dict[str, Roles] = {
    "query projection": {
        "hidden": _TOKENS,
        "gradient of hidden": (1 + DIRECT) * _TOKENS,
        "gradient of weights": HEADS * _QK * (DIRECT * HIDDEN + (1 - DIRECT) * Q_LORA) * _W,
        "gradient of q": _Q + _QUERY_LATENT / 2,
        "q": _QUERY_LATENT,
    },
    "gradient of hidden": {
        "hidden": _TOKENS,
        "gradient of hidden": 3 * _TOKENS,
        "gradient of weights": HIDDEN * (DIRECT * HEADS * _QK + (1 - DIRECT) * Q_LORA) * _W,
    },
}


def _packed(options: Mapping[str, Any]) -> Roles:
    """One all-to-all for all: what is joined, sent and received, beside the tensors it is joined from."""
    shared = options["key_rope"] == "headless"
    parts = _Q + _V + (_LOCAL * (HEADS * NOPE + SP * ROPE) * _W if shared else _K)
    copied = _V + (_LOCAL * HEADS * NOPE * _W if shared else 0)  # parts of a product, where a rank has many heads
    return _sum(
        _BEFORE,
        {
            "latent": _LOCAL * (_LATENT + KV_LORA + ROTARY * ROPE) * _W,
            "q": _QUERY_LATENT + _Q,
            "k and v": _LOCAL * HEADS * (NOPE + VALUE) * _W,
            "k": sympy.S.Zero if shared else _K,
            "q, k and v": _if_one_rank(parts, 2 * parts) + _if_many_heads(copied),
            "collective buffers": _if_one_rank(sympy.S.Zero, parts),
        },
    )


def _sum(*parts: Roles) -> Roles:
    total: Roles = {}
    for part in parts:
        for role, size in part.items():
            total[role] = total.get(role, sympy.S.Zero) + size
    return total


def _options(form: str, kernel: str, given: Mapping[str, Any]) -> dict[str, Any]:
    _, options = resolve_form(form, given)
    if kernel not in KERNELS:
        raise ValueError(f"no closed form of memory for kernel {kernel!r}; there is one for: {', '.join(KERNELS)}")
    _, plain = resolve_form(form, {})
    if form == "laga" and options != plain:
        changed = ", ".join(f"{name}={value!r}" for name, value in options.items() if value != plain[name])
        raise ValueError(f"no closed form of memory for laga({changed}); simulate_memory has its bytes")
    return options


@cache
def _compiled(form: str, kernel: str, key: tuple[tuple[str, Any], ...]) -> dict[str, dict[str, Callable[..., Any]]]:
    options = dict(key)
    wanted = {"saved": saved_roles(form, kernel, **options)}
    wanted |= {moment.name: moment.roles for moment in memory_moments(form, kernel, **options)}
    return {
        name: {
            role: sympy.lambdify(_SYMBOLS, size, modules=["math", {"Max": max, "Min": min}])
            for role, size in roles.items()
        }
        for name, roles in wanted.items()
    }


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
    LAYERS,
    CAUSAL,
    DIRECT,
    ROTARY,
)


def _numbers(functions: Mapping[str, Callable[..., Any]], values: Mapping[sympy.Symbol, int]) -> dict[str, int]:
    arguments = [values[symbol] for symbol in _SYMBOLS]
    sizes = {role: round(function(*arguments)) for role, function in functions.items()}
    return {role: size for role, size in sizes.items() if size}
