"""Attention from latents: keys and values (and queries) built some heads at a time, kept for backward or built again.

A rank has the latent of all tokens, sorted by position, and attends from the rows of its own queries. Rows that are
neighbours in the sequence form a run, and a run sees a prefix of the keys: so a causal mask stays the kernel's own,
whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from ..config import MLAConfig
from ..kernels import attention, tiled
from ..kernels.products import linear
from ..parallel import degree
from ..parallel.collectives import scatter_heads, scatter_sequence
from ..rotary import rotary_tables, rotate
from ..sharding import Run
from .projections import Attend, join_key, keys_and_values


@dataclass(frozen=True)
class Rebuild:
    """How a rank gets from latents to attention: ``rows`` queries from token ``first``, ``chunk`` heads at a time."""

    config: MLAConfig
    attention: Attend
    first: int
    rows: int
    chunk: int

    def chunks(self, heads: int) -> Iterator[slice]:
        """The heads of a rank, ``chunk`` at a time."""
        return (slice(start, min(start + self.chunk, heads)) for start in range(0, heads, self.chunk))

    def runs(self, keys: int) -> list[Run]:
        """Which rows see how many keys."""
        if not self.attention.causal:
            return [Run(slice(0, self.rows), keys)]
        return self.attention.tokens.runs(self.first, self.first + self.rows)

    def key_and_value(self, latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq, kv_lora + rope]`` by ``[n, nope + v, kv_lora]`` to ``[batch, seq, n, nope + rope]``, ``v``."""
        latent, k_rope = latent.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        k, v = keys_and_values(self.config, latent, up)
        return join_key(k, k_rope), v.contiguous()

    def query(self, q_latent: Tensor, up_q: Tensor) -> Tensor:
        """``[batch, rows, q_lora]`` by ``[n, nope + rope, q_lora]``, rotated: ``[batch, rows, n, nope + rope]``."""
        c = self.config
        q = linear(q_latent, up_q.flatten(0, 1)).unflatten(-1, up_q.shape[:2])
        positions = self.attention.tokens.positions[self.first : self.first + self.rows]
        rotary = rotary_tables(c, positions, q.dtype, q.device)
        if rotary is None:
            return q
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return torch.cat((q_nope, rotate(q_rope, rotary)), dim=-1)


def attend(plan: Rebuild, q: Tensor, latent: Tensor, up: Tensor, up_q: Tensor | None) -> Tensor:
    """The output ``[batch, rows, heads/U, v]`` of this rank's queries and heads.

    q is the query ``[batch, rows, heads/U, nope + rope]``, or its latent ``[batch, rows, q_lora]`` with ``up_q``
    ``[heads/U, nope + rope, q_lora]``; latent ``[batch, seq, kv_lora + rope]``, up ``[heads/U, nope + v, kv_lora]``.
    """
    outs = []
    for heads in plan.chunks(len(up)):
        k, v = plan.key_and_value(latent, up[heads])
        some = q[:, :, heads] if up_q is None else plan.query(q, up_q[heads])
        out = [plan.attention.in_order(some[:, r.rows], k[:, : r.keys], v[:, : r.keys]) for r in plan.runs(k.shape[1])]
        outs.append(torch.cat(out, dim=1) if len(out) > 1 else out[0])
    return torch.cat(outs, dim=2) if len(outs) > 1 else outs[0]


def attend_and_forget(
    plan: Rebuild, q: Tensor, latent: Tensor, up: Tensor, up_q: Tensor | None, group: ProcessGroup | None, own: Own
) -> Tensor:
    """:func:`attend` and the return to the sequence layout: ``[batch, rows/U, heads, v]``. Keeps latents for backward.

    Backward rebuilds keys and values (and queries, from their latent) and communicates no more than without. A kernel
    that comes in steps (:data:`STEPS`) needs of the output only the row sums of output × gradient. They are formed in
    the sequence layout and sent along with the gradient, so that the output is kept in one layout, not two.
    """
    return _AttendAndForget.apply(q, latent, up, up_q, plan, group, own)


