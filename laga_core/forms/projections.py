"""What a form asks of the layer it runs in, and the steps that two forms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..config import MLAConfig
from ..parallel import degree
from ..rotary import Rotary

Attend = Callable[..., Tensor]
"""``attend(q, k, v)``: a kernel of :mod:`laga_core.kernels` with scale, mask and name bound."""


class Projections(Protocol):
    """The projections of an MLA layer, all of them local to a rank."""

    config: MLAConfig

    def query(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """``[batch, s, hidden]`` to the rotated query ``[batch, s, heads, nope + rope]``."""
        ...

    def latent(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """To the normalised latent ``[batch, s, kv_lora]`` and the rotated shared key band ``[batch, s, rope]``."""
        ...

    def up_projection(self) -> Tensor:
        """kv_b_proj's weight as ``[heads, nope + v, kv_lora]``, a view."""
        ...


def local_heads(mla: Projections, group: ProcessGroup | None) -> Tensor:
    """This rank's heads of the up-projection, ``[heads/sp, nope + v, kv_lora]``, a view."""
    heads = mla.config.num_attention_heads // degree(group)
    first = 0 if group is None else dist.get_rank(group) * heads
    return mla.up_projection()[first : first + heads]


def keys_and_values(mla: Projections, latent: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Up-project the latent ``[batch, s, kv_lora]`` by ``up`` ``[heads', nope + v, kv_lora]``.

    Returns k_nope ``[batch, s, heads', nope]`` and v ``[batch, s, heads', v]``, two views of one product.
    """
    kv = torch.nn.functional.linear(latent, up.flatten(0, 1)).unflatten(-1, up.shape[:2])
    k_nope, v = kv.split([mla.config.qk_nope_head_dim, mla.config.v_head_dim], dim=-1)
    return k_nope, v


def join_key(k_nope: Tensor, k_rope: Tensor) -> Tensor:
    """Give every head of ``[batch, s, heads', nope]`` the shared band ``[batch, s, rope]``, copied."""
    shared = k_rope.unsqueeze(2).expand(-1, -1, k_nope.shape[2], -1)
    return torch.cat((k_nope, shared), dim=-1)  # [batch, s, heads', nope + rope]
