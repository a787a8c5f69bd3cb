"""The tensors of a layer and their bytes on one rank, from which the closed forms of memory are put together."""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from .symbols import BATCH, HEADS, HIDDEN, ITEMSIZE, KV_LORA, LATEX, NOPE, Q_LORA, ROPE, SEQ, SP, VALUE

Roles = dict[str, sympy.Expr]
"""Role -> bytes."""


def _flag(name: str, latex: str) -> sympy.Symbol:
    symbol = sympy.Symbol(name, nonnegative=True, integer=True)
    LATEX[symbol] = latex
    return symbol


CAUSAL = _flag("causal", r"[\text{causal}]")
DIRECT = _flag("direct_query", r"[\text{no query latent}]")
ROTARY = _flag("rotary", r"[\text{rotary}]")
"""1 or 0: a causal mask, a query projected directly from the hidden state, a rotation."""

ZERO, ONE = sympy.S.Zero, sympy.S.One
W = ITEMSIZE
SUM = sympy.Max(4, W)  # bytes of an element of what is summed in float32 at least
LOCAL, ALL = BATCH * SEQ / SP, BATCH * SEQ  # tokens of this rank, and of all
HERE = HEADS / SP  # heads of this rank
QK, LATENT = NOPE + ROPE, KV_LORA + ROPE  # elements of a head's query or key, and of the latent with the rotary key

TOKENS = LOCAL * HIDDEN * W
Q = LOCAL * HEADS * QK * W  # the query, whether split by tokens or by heads; so for the others
K = Q
V = LOCAL * HEADS * VALUE * W
SCORES = ALL * HERE * SEQ * W
LSE = ALL * HERE * SUM  # one number a row: the logarithm of its sum
QUERY_LATENT = (1 - DIRECT) * 2 * LOCAL * Q_LORA * W  # before and after its norm
OTHERS = (SP - 1) / SP  # of what is gathered, the part that this rank cannot make again by itself

WEIGHTS: sympy.Expr = W * (
    DIRECT * HIDDEN * HEADS * QK
    + (1 - DIRECT) * Q_LORA * (HIDDEN + 1 + HEADS * QK)
    + HIDDEN * LATENT
    + KV_LORA
    + KV_LORA * HEADS * (NOPE + VALUE)
    + HEADS * VALUE * HIDDEN
)
"""Bytes of one layer's weights."""

BEFORE: Roles = {"hidden": TOKENS, "rotary tables": ROTARY * SEQ / SP * ROPE * W}
MATRICES: Roles = {"probabilities": SCORES, "causal mask": CAUSAL * SEQ**2}

FLOOR: Roles = {
    "hidden": TOKENS,
    "latent": OTHERS * ALL * LATENT * W,
    "q": sympy.Min(Q, OTHERS * ALL * Q_LORA * W + DIRECT * Q),
    "output": V,
}
"""What any exact method has to keep for each layer if its backward does not send again what forward sent. Each is the
least form of something that backward multiplies by: ``hidden``, from which this rank's own latents follow; the other
ranks' ``latent``, from which keys and values are rebuilt; the query of this rank's heads, or the others' query latents
it is built from (``q``), whichever is smaller; the ``output`` for the gradient of the last projection.
``laga(query="latent", recompute=True)`` keeps just that. Below it, only hidden is indispensable, at the price of the
whole forward again with its communication."""


@dataclass(frozen=True)
class Case:
    """A form under a kernel: what one layer saves, and what it holds at the moments that may be the peak.

    ``moments`` have all but weights, their gradients, and what other layers save.
    """

    saved: Roles
    moments: dict[str, Roles]


def add(*parts: Roles) -> Roles:
    """Role by role."""
    total: Roles = {}
    for part in parts:
        for role, size in part.items():
            total[role] = total.get(role, ZERO) + size
    return total


def if_one(count: sympy.Expr, one: sympy.Expr, more: sympy.Expr) -> sympy.Expr:
    """``one`` where ``count`` is 1, else ``more``."""
    return one if count == 1 else sympy.Piecewise((more, sympy.Ne(count, 1)), (one, True))
