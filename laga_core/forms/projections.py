"""What a form asks of the layer it runs in, and the steps that two forms share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..config import MLAConfig
from ..kernels import Parts, attention
from ..kernels.products import linear
from ..parallel import degree
from ..rotary import Rotary
from ..sharding import TokenOrder


@dataclass(frozen=True)
class Attend:
    """``attend(q, k, v)`` over the whole sequence: a kernel of :mod:`laga_core.kernels` with scale and mask bound.

    ``tokens`` says how the tokens lie over the ranks, which is the order of q, k, v and of the output.
    """

    kernel: str
    scale: float
    causal: bool
    tokens: TokenOrder

    def __call__(self, q: Parts, k: Parts, v: Tensor) -> Tensor:
        if not self.causal or self.tokens.in_order:
            return self.in_order(q, k, v)
        order = self.tokens.sorting.to(v.device)

        def sort(x: Parts) -> Parts:
            return tuple(part[:, order] for part in x) if isinstance(x, tuple) else x[:, order]

        return self.in_order(sort(q), sort(k), v[:, order])[:, order.argsort()]

    def in_order(self, q: Parts, k: Parts, v: Tensor) -> Tensor:
        """The kernel itself, over tokens that are sorted by position."""
        return attention(q, k, v, scale=self.scale, causal=self.causal, kernel=self.kernel)


class Projections(Protocol):
    """The projections of an MLA layer, all of them local to a rank."""

    config: MLAConfig

    def query(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """``[batch, s, hidden]`` to the rotated query ``[batch, s, heads, nope + rope]``."""
        ...

    def query_latent(self, hidden: Tensor) -> Tensor:
        """``[batch, s, hidden]`` to the normalised latent of the query ``[batch, s, q_lora]``."""
        ...

    def latent(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """To the normalised latent ``[batch, s, kv_lora]`` and the rotated shared key band ``[batch, s, rope]``."""
        ...

    def up_projection(self) -> Tensor:
        """kv_b_proj's weight as ``[heads, nope + v, kv_lora]``, a view."""
        ...

    def query_up_projection(self) -> Tensor:
        """q_b_proj's weight as ``[heads, nope + rope, q_lora]``, a view."""
        ...


def local_heads(mla: Projections, group: ProcessGroup | None) -> Tensor:
    """This rank's heads of the up-projection, ``[heads/sp, nope + v, kv_lora]``, a view."""
    return own_heads(mla.up_projection(), group)


def own_heads(weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """This rank's part of ``[heads, ...]``, a view."""
    heads = len(weight) // degree(group)
    first = 0 if group is None else dist.get_rank(group) * heads
    return weight[first : first + heads]


def keys_and_values(config: MLAConfig, latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Up-project the latent ``[batch, s, kv_lora]`` by ``up`` ``[heads', nope + v, kv_lora]``.

    Returns k_nope ``[batch, s, heads', nope]`` and v ``[batch, s, heads', v]``, two views of one product.
    """
    kv = linear(latent, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
    k_nope, v = kv.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
    return k_nope, v


def join_key(k_nope: Tensor, k_rope: Tensor) -> Tensor:
    """Give every head of ``[batch, s, heads', nope]`` the shared band ``[batch, s, rope]``, copied."""
    shared = k_rope.unsqueeze(2).expand(-1, -1, k_nope.shape[2], -1)
    return torch.cat((k_nope, shared), dim=-1)  # [batch, s, heads', nope + rope]
