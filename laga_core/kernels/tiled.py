"""Exact attention in memory linear in the sequence, in plain PyTorch: any device, any head sizes.

Scores are formed one tile at a time (online softmax), and once more in backward from the log-sum-exp kept by forward
(Rabe & Staats 2021; Dao et al. 2022). Tiles above the causal diagonal are never touched. Sums are kept in float32
(float64 for float64 inputs); products run in the input's dtype, where the matrix units are fast, and on a CPU that has
none for half precision in float32.

A product in half precision is rounded as it is written, and the exponential turns that into an error of |score| * eps
in every probability. So such scores are written with the row's maximum (in backward: its log-sum-exp) already
subtracted by the product: then the scores that matter are the small ones, and small numbers are rounded finely.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import products

_LOG2E = math.log2(math.e)

# A tile holds this many scores: on a CPU as much as stays in cache, on an accelerator as much as keeps it busy. MKL
# gives each thread whole matrices of a tile, so it likes more of them.
_TILE_MKL, _TILE_ONEDNN, _TILE_ACCELERATOR = 1 << 20, 1 << 19, 1 << 26
_ROWS, _KEYS = 512, 512
# Rows of a tile at the causal diagonal, where half of a tile is computed in vain; few of them cost calls.
_DIAGONAL, _DIAGONAL_MKL = 256, 128
_AVX512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
    """See :func:`laga_core.kernels.attention`. Keeps q, k, v, the output and one number a row for backward."""
    return _Tiled.apply(q, k, v, scale, causal)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, lse = forward(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return *backward(dout, q, k, v, row_sums(out, dout), lse, ctx.scale, ctx.causal), None, None


@torch.no_grad()
def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention, and the logarithm to base 2 of each row's softmax denominator.

    Shapes as in :func:`laga_core.kernels.attention`. Returns out ``[batch, s_q, heads, dim_v]`` in the dtype of q and
    lse ``[batch, s_q, heads]`` in float32 (float64 for float64). Nothing is recorded for autograd.
    """
    plan = _Plan.of(q, k, causal)
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = q.new_empty(*q.shape[:3], 1, dtype=_sum_dtype(q))
    tiles = _Scratch(plan, q)
    for batch, heads, kv_heads in plan.parts():
        mine, keys = (batch, slice(None), heads), (batch, slice(None), kv_heads)
        _forward_part(plan, tiles, q[mine], k[keys], v[keys], out[mine], lse[mine], scale * _LOG2E)
    return out, lse.squeeze(-1)


