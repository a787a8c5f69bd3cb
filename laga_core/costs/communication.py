"""Closed forms of communication: what one rank sends in one forward, or in one backward.

A form is a list of the tensors it moves, each by a collective over some of the ranks; how bytes are counted is the
accounting. Under ``"wire"`` a rank sends what other ranks need of what it holds. Under ``"paper"`` (the accounting that
yields every cell of table 1 of the Laga paper) all-to-alls count twice and the all-gather once, without its factor
sp - 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import sympy
import torch

from ..config import MLAConfig
from ..forms import resolve_form
from ..forms.rebuild import STEPS
from .symbols import (
    BATCH,
    CONTEXT,
    HEADS,
    ITEMSIZE,
    KV_LORA,
    NODE,
    NOPE,
    Q_LORA,
    ROPE,
    SEQ,
    SP,
    VALUE,
    check_sizes,
    larger,
    smaller,
    substitutions,
)

ACCOUNTINGS: dict[str, dict[str, sympy.Expr]] = {
    # bytes sent for each byte of this rank's shard of the tensor, by a collective over SP ranks
    "wire": {"all_to_all": (SP - 1) / SP, "all_gather": SP - 1, "reduce_scatter": SP - 1},
    "paper": {"all_to_all": 2 * (SP - 1) / SP, "all_gather": sympy.Integer(1), "reduce_scatter": sympy.Integer(1)},
}
_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Transfer:
    """A tensor that a form moves: its name, its collective, and its elements a token of this rank.

    ``ranks`` take part, each ``stride`` further in rank order than the one before.
    """

    tensor: str
    collective: str
    elements: sympy.Expr
    ranks: sympy.Expr = SP
    stride: sympy.Expr = sympy.S.One

    def bytes_sent(self, accounting: str) -> sympy.Expr:
        """Bytes that one rank sends, as an expression in the symbols of the closed forms."""
        return self.share(accounting) * self._shard

    def share(self, accounting: str) -> sympy.Expr:
        """How many times the bytes of its shard one rank sends."""
        factor = ACCOUNTINGS[accounting][self.collective]
        if self.ranks == SP:
            return factor
        # A part of the ranks may be a single one, which sends nothing.
        return factor.subs(SP, self.ranks) if factor.has(SP) else factor * smaller(1, self.ranks - 1)

    def bytes_between_nodes(self) -> sympy.Expr:
        """Those of the wire bytes that leave the node, where ``ranks_per_node`` neighbours share one."""
        on_node = smaller(self.ranks, larger(1, NODE / self.stride))
        return (self.ranks - on_node) / (self.ranks if self.collective == "all_to_all" else 1) * self._shard

    @property
    def _shard(self) -> sympy.Expr:
        return BATCH * SEQ / SP * self.elements * ITEMSIZE


def transfers(form: str, direction: str = "forward", kernel: str = "tiled", **form_options: Any) -> list[Transfer]:
    """What a form moves in one ``"forward"`` or ``"backward"``; ``ValueError`` for an unknown form or option.

    Of the kernel it matters only whether it takes the row sums of output × gradient, which ``recompute`` sends then.
    """
    if direction not in _DIRECTIONS:
        raise ValueError(f"unknown direction {direction!r}; known: {', '.join(_DIRECTIONS)}")
    _, options = resolve_form(form, form_options)
    moved = _TRANSFERS[form](**options)
    if direction == "forward":
        return moved
    back = [replace(t, collective="reduce_scatter") if t.collective == "all_gather" else t for t in reversed(moved)]
    if options.get("recompute") and kernel in STEPS:
        sums = HEADS * sympy.Max(4, ITEMSIZE) / ITEMSIZE  # one float32 (float64) a head
        back.insert(0, replace(back[0], tensor="row sums", elements=sums))
    return back


def _explicit(key_rope: str, packed: bool) -> list[Transfer]:
    query = Transfer("query", "all_to_all", HEADS * (NOPE + ROPE))
    value = Transfer("value", "all_to_all", HEADS * VALUE)
    if key_rope == "replicated":
        return [query, Transfer("key", "all_to_all", HEADS * (NOPE + ROPE)), value, _OUTPUT]
    key = Transfer("key", "all_to_all", HEADS * NOPE)
    if packed:  # each rank gets the whole of it
        return [query, key, value, Transfer("rotary key", "all_to_all", SP * ROPE), _OUTPUT]
    return [query, key, Transfer("rotary key", "all_gather", ROPE), value, _OUTPUT]


def _absorbed(score: str) -> list[Transfer]:
    return [_QUERY, _LATENT, _OUTPUT]


def _laga(context: int, query: str, **_: Any) -> list[Transfer]:
    """Within groups of U = P/R neighbours, and across R of them."""
    moved = [
        Transfer("query latent", "all_gather", Q_LORA) if query == "latent" else _QUERY,
        _LATENT,
        _OUTPUT,
    ]
    if context == 1:
        return moved
    within = [replace(t, ranks=SP / CONTEXT) for t in moved]
    within[1] = replace(within[1], elements=CONTEXT * _LATENT.elements)
    return [replace(_LATENT, tensor="latent across", ranks=CONTEXT, stride=SP / CONTEXT), *within]


_QUERY = Transfer("query", "all_to_all", HEADS * (NOPE + ROPE))
_LATENT = Transfer("latent", "all_gather", KV_LORA + ROPE)
_OUTPUT = Transfer("output", "all_to_all", HEADS * VALUE)
_TRANSFERS: dict[str, Callable[..., list[Transfer]]] = {"explicit": _explicit, "absorbed": _absorbed, "laga": _laga}


def communication_expression(
    form: str, accounting: str = "wire", direction: str = "forward", kernel: str = "tiled", **form_options: Any
) -> sympy.Expr:
    """Bytes one rank sends in one forward (or backward), as one expression."""
    _check_accounting(accounting)
    return sympy.Add(*(t.bytes_sent(accounting) for t in transfers(form, direction, kernel, **form_options)))


@cache
def crossover_expression() -> sympy.Expr:
    """The degree above one at which explicit and Laga send alike on the wire."""
    difference = sympy.factor(communication_expression("explicit") - communication_expression("laga"))
    (crossover,) = (degree for degree in sympy.solve(difference, SP) if degree != 1)
    return crossover


@dataclass(frozen=True)
class Communication:
    """Bytes sent by one rank in one forward (or backward): in all, by collective, and by tensor.

    ``inter_node_bytes``: those that leave the node, ``None`` where ``ranks_per_node`` was not given.
    """

    total_bytes: int
    by_collective: dict[str, int]
    by_tensor: dict[str, int]
    inter_node_bytes: int | None = None


def communication(
    config: MLAConfig,
    form: str,
    seq: int,
    sp: int,
    accounting: str = "wire",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    direction: str = "forward",
    kernel: str = "tiled",
    ranks_per_node: int | None = None,
    **form_options: Any,
) -> Communication:
    """Bytes that one rank sends in one forward of ``form`` over a sequence of ``seq`` tokens on ``sp`` ranks.

    Source: the paper's §3.3 and table 1 for ``accounting="paper"``. ``direction="backward"`` sends the same again on
    the wire, an all-gather's backward being a reduce-scatter; ``recompute`` may add row sums (``kernel``).
    With ``ranks_per_node``, neighbours in rank order, ``.inter_node_bytes`` says what of the wire bytes leaves a node.

    Raises ``ValueError`` for an unknown form, option or accounting, and for sizes that cannot be split evenly.
    """
    _check_accounting(accounting)
    check_sizes(config, seq, sp, batch, form, **form_options)
    context = form_options.get("context", 1)
    values = substitutions(config, seq=seq, sp=sp, batch=batch, dtype=dtype, context=context)
    by_tensor: dict[str, int] = {}
    by_collective: dict[str, int] = {}
    moved = transfers(form, direction, kernel, **form_options)
    for transfer in moved:
        sent = int(transfer.bytes_sent(accounting).subs(values))
        by_tensor[transfer.tensor] = sent
        by_collective[transfer.collective] = by_collective.get(transfer.collective, 0) + sent
    outside = None
    if ranks_per_node is not None:
        _check_nodes(sp, ranks_per_node)
        outside = sum(int(t.bytes_between_nodes().subs({**values, NODE: ranks_per_node})) for t in moved)
    return Communication(sum(by_tensor.values()), by_collective, by_tensor, outside)


def _check_accounting(accounting: str) -> None:
    if not isinstance(accounting, str) or accounting not in ACCOUNTINGS:
        raise ValueError(f"unknown accounting {accounting!r}; known: {', '.join(ACCOUNTINGS)}")


def _check_nodes(sp: int, ranks_per_node: int) -> None:
    if type(ranks_per_node) is not int or ranks_per_node < 1 or (sp % ranks_per_node and ranks_per_node % sp):
        raise ValueError(
            f"ranks_per_node must be a whole number that divides sp={sp}, or a multiple of it, got {ranks_per_node!r}"
        )
