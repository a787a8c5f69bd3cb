"""The symbols that the closed forms are written in, and the three things an expression turns into.

A form's cost is one SymPy expression; it is evaluated in Python, typeset in the book and run in a widget, so that the
three cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from sympy.printing.jscode import JavascriptCodePrinter

from ..config import MLAConfig
from ..forms import FORMS, resolve_form
from ..sharding import check_layout


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
HIDDEN = _symbol("hidden_size", "d")
Q_LORA = _symbol("q_lora_rank", "d_q")
CONTEXT = _symbol("context", "R")
NODE = _symbol("ranks_per_node", "N")
ITEMSIZE = _symbol("itemsize", "w")


def check_sizes(
    config: MLAConfig, seq: int, sp: int, batch: int = 1, form: str = "explicit", **form_options: Any
) -> None:
    """Raise ``ValueError`` unless ``sp`` ranks can share ``seq`` tokens and this configuration's heads in this form."""
    if not isinstance(config, MLAConfig):
        raise TypeError(
            f"expected an MLAConfig, got {type(config).__name__}; see MLAConfig.preset and MLAConfig.from_hf"
        )
    _, complete = resolve_form(form, form_options)
    check_counts(**{"sequence parallel degree sp": sp}, seq=seq, batch=batch)
    FORMS[form].check(config, sp, complete)
    check_layout(seq, sp, complete.get("layout", "contiguous"), complete.get("context", 1))


def check_counts(**counts: int) -> None:
    """Raise ``ValueError`` unless each of these is a whole number of at least 1 that a float holds exactly."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if value > 1 << 53:
            raise ValueError(f"{name} must be at most 2^53, got a number of {value.bit_length()} bits")


def substitutions(
    config: MLAConfig, *, seq: int, sp: int, batch: int, dtype: torch.dtype, context: int = 1
) -> dict[sympy.Symbol, int]:
    """Numbers for the symbols of this module."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating torch dtype such as torch.bfloat16, got {dtype!r}")
    values: dict[sympy.Symbol, int] = {SEQ: seq, SP: sp, BATCH: batch, ITEMSIZE: dtype.itemsize, CONTEXT: context}
    for symbol in (HIDDEN, HEADS, NOPE, ROPE, VALUE, KV_LORA, Q_LORA):
        if (value := getattr(config, symbol.name)) is not None:
            values[symbol] = value
    return values


def to_latex(expression: sympy.Expr) -> str:
    """The expression as LaTeX, in the book's notation."""
    return sympy.latex(expression, symbol_names=LATEX)


def to_vega(expression: sympy.Expr, names: Mapping[str, str] | None = None) -> str:
    """The expression as a Vega expression over signals named as its symbols, or as ``names`` maps them."""
    return _VegaPrinter(names or {}).doprint(expression).replace("Math.", "")


class _VegaPrinter(JavascriptCodePrinter):
    """Writes symbols by other names; to put other symbols in would evaluate everything again."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__({"strict": True})
        self.names = names

    def _print_Symbol(self, symbol: sympy.Symbol) -> str:
        return self.names.get(symbol.name, symbol.name)


def larger(*expressions: sympy.Expr | int) -> sympy.Max:
    """The largest of them, without SymPy's search for which that is: it would take most of the time of a choice."""
    return sympy.Max(*expressions, evaluate=False)


def smaller(*expressions: sympy.Expr | int) -> sympy.Min:
    """The smallest of them, as :func:`larger`."""
    return sympy.Min(*expressions, evaluate=False)
