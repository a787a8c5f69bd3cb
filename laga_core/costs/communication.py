"""Closed forms of communication: what one rank sends in one forward.

A form is a list of the tensors it moves, each by a collective; how bytes are counted is the accounting. Under
``"wire"`` a rank sends what other ranks need of what it holds. Under ``"paper"`` (the accounting that yields every cell
of table 1 of the Laga paper) all-to-alls count twice and the all-gather once, without its factor sp - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from ..config import MLAConfig
from ..forms import resolve_form
from .symbols import BATCH, HEADS, ITEMSIZE, KV_LORA, NOPE, ROPE, SEQ, SP, VALUE, check_sizes, substitutions

ACCOUNTINGS: dict[str, dict[str, sympy.Expr]] = {
    # bytes sent for each byte of this rank's shard of the tensor
    "wire": {"all_to_all": (SP - 1) / SP, "all_gather": SP - 1},
    "paper": {"all_to_all": 2 * (SP - 1) / SP, "all_gather": sympy.Integer(1)},
}


@dataclass(frozen=True)
class Transfer:
    """A tensor that a form moves in forward: its name, its collective, and its elements a token."""

    tensor: str
    collective: str
    elements: sympy.Expr

    def bytes_sent(self, accounting: str) -> sympy.Expr:
        """Bytes that one rank sends, as an expression in the symbols of this module."""
        return ACCOUNTINGS[accounting][self.collective] * BATCH * SEQ / SP * self.elements * ITEMSIZE


def transfers(form: str, **form_options: Any) -> list[Transfer]:
    """What a form moves in one forward, in its order; ``ValueError`` for an unknown form or option."""
    _, options = resolve_form(form, form_options)
    return _TRANSFERS[form](**options)


def _explicit(key_rope: str) -> list[Transfer]:
    query = Transfer("query", "all_to_all", HEADS * (NOPE + ROPE))
    if key_rope == "replicated":
        keys = [Transfer("key", "all_to_all", HEADS * (NOPE + ROPE))]
    else:
        keys = [Transfer("key", "all_to_all", HEADS * NOPE), Transfer("rotary key", "all_gather", ROPE)]
    return [query, *keys, Transfer("value", "all_to_all", HEADS * VALUE), _OUTPUT]


def _latent(**_: Any) -> list[Transfer]:
    query = Transfer("query", "all_to_all", HEADS * (NOPE + ROPE))
    return [query, Transfer("latent", "all_gather", KV_LORA + ROPE), _OUTPUT]


_OUTPUT = Transfer("output", "all_to_all", HEADS * VALUE)
_TRANSFERS: dict[str, Callable[..., list[Transfer]]] = {"explicit": _explicit, "absorbed": _latent, "laga": _latent}


def communication_expression(form: str, accounting: str = "wire", **form_options: Any) -> sympy.Expr:
    """Bytes one rank sends in one forward, as one expression."""
    _check_accounting(accounting)
    return sympy.Add(*(transfer.bytes_sent(accounting) for transfer in transfers(form, **form_options)))


@dataclass(frozen=True)
class Communication:
    """Bytes sent by one rank in one forward: in all, by collective, and by tensor."""

    total_bytes: int
    by_collective: dict[str, int]
    by_tensor: dict[str, int]


def communication(
    config: MLAConfig,
    form: str,
    seq: int,
    sp: int,
    accounting: str = "wire",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **form_options: Any,
) -> Communication:
    """Bytes that one rank sends in one forward of ``form`` over a sequence of ``seq`` tokens on ``sp`` ranks.

    Source: the paper's §3.3 and table 1 for ``accounting="paper"``. Backward sends the same again on the wire, an
    all-gather's backward being a reduce-scatter.

    Raises ``ValueError`` for an unknown form, option or accounting, and for sizes that cannot be split evenly.
    """
    _check_accounting(accounting)
    check_sizes(config, seq, sp, batch)
    values = substitutions(config, seq=seq, sp=sp, batch=batch, dtype=dtype)
    by_tensor: dict[str, int] = {}
    by_collective: dict[str, int] = {}
    for transfer in transfers(form, **form_options):
        sent = int(transfer.bytes_sent(accounting).subs(values))
        by_tensor[transfer.tensor] = sent
        by_collective[transfer.collective] = by_collective.get(transfer.collective, 0) + sent
    return Communication(sum(by_tensor.values()), by_collective, by_tensor)


def _check_accounting(accounting: str) -> None:
    if accounting not in ACCOUNTINGS:
        raise ValueError(f"unknown accounting {accounting!r}; known: {', '.join(ACCOUNTINGS)}")