@torch.no_grad()
def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, from the ``lse`` of :func:`forward` and the ``delta`` of :func:`row_sums`."""
    plan = _Plan.of(q, k, causal)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta, peak = delta.unsqueeze(-1), lse.unsqueeze(-1)
    tiles = _Scratch(plan, q)
    for batch, heads, kv_heads in plan.parts():
        mine, keys = (batch, slice(None), heads), (batch, slice(None), kv_heads)
        rows = (q[mine], dout[mine], peak[mine], delta[mine])
        _backward_part(plan, tiles, rows, (k[keys], v[keys]), dq[mine], dk[keys], dv[keys], scale)
    return dq, dk, dv


@torch.no_grad()
def row_sums(out: Tensor, dout: Tensor) -> Tensor:
    """``sum(out * dout)`` over dim_v, ``[batch, s_q, heads]``, in float32 (float64): what backward needs of ``out``."""
    sums = out.new_empty(out.shape[:3], dtype=_sum_dtype(out))
    for first, last in _cut(0, out.shape[1], _ROWS):
        rows = slice(first, last)
        sums[:, rows] = (out[:, rows].to(sums.dtype) * dout[:, rows]).sum(-1)
    return sums


def _forward_part(
    plan: _Plan, tiles: _Scratch, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> None:
    groups = k.shape[2]
    q, k, v = (_matrices(x, groups) for x in (q, k, v))
    for first, last in plan.row_blocks():
        shape = (len(q), (last - first) * plan.sharing)
        peak = q.new_full((*shape, 1), -math.inf)  # about the highest score so far, as a power of two
        total = q.new_zeros(*shape, 1, dtype=lse.dtype)  # sum of 2^(score - peak)
        mean = q.new_zeros(*shape, v.shape[-1], dtype=lse.dtype)  # sum of 2^(score - peak) * value
        for tile in plan.tiles(first, last):
            here, keys = plan.rows(tile, first), slice(tile.start, tile.stop)
            operands = _rows(q, plan.rows(tile)), _rows(k, keys)
            scores = tiles.scores(tile, *operands, scale)
            new_peak = torch.maximum(peak[:, here], scores.amax(-1, keepdim=True).to(peak.dtype))
            scores = tiles.scores(tile, *operands, scale, minus=new_peak) if tiles.half else scores.sub_(new_peak)
            weights = scores.exp2_()
            fade = peak[:, here].to(lse.dtype).sub(new_peak).exp2_()
            peak[:, here] = new_peak
            total[:, here].mul_(fade).add_(weights.sum(-1, keepdim=True))
            _add_product(mean[:, here].mul_(fade), tiles.narrow(weights), _rows(v, keys))
        _store(mean.div_(total), out[:, first:last], groups)
        _store(total.log2_().add_(peak), lse[:, first:last], groups)


def _backward_part(
    plan: _Plan,
    tiles: _Scratch,
    rows: tuple[Tensor, ...],
    keys: tuple[Tensor, ...],
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    scale: float,
) -> None:
    groups = dk.shape[2]
    q, dout, peak, delta = (_matrices(x, groups) for x in rows)
    k, v = (_matrices(x, groups) for x in keys)
    in_place = len(dk) == 1 and dk.dtype == peak.dtype and _use_mkl(dk)  # products add to the results where they lie
    if in_place:
        k_sum, v_sum = (_matrices(x, groups).zero_() for x in (dk, dv))
    else:
        k_sum, v_sum = (torch.zeros_like(x, dtype=peak.dtype) for x in (k, v))
    for first, last in plan.row_blocks():
        q_sum = q.new_zeros(len(q), (last - first) * plan.sharing, q.shape[-1], dtype=peak.dtype)
        for tile in plan.tiles(first, last):
            block, near = plan.rows(tile), slice(tile.start, tile.stop)
            tq, tdout, tk, tv = _rows(q, block), _rows(dout, block), _rows(k, near), _rows(v, near)
            weights = tiles.scores(tile, tq, tk, scale * _LOG2E, minus=peak[:, block])
            weights.clamp_(max=0).exp2_()  # no more than 1, however large the numbers whose difference this is
            _add_product(v_sum[:, near], tiles.narrow(weights).mT, tdout)
            dweights = tiles.product(1, tdout, tv, minus=delta[:, block])
            dscores = tiles.narrow(weights.mul_(dweights))
            _add_product(q_sum[:, plan.rows(tile, first)], dscores, tk)
            _add_product(k_sum[:, near], dscores.mT, tq)
        _store(q_sum.mul_(scale), dq[:, first:last], groups)
    k_sum.mul_(scale)
    if not in_place:
        _store(k_sum, dk, groups)
        _store(v_sum, dv, groups)


class _Tile(NamedTuple):
    """Positions first..last of q against positions start..stop of k; ``masked``: the diagonal ends in its corner."""

    first: int
    last: int
    start: int
    stop: int
    masked: bool


@dataclass(frozen=True)
class _Plan:
    """What is computed together, and in which order."""

    batch: int
    groups: int  # kv heads
    sharing: int  # heads that share a kv head; their rows, position by position, form one matrix
    s_q: int
    s_k: int
    causal: bool
    matrices: int  # batch * groups in one tile
    positions: int  # of q in one tile
    keys: int  # in one tile
    diagonal: int  # rows of a tile at the diagonal

    @classmethod
    def of(cls, q: Tensor, k: Tensor, causal: bool) -> _Plan:
        batch, s_q, heads, _ = q.shape
        _, s_k, groups, _ = k.shape
        sharing = heads // groups
        mkl = _use_mkl(q)
        tile = _TILE_MKL if mkl else _TILE_ONEDNN if products.on_cpu(q) else _TILE_ACCELERATOR
        diagonal = _DIAGONAL_MKL if mkl else _DIAGONAL
        keys = min(_KEYS, s_k)
        matrices = 1 if _use_linear(q) else max(1, min(batch * groups, tile // (keys * min(_ROWS, s_q * sharing))))
        positions = max(1, min(s_q, tile // (keys * matrices * sharing)))
        return cls(batch, groups, sharing, s_q, s_k, causal, matrices, positions, keys, diagonal)

    def parts(self) -> Iterator[tuple[slice, slice, slice]]:
        """Slices of the batch, the heads of q and the heads of k and v."""
        batches, groups = max(1, self.matrices // self.groups), min(self.matrices, self.groups)
        for b in _cut(0, self.batch, batches):
            for first, last in _cut(0, self.groups, groups):
                yield slice(*b), slice(first * self.sharing, last * self.sharing), slice(first, last)

    def row_blocks(self) -> Iterator[tuple[int, int]]:
        return _cut(0, self.s_q, self.positions)

    def tiles(self, first: int, last: int) -> Iterator[_Tile]:
        """Cover what positions first..last of q can see."""
        visible = self.s_k - self.s_q + first if self.causal else self.s_k  # to each of them
        for start, stop in _cut(0, visible, self.keys):
            yield _Tile(first, last, start, stop, False)
        if self.causal:
            step = max(1, self.diagonal // self.sharing)
            for row, end in _cut(first, last, step):
                yield _Tile(row, end, visible, visible + end - first, True)

    def rows(self, tile: _Tile, first: int = 0) -> slice:
        """The tile's rows in a matrix that begins at position ``first``."""
        return slice((tile.first - first) * self.sharing, (tile.last - first) * self.sharing)