@dataclass(frozen=True)
class Own:
    """The latents that this rank can make itself, and so need not keep: those of its tokens ``first`` to ``last``.

    ``make()`` returns the query's ``[batch, seq/sp, q_lora]`` (or ``None``) and the key's
    ``[batch, seq/sp, kv_lora + rope]``.
    """

    make: Callable[[], tuple[Tensor | None, Tensor]]
    first: int
    last: int

    def places(self, plan: Rebuild) -> list[Run]:
        """Where they lie among all latents: rows of ``make`` and the place behind the last of them."""
        if plan.attention.causal:
            return sorted(plan.attention.tokens.runs(self.first, self.last), key=lambda run: run.keys)
        return [Run(slice(0, self.last - self.first), self.last)]

    def rows(self, plan: Rebuild) -> list[Run]:
        """Where they lie among the rows of this rank's queries."""
        return [Run(slice(0, self.last - self.first), self.last - plan.first)]


def _without(x: Tensor, places: list[Run]) -> Tensor:
    """``[batch, s, dim]`` without the rows at ``places``, a copy."""
    starts = [0, *(run.keys for run in places)]
    ends = [*(run.keys - len(range(x.shape[1])[run.rows]) for run in places), x.shape[1]]
    return torch.cat([x[:, a:b] for a, b in zip(starts, ends, strict=True)], dim=1)


def _with(rest: Tensor, places: list[Run], own: Tensor) -> Tensor:
    """The inverse of :func:`_without`."""
    parts, start, taken = [], 0, 0
    for run in places:
        mine = own[:, run.rows]
        gap = run.keys - mine.shape[1] - start
        parts += [rest[:, taken : taken + gap], mine]
        start, taken = run.keys, taken + gap
    return torch.cat([*parts, rest[:, taken:]], dim=1)


