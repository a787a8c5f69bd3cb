"""What the tiled kernel holds while it runs, on an accelerator: its own choice of blocks, as closed forms."""

from __future__ import annotations

import sympy

from ..kernels import tiled
from .symbols import BATCH, KV_LORA, SEQ, VALUE, larger, smaller
from .tensors import CAUSAL, HERE, LATENT, LSE, ONE, QK, SUM, ZERO, W, if_one

_HALF = sympy.Piecewise((W, sympy.Lt(W, 4)), (0, True))  # bytes of a product in half precision, where there are any


def per_head(heads: sympy.Expr, rows: sympy.Expr, alone: sympy.Expr = ZERO) -> sympy.Expr:
    """Workspace over ``heads`` with keys of their own, for ``rows`` queries of each sequence.

    They are laid out head by head first; of a single head only ``alone`` bytes of each row are.
    """
    copies = rows * ((QK + VALUE) * W + 2 * SUM) + SEQ * (QK + VALUE) * W
    copies = if_one(heads, rows * alone, copies)
    return _workspace(heads, ONE, rows, (QK, VALUE), copies) + 2 * BATCH * heads * rows * SUM


def shared() -> sympy.Expr:
    """Workspace over a rank's heads that share the latent as key and value."""
    copies = SEQ * KV_LORA * W + if_one(HERE, ZERO, SEQ * HERE * KV_LORA * W)
    return _workspace(ONE, HERE, SEQ, (LATENT, KV_LORA), copies) + 2 * LSE


def _workspace(
    groups: sympy.Expr, sharing: sympy.Expr, rows: sympy.Expr, widths: tuple[sympy.Expr, sympy.Expr], copies: sympy.Expr
) -> sympy.Expr:
    """Most that backward holds besides its operands and results: tiles, copies of operands, and sums in float32.

    ``groups`` matrices of keys for each sequence, each with the rows of ``sharing`` heads; ``widths`` of key and value;
    ``copies``: bytes of the operands of one matrix that have to be laid out anew.
    """
    scores, keys = tiled._TILE_ACCELERATOR, smaller(tiled._KEYS, SEQ)
    matrices = _within(scores, keys * smaller(tiled._ROWS, rows * sharing), BATCH * groups)
    positions = _within(scores, keys * matrices * sharing, rows)
    part = larger(1, sympy.floor(matrices / groups)) * smaller(matrices, groups)
    size = part * positions * sharing * larger(keys, tiled._DIAGONAL / sharing)
    scratch = size * (2 * SUM + _HALF) + tiled._DIAGONAL**2 * SUM
    # The query's sum for the next block of rows is begun before the last one is let go. And the longest product in half
    # precision has a block's rows, at the diagonal of a causal mask a block's keys.
    query, block = (part * length * sharing * widths[0] for length in (rows, positions))
    product = part * positions * widths[0] * (CAUSAL + (1 - CAUSAL) * sharing) * _HALF
    query_sums = larger(smaller(query, 2 * block) * SUM, block * SUM + product)
    return scratch + part * copies + part * SEQ * sum(widths) * SUM + query_sums


def _within(total: int, each: sympy.Expr, most: sympy.Expr) -> sympy.Expr:
    """How many of ``each`` go into ``total``: at least one, at most ``most``."""
    return larger(1, smaller(most, sympy.floor(total / each)))
