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
        q = torch.nn.functional.linear(q_latent, up_q.flatten(0, 1)).unflatten(-1, up_q.shape[:2])
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
    plan: Rebuild, q: Tensor, latent: Tensor, up: Tensor, up_q: Tensor | None, group: ProcessGroup | None
) -> Tensor:
    """:func:`attend` and the return to the sequence layout: ``[batch, rows/U, heads, v]``. Keeps latents for backward.

    Backward rebuilds keys and values (and queries, from their latent) and communicates no more than without. A kernel
    that comes in steps (:data:`STEPS`) needs of the output only the row sums of output × gradient. They are formed in
    the sequence layout and sent along with the gradient, so that the output is kept in one layout, not two.
    """
    return _AttendAndForget.apply(q, latent, up, up_q, plan, group)


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
        ctx: Any, q: Tensor, latent: Tensor, up: Tensor, up_q: Tensor | None, plan: Rebuild, group: ProcessGroup | None
    ) -> Tensor:
        kernel, a = steps(plan.attention.kernel), plan.attention
        out = q.new_empty(*q.shape[:2], len(up), plan.config.v_head_dim)  # [batch, rows, heads/U, v]
        lse: dict[tuple[int, int], Tensor | None] = {}
        for n, heads in enumerate(plan.chunks(len(up))):
            k, v = plan.key_and_value(latent, up[heads])
            some = q[:, :, heads] if up_q is None else plan.query(q, up_q[heads])
            for m, r in enumerate(plan.runs(k.shape[1])):
                part, lse[n, m] = kernel.forward(some[:, r.rows], k[:, : r.keys], v[:, : r.keys], a.scale, a.causal)
                out[:, r.rows, heads] = part
        out = scatter_sequence(out, group, "forward")  # [batch, rows/U, heads, v]
        ctx.plan, ctx.group, ctx.places = plan, group, list(lse)
        ctx.save_for_backward(q, latent, up, up_q, out if kernel.row_sums else None, *lse.values())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        plan: Rebuild = ctx.plan
        kernel, a = steps(plan.attention.kernel), plan.attention
        q, latent, up, up_q, out, *saved = ctx.saved_tensors
        lse = dict(zip(ctx.places, saved, strict=True))
        delta = None if kernel.row_sums is None else kernel.row_sums(out, dout)
        dout, delta = _to_heads(dout, delta, ctx.group)  # [batch, rows, heads/U, v], [batch, rows, heads/U]

        d_q, d_latent, d_up = (torch.zeros_like(x) for x in (q, latent, up))
        d_up_q = None if up_q is None else torch.zeros_like(up_q)
        for n, heads in enumerate(plan.chunks(len(up))):
            leaves = [x.detach().requires_grad_() for x in (latent, up[heads])]
            with torch.enable_grad():
                k, v = plan.key_and_value(*leaves)
            if up_q is None:
                some = q[:, :, heads]
            else:
                q_leaves = [x.detach().requires_grad_() for x in (q, up_q[heads])]
                with torch.enable_grad():
                    some = plan.query(*q_leaves)
            dq, dk, dv = (torch.zeros_like(x) for x in (some, k, v))
            for m, r in enumerate(plan.runs(k.shape[1])):
                found = kernel.backward(
                    dout[:, r.rows, heads],
                    *(x.detach() for x in (some[:, r.rows], k[:, : r.keys], v[:, : r.keys])),
                    None if delta is None else delta[:, r.rows, heads],
                    lse[n, m],
                    a.scale,
                    a.causal,
                )
                for total, rows, part in zip((dq, dk, dv), (r.rows, slice(r.keys), slice(r.keys)), found, strict=True):
                    total[:, rows] += part
            part_latent, d_up[heads] = torch.autograd.grad((k, v), leaves, (dk, dv))
            d_latent += part_latent
            if d_up_q is None:
                d_q[:, :, heads] = dq
            else:
                part_q, d_up_q[heads] = torch.autograd.grad(some, q_leaves, dq)
                d_q += part_q
        return d_q, d_latent, d_up, d_up_q, None, None


def _to_heads(dout: Tensor, delta: Tensor | None, group: ProcessGroup | None) -> tuple[Tensor, Tensor | None]:
    """The gradient ``[batch, n, heads, v]`` and its row sums ``[batch, n, heads]`` in one exchange."""
    if delta is None or degree(group) == 1:
        return scatter_heads(dout, group, "backward"), delta
    bits = delta.unsqueeze(-1).contiguous().view(dout.dtype)  # float32 as two columns of a half-precision gradient
    packed = scatter_heads(torch.cat((dout, bits), dim=-1), group, "backward")
    dout, bits = packed.split([dout.shape[-1], bits.shape[-1]], dim=-1)
    return dout, bits.contiguous().view(delta.dtype).squeeze(-1)
