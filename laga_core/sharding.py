"""Where the tokens of a sequence lie: layouts over the ranks, and the helpers that give and take them.

*Contiguous*: shards are contiguous and in rank order. *Zigzag*: for ``context`` = R groups of ranks the sequence is cut
into 2 R pieces, and group r holds pieces r and 2 R - 1 - r, so that under a causal mask every group has the same work.
Within a group the tokens are shared out contiguously. At R = 1 both are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .parallel import degree, gather_sequence, split_degree
from .parallel.agreement import agree

LAYOUTS = ("contiguous", "zigzag")


class TokenOrder:
    """The tokens of a whole sequence in the order in which the ranks hold them.

    ``pieces`` are runs of neighbours: a token's number in a piece is its place when all tokens are sorted by position.
    ``positions`` are the tokens' global positions, ``[seq]``, where these are more than the places.
    """

    def __init__(self, pieces: Sequence[range], positions: Tensor | None = None) -> None:
        self.pieces: list[range] = []
        for piece in pieces:
            if self.pieces and self.pieces[-1].stop == piece.start:
                piece = range(self.pieces.pop().start, piece.stop)
            self.pieces.append(piece)
        self._positions = positions

    @staticmethod
    @lru_cache(maxsize=16)
    def of_layout(seq: int, layout: str = "contiguous", context: int = 1) -> TokenOrder:
        """The order of a layout. Raises ``ValueError`` as :func:`check_layout` does."""
        check_layout(seq, context, layout, context)
        if layout == "contiguous" or context == 1:
            pieces = [range(seq)]
        else:
            size = seq // (2 * context)
            cut = [range(i * size, (i + 1) * size) for i in range(2 * context)]
            pieces = [piece for r in range(context) for piece in (cut[r], cut[-1 - r])]
        return TokenOrder(pieces)

    @staticmethod
    def of_positions(positions: Tensor) -> TokenOrder:
        """The order of arbitrary ``positions`` ``[seq]``; ``ValueError`` where two are equal."""
        if len(positions.unique()) < len(positions):
            raise ValueError(
                "positions repeat: they are global, no two tokens of the whole sequence share one; "
                "for contiguous shards rank r's begin at r * seq/sp (the default)"
            )
        places = positions.argsort(stable=True).argsort().tolist()
        starts = [i for i, place in enumerate(places) if i == 0 or place != places[i - 1] + 1]
        ends = [*starts[1:], len(places)]
        pieces = [range(places[a], places[a] + b - a) for a, b in zip(starts, ends, strict=True)]
        return TokenOrder(pieces, positions)

    @property
    def in_order(self) -> bool:
        """Whether the ranks hold the tokens sorted by position."""
        return len(self.pieces) == 1

    @property
    def positions(self) -> Tensor:
        """Global positions of the tokens, ``[seq]`` int64."""
        return _concatenated(self.pieces) if self._positions is None else self._positions

    @property
    def sorting(self) -> Tensor:
        """``x[:, sorting]`` has the tokens sorted by position, ``[seq]``."""
        starts = [0]
        for piece in self.pieces:
            starts.append(starts[-1] + len(piece))
        ranked = sorted(zip(self.pieces, starts, strict=False), key=lambda pair: pair[0].start)
        return _concatenated([range(start, start + len(piece)) for piece, start in ranked])

    def runs(self, first: int, last: int) -> list[Run]:
        """The runs of neighbours among tokens ``first`` to ``last`` (exclusive), rows counted from ``first``."""
        found, start = [], 0
        for piece in self.pieces:
            a, b = max(first, start), min(last, start + len(piece))
            if a < b:
                found.append(Run(slice(a - first, b - first), piece[b - 1 - start] + 1))
            start += len(piece)
        return found


@dataclass(frozen=True)
class Run:
    """Neighbouring queries: their ``rows``, and how many keys, from the first on, the last of them sees."""

    rows: slice
    keys: int


def check_layout(seq: int, sp: int, layout: str, context: int) -> None:
    """Raise ``ValueError`` unless a sequence of ``seq`` tokens can be laid out so over ``sp`` ranks."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    split_degree(sp, context)
    if seq % sp:
        raise ValueError(f"seq={seq} cannot be split evenly over sp={sp} ranks; pad it to {-(-seq // sp) * sp}")
    if layout == "zigzag" and context > 1 and seq % (2 * context):
        raise ValueError(
            f"layout='zigzag' cuts the sequence into 2 * context = {2 * context} equal pieces, which seq={seq} is not "
            f"a multiple of; pad it, or use layout='contiguous'"
        )


def sequence_positions(seq: int, layout: str = "contiguous", context: int = 1) -> Tensor:
    """Global positions of the tokens in the order in which the ranks hold them, ``[seq]`` int64.

    Rank i of sp holds the i-th of sp equal parts. Raises ``ValueError`` for an unknown layout or sizes that do not fit.
    """
    return TokenOrder.of_layout(seq, layout, context).positions


def shard_sequence(
    x: Tensor, group: ProcessGroup | None, *, layout: str = "contiguous", context: int = 1, dim: int = 1
) -> Tensor:
    """This rank's tokens of ``x``, which holds the whole sequence along ``dim``; any shape, any dtype.

    Nothing is communicated. Raises ``ValueError`` for an unknown layout or a sequence that cannot be split so.
    """
    seq, sp = x.shape[dim], degree(group)
    check_layout(seq, sp, layout, context)
    rank = 0 if group is None else dist.get_rank(group)
    mine = TokenOrder.of_layout(seq, layout, context).positions[rank * seq // sp : (rank + 1) * seq // sp]
    return x.index_select(dim, mine.to(x.device))


def unshard_sequence(
    x: Tensor, group: ProcessGroup | None, *, layout: str = "contiguous", context: int = 1, dim: int = 1
) -> Tensor:
    """The inverse of :func:`shard_sequence`: every rank's tokens gathered and put in order, on every rank.

    The backward of the gather is a reduce-scatter: gradients of all ranks are summed. Raises ``ValueError`` as above,
    and where the ranks' shapes, dtypes or layouts differ, on every rank before any data moves.
    """
    problem = None
    try:
        check_layout(x.shape[dim] * degree(group), degree(group), layout, context)
    except (ValueError, TypeError, IndexError, AttributeError) as error:
        problem = f"cannot gather along dim={dim!r} of {_in_words(x)}: {error}"
    meant = {"dim": str(dim), "layout": str(layout), "context": str(context)}
    agree({"part": _in_words(x), **meant}, problem, group, getattr(x, "device", torch.device("cpu")))
    seq = x.shape[dim] * degree(group)
    order = TokenOrder.of_layout(seq, layout, context)
    rows = x.movedim(dim, 0).unsqueeze(0)  # [1, seq/sp, ...]
    whole = gather_sequence(rows.flatten(2) if x.dim() > 1 else rows.unsqueeze(-1), group)  # [1, seq, ...]
    whole = whole.view(seq, *rows.shape[2:])
    if not order.in_order:
        whole = whole.index_select(0, order.sorting.to(x.device))
    return whole.movedim(0, dim)


def _in_words(x: object) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def _concatenated(pieces: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(piece.start, piece.stop, device="cpu") for piece in pieces])