class Steps(NamedTuple):
    """A kernel's forward and backward apart, and the row sums that its backward takes (``None``: it takes none)."""

    forward: Callable[..., tuple[Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    row_sums: Callable[[Tensor, Tensor], Tensor] | None = None


STEPS: dict[str, Steps] = {"tiled": Steps(tiled.forward, tiled.backward, tiled.row_sums)}
"""Kernels that come in steps. Any other one runs again in backward, under autograd."""


def steps(kernel: str) -> Steps:
    """The steps of a kernel of :mod:`laga_core.kernels`."""
    if kernel in STEPS:
        return STEPS[kernel]
    run = partial(attention, kernel=kernel)

    def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, None]:
        return run(q, k, v, scale=scale, causal=causal), None

    def backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: None, lse: None, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = run(*leaves, scale=scale, causal=causal)
        dq, dk, dv = torch.autograd.grad(out, leaves, dout)
        return dq, dk, dv

    return Steps(forward, backward)


class _AttendAndForget(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        latent: Tensor,
        up: Tensor,
        up_q: Tensor | None,
        plan: Rebuild,
        group: ProcessGroup | None,
        own: Own,
    ) -> Tensor:
        kernel, a = steps(plan.attention.kernel), plan.attention
        out = q.new_empty(*q.shape[:2], len(up), plan.config.v_head_dim)  # [batch, rows, heads/U, v]
        lse: list[Tensor | None] = []  # of each chunk of heads, of each of its runs
        for heads in plan.chunks(len(up)):
            k, v = plan.key_and_value(latent, up[heads])
            some = q[:, :, heads] if up_q is None else plan.query(q, up_q[heads])
            for r in plan.runs(k.shape[1]):
                part, part_lse = kernel.forward(some[:, r.rows], k[:, : r.keys], v[:, : r.keys], a.scale, a.causal)
                out[:, r.rows, heads] = part
                lse.append(part_lse)
        out = scatter_sequence(out, group, "forward")  # [batch, rows/U, heads, v]
        ctx.plan, ctx.group, ctx.own = plan, group, own
        latent = _without(latent, own.places(plan))
        if up_q is not None:
            q = _without(q, own.rows(plan))
        ctx.save_for_backward(q, latent, up, up_q, out if kernel.row_sums else None, *lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        plan: Rebuild = ctx.plan
        kernel = steps(plan.attention.kernel)
        q, latent, up, up_q, out, *lse = ctx.saved_tensors
        own_q, own_latent = ctx.own.make()
        latent = _with(latent, ctx.own.places(plan), own_latent)
        if own_q is not None:
            q = _with(q, ctx.own.rows(plan), own_q)
        delta = None if kernel.row_sums is None else kernel.row_sums(out, dout)
        dout, delta = _to_heads(dout, delta, ctx.group)  # [batch, rows, heads/U, v], [batch, rows, heads/U]

        d_q, d_latent, d_up = torch.zeros_like(q), torch.zeros_like(latent), torch.empty_like(up)
        d_up_q = None if up_q is None else torch.empty_like(up_q)
        runs = len(plan.runs(latent.shape[1]))
        for n, heads in enumerate(plan.chunks(len(up))):
            (k, v), sources = _again(plan.key_and_value, latent, up[heads])
            q_sources: list[Tensor] = []
            if up_q is None:
                some = q[:, :, heads]
            else:
                some, q_sources = _again(plan.query, q, up_q[heads])
            chunk_delta = None if delta is None else delta[:, :, heads]
            chunk_lse = lse[n * runs : (n + 1) * runs]
            dq, dk, dv = _backward(plan, kernel, dout[:, :, heads], some, k, v, chunk_delta, chunk_lse)
            if d_up_q is None:
                d_q[:, :, heads] = dq
            else:
                d_some, d_up_q[heads] = torch.autograd.grad(some, q_sources, dq)
                d_q += d_some
            d_some, d_up[heads] = torch.autograd.grad((k, v), sources, (dk, dv))
            d_latent += d_some
        return d_q, d_latent, d_up, d_up_q, None, None, None


def _again(build: Callable[..., Any], *sources: Tensor) -> tuple[Any, list[Tensor]]:
    """What ``build`` makes of the sources, and these as leaves, for a backward of its own."""
    leaves = [source.detach().requires_grad_() for source in sources]
    with torch.enable_grad():
        return build(*leaves), leaves


def _backward(
    plan: Rebuild,
    kernel: Steps,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor | None,
    lse: list[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of some heads, summed over the runs."""
    q, k, v = q.detach(), k.detach(), v.detach()
    scale, causal = plan.attention.scale, plan.attention.causal
    runs = plan.runs(k.shape[1])
    if len(runs) == 1 and runs[0].keys == k.shape[1]:
        return kernel.backward(dout, q, k, v, delta, lse[0], scale, causal)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for r, run_lse in zip(runs, lse, strict=True):
        run_delta = None if delta is None else delta[:, r.rows]
        dq[:, r.rows], dk_run, dv_run = kernel.backward(
            dout[:, r.rows], q[:, r.rows], k[:, : r.keys], v[:, : r.keys], run_delta, run_lse, scale, causal
        )
        dk[:, : r.keys] += dk_run
        dv[:, : r.keys] += dv_run
    return dq, dk, dv


def _to_heads(dout: Tensor, delta: Tensor | None, group: ProcessGroup | None) -> tuple[Tensor, Tensor | None]:
    """The gradient ``[batch, n, heads, v]`` and its row sums ``[batch, n, heads]`` in one exchange."""
    if delta is None or degree(group) == 1:
        return scatter_heads(dout, group, "backward"), delta
    bits = delta.unsqueeze(-1).contiguous().view(dout.dtype)  # float32 as two columns of a half-precision gradient
    packed = scatter_heads(torch.cat((dout, bits), dim=-1), group, "backward")
    dout, bits = packed.split([dout.shape[-1], bits.shape[-1]], dim=-1)
    return dout, bits.contiguous().view(delta.dtype).squeeze(-1)