class _Scratch:
    """The memory of a tile, used again and again, and the products written to it."""

    def __init__(self, plan: _Plan, q: Tensor) -> None:
        narrow, wide = _product_dtype(q), _sum_dtype(q)
        size = plan.matrices * plan.positions * plan.sharing * max(plan.keys, plan.diagonal // plan.sharing, 1)
        self.sharing = plan.sharing
        self.half = narrow != wide
        self._own = not _use_linear(q)
        self._wide = [q.new_empty(size if self._own else 0, dtype=wide) for _ in range(2)]
        self._narrow = q.new_empty(size if self.half else 0, dtype=narrow)
        self._corner = q.new_full((plan.diagonal, plan.diagonal), -math.inf, dtype=wide).triu_(1)

    def scores(self, tile: _Tile, q: Tensor, k: Tensor, scale: float, minus: Tensor | None = None) -> Tensor:
        """``scale * q k^T - minus``, and minus infinity where q may not see k."""
        scores = self.product(0, q, k, scale, minus)
        if tile.masked:
            n = tile.last - tile.first
            corner = scores.unflatten(1, (n, self.sharing))[..., -n:]
            corner.add_(self._corner[:n, None, :n])
        return scores

    def product(self, which: int, a: Tensor, b: Tensor, scale: float = 1.0, minus: Tensor | None = None) -> Tensor:
        """``scale * a b^T - minus`` in the wide dtype, in scratch memory ``which`` (0 or 1)."""
        shape = (len(a), a.shape[1], b.shape[1])
        if not self._own:
            wide = _linear(a, b).mul_(scale)
            return wide if minus is None else wide.sub_(minus)
        wide = _view(self._wide[which], shape)
        out = _view(self._narrow, shape) if self.half else wide
        if minus is None:
            out.baddbmm_(a, b.mT, beta=0, alpha=scale)
            return wide.copy_(out) if self.half else out
        shift = minus.to(out.dtype)
        torch.baddbmm(shift, a, b.mT, beta=-1, alpha=scale, out=out)
        if self.half:
            wide.copy_(out)
            if minus.dtype != shift.dtype:
                wide.sub_(minus - shift)
        return wide

    def narrow(self, wide: Tensor) -> Tensor:
        """``wide`` in the dtype of the products; good until the next product."""
        return _view(self._narrow, wide.shape).copy_(wide) if self.half else wide


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """``total += a b``."""
    if _use_linear(a):
        total.add_(_linear(a, b.mT))
    elif total.dtype == a.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))


def _use_mkl(x: Tensor) -> bool:
    """Whether the products of ``x`` go to MKL, which takes matrices with any distance between rows."""
    return products.on_cpu(x) and _product_dtype(x).itemsize >= 4 and not _use_linear(x)


def _use_linear(x: Tensor) -> bool:
    """float32 on a CPU would go to MKL, which leaves AVX-512 unused on other vendors' machines; oneDNN does not."""
    fits = _product_dtype(x) == torch.float32 and products.on_cpu(x)
    return fits and _AVX512 and torch.backends.mkldnn.is_available()


def _linear(a: Tensor, b: Tensor) -> Tensor:
    """``a b^T`` of single matrices by oneDNN, with the precision of any float32 product."""
    return torch.ops.mkldnn._linear_pointwise(a[0], b[0], None, "none", [], "").unsqueeze(0)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """Rows of every matrix. oneDNN wants them as a whole tensor lies in memory, or copies them each time."""
    x = x[:, rows]
    if _use_mkl(x) or not products.on_cpu(x):
        return x
    return x.squeeze(0).unsqueeze(0) if len(x) == 1 else x.contiguous()


def _view(flat: Tensor, shape: torch.Size | tuple[int, ...]) -> Tensor:
    return flat[: math.prod(shape)].view(shape)


def _matrices(x: Tensor, groups: int) -> Tensor:
    """``[batch, seq, groups * n, dim]`` -> ``[batch * groups, seq * n, dim]``, as the products want it.

    In their dtype, and in memory of its own unless MKL can take it where it lies.
    """
    x = x.unflatten(2, (groups, -1)).transpose(1, 2)  # [batch, groups, seq, n, dim]
    x = x.to(_product_dtype(x)).reshape(x.shape[0] * groups, -1, x.shape[-1])
    return x if _use_mkl(x) else x.contiguous()


def _store(x: Tensor, target: Tensor, groups: int) -> None:
    """The inverse of :func:`_matrices`, written into ``target``."""
    target = target.unflatten(2, (groups, -1)).transpose(1, 2)
    target.copy_(x.view(target.shape))


def _cut(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Pieces of ``start..stop``, each ``step`` long but for the last."""
    return ((first, min(first + step, stop)) for first in range(start, stop, step))


def _product_dtype(x: Tensor) -> torch.dtype:
    return _sum_dtype(x) if products.slow(x) else x.dtype


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
