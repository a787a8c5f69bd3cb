"""Closed forms as the book prints them: the costs' own expressions, each in an arrangement that reads well.

Every function gives a :class:`Formula`. Its expression comes from the cost model; the arrangement (which factors stand
together, and in which order) is chosen here, and is refused unless it equals that expression. So no page can show a
formula that the code does not compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from ..config import MLAConfig
from .communication import communication_expression, crossover_expression, transfers
from .memory import memory_values, saved_roles
from .symbols import BATCH, HEADS, ITEMSIZE, KV_LORA, LATEX, ROPE, SEQ, SP

Values = Mapping[sympy.Symbol, int]
_TOKENS = BATCH * SEQ / SP  # of one rank


@dataclass(frozen=True)
class Formula:
    """``name`` equals the sum of ``terms``, each a product of factors in the order in which they are printed.

    Raises ``ValueError`` unless that sum is ``expression``.
    """

    name: str
    expression: sympy.Expr
    terms: Sequence[Sequence[sympy.Expr]]

    def __post_init__(self) -> None:
        arranged = sympy.Add(*(sympy.Mul(*factors) for factors in self.terms))
        if sympy.simplify(arranged - self.expression) != 0:
            raise ValueError(f"{self.name}: the arrangement {arranged} is not the expression {self.expression}")

    @property
    def right(self) -> str:
        """The right-hand side as LaTeX, on one line."""
        return " + ".join(_product(term) for term in self.terms)

    def equation(self, values: Values | None = None) -> str:
        """The equation as LaTeX, a line for each term; with ``values`` a last line has the numbers and the result."""
        first, *more = (_product(term) for term in self.terms)
        lines = [rf"{self.name} &= {first}", *(f"& + {term}" for term in more)]
        if values is not None:
            numbers = " + ".join(_product(term, values) for term in self.terms)
            lines.append(rf"&= {numbers} = {self._result(values)}")
        if len(lines) == 1:
            return lines[0].replace("&", "")
        return r"\begin{aligned} " + r" \\ ".join(lines) + r" \end{aligned}"

    def _result(self, values: Values) -> str:
        number = float(self.expression.subs(values))
        if not self.expression.has(ITEMSIZE):
            return f"{number:,.2f}".removesuffix(".00").replace(",", r"\,")
        size, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")) if number >= pair[0]), (1, "bytes"))
        return rf"{number / size:.3g}\ \text{{{unit}}}"

    def _repr_latex_(self) -> str:
        return f"$$ {self.equation()} $$"


def sent(form: str, accounting: str = "wire", **form_options: Any) -> Formula:
    """Bytes that one rank sends in one forward: a term for each kind of collective."""
    expression = communication_expression(form, accounting, **form_options)
    grouped: dict[sympy.Expr, sympy.Expr] = {}
    for transfer in transfers(form, **form_options):
        share = sympy.factor_terms(sympy.together(transfer.share(accounting)))
        grouped[share] = grouped.get(share, sympy.S.Zero) + transfer.elements
    terms = [(share, _TOKENS, _by_head(elements), ITEMSIZE) for share, elements in grouped.items()]
    return Formula(r"\text{bytes}", expression, terms)


def token_elements(form: str, **form_options: Any) -> Formula:
    """Elements that one rank sends for each of its own tokens, on the wire."""
    whole = sent(form, **form_options)
    terms = [(share, elements) for share, _, elements, _ in whole.terms]
    return Formula(r"\text{elements}", sympy.cancel(whole.expression / _TOKENS / ITEMSIZE), terms)


def crossover() -> Formula:
    """The degree at which explicit and Laga send alike on the wire."""
    expression = crossover_expression()
    return Formula("P", expression, [(sympy.factor(expression),)])


def score_matrix() -> Formula:
    """Bytes of one number for each head, query and key, on one rank."""
    matrix = saved_roles("explicit", "eager")["probabilities"]
    return Formula(r"\text{bytes}", matrix, [(HEADS / SP, BATCH * SEQ**2, ITEMSIZE)])


def absorbed_query(score: str = "split") -> Formula:
    """Bytes of the absorbed query on one rank; joint scores have its rotary band in it."""
    width = KV_LORA + (ROPE if score == "joint" else 0)
    kept = saved_roles("absorbed", "eager", score=score)["q_absorbed"]
    return Formula(r"\text{bytes}", kept, [(HEADS / SP, BATCH * SEQ, width, ITEMSIZE)])


def gathered_latent() -> Formula:
    """Bytes of the whole sequence's latent and rotary key, which absorbed and Laga have on every rank."""
    (latent,) = (transfer for transfer in transfers("laga") if transfer.collective == "all_gather")
    shard = latent.bytes_sent("wire") / latent.share("wire")
    return Formula(r"\text{bytes}", SP * shard, [(BATCH * SEQ, latent.elements, ITEMSIZE)])


def numbers(model: str, seq: int, sp: int, batch: int = 1) -> Values:
    """What the symbols stand for at a preset's dimensions, in bf16."""
    return memory_values(MLAConfig.preset(model), seq=seq, sp=sp, batch=batch)


def _by_head(elements: sympy.Expr) -> sympy.Expr:
    return sympy.factor_terms(sympy.collect(sympy.expand(elements), HEADS))


def _product(factors: Sequence[sympy.Expr], values: Values | None = None) -> str:
    if values is None:
        names, times = LATEX, r" \cdot " if len(factors) > 2 else r" \, "
    else:
        names = {symbol: f"{value:,}".replace(",", r"\,") for symbol, value in values.items()}
        times = r" \times "
        factors = [factor.subs({symbol: 1 for symbol, value in values.items() if value == 1}) for factor in factors]
    shown = [factor for factor in factors if factor != 1] or [sympy.S.One]
    return times.join(_factor(factor, names, values is not None, len(shown) > 1) for factor in shown)


def _factor(factor: sympy.Expr, names: Mapping[sympy.Symbol, str], times: bool, bracketed: bool) -> str:
    text = sympy.latex(factor, symbol_names=names, mul_symbol="times" if times else None)
    return rf"\left({text}\right)" if factor.is_Add and bracketed else text
