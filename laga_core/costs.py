"""Closed forms, written once in SymPy: the same expression is evaluated here, typeset in the book, and run in a widget.

Communication: what one rank sends in one forward. A form is a list of the tensors it moves, each by a collective; how
bytes are counted is the accounting. Under ``"wire"`` a rank sends what other ranks need of what it holds. Under
``"paper"`` (table 1 of the Laga paper, found from its cells) all-to-alls count twice and the all-gather once, without
its factor sp - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.printing.jscode import JavascriptCodePrinter

from .config import MLAConfig
from .forms import resolve_form


def _symbol(name: str, latex: str) -> sympy.Symbol:
    symbol = sympy.Symbol(name, positive=True, integer=True)
    LATEX[symbol] = latex
    return symbol


LATEX: dict[sympy.Symbol, str] = {}
"""How each symbol is typeset."""

SEQ = _symbol("seq", "S")
SP = _symbol("sp", "P")
BATCH = _symbol("batch", "B")
HEADS = _symbol("num_attention_heads", "n_h")
NOPE = _symbol("qk_nope_head_dim", r"d_\text{nope}")
ROPE = _symbol("qk_rope_head_dim", r"d_\text{rope}")
VALUE = _symbol("v_head_dim", "d_v")
KV_LORA = _symbol("kv_lora_rank", "d_{kv}")
ITEMSIZE = _symbol("itemsize", "w")

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


def check_sizes(config: MLAConfig, seq: int, sp: int, batch: int = 1) -> None:
    """Raise ``ValueError`` unless ``sp`` ranks can share ``seq`` tokens and this configuration's heads evenly."""
    if not isinstance(config, MLAConfig):
        raise TypeError(
            f"expected an MLAConfig, got {type(config).__name__}; see MLAConfig.preset and MLAConfig.from_hf"
        )
    config.check_degree(sp)
    for name, value in (("seq", seq), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if seq % sp:
        raise ValueError(f"seq={seq} cannot be split evenly over sp={sp} ranks; pad it to {-(-seq // sp) * sp}")


def substitutions(config: MLAConfig, *, seq: int, sp: int, batch: int, dtype: torch.dtype) -> dict[sympy.Symbol, int]:
    """Numbers for the symbols of this module."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch dtype, got {dtype!r}")
    values: dict[sympy.Symbol, int] = {SEQ: seq, SP: sp, BATCH: batch, ITEMSIZE: dtype.itemsize}
    for symbol in (HEADS, NOPE, ROPE, VALUE, KV_LORA):
        values[symbol] = getattr(config, symbol.name)
    return values


def to_latex(expression: sympy.Expr) -> str:
    """The expression as LaTeX, in the book's notation."""
    return sympy.latex(expression, symbol_names=LATEX)


def to_vega(expression: sympy.Expr, names: Mapping[str, str] | None = None) -> str:
    """The expression as a Vega expression over signals named as its symbols, or as ``names`` maps them."""
    renamed = expression.subs({symbol: sympy.Symbol((names or {}).get(symbol.name, symbol.name)) for symbol in LATEX})
    return JavascriptCodePrinter({"strict": True}).doprint(renamed).replace("Math.", "")


def _check_accounting(accounting: str) -> None:
    if accounting not in ACCOUNTINGS:
        raise ValueError(f"unknown accounting {accounting!r}; known: {', '.join(ACCOUNTINGS)}")
