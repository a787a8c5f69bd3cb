"""``MLAAttention``: projections, norms, rotary embedding, and a form that says how ranks share the work."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .config import MLAConfig
from .forms import resolve_form
from .forms.projections import Attend
from .kernels import Parts, attention, check_kernel
from .parallel import agree, degree, gather_sequence
from .rotary import Rotary, rotary_tables, rotate, softmax_scale


class MLAAttention(nn.Module):
    """Multi-head Latent Attention over a sequence that is sharded across the ranks of ``group``.

    ``form`` is how the ranks share the work: ``"explicit"``, ``"absorbed"`` or ``"laga"`` (paper §3); they compute the
    same function. ``kernel`` names an attention kernel of :mod:`laga_core.kernels`. ``group=None`` means one process
    holds the whole sequence. Parameters carry the names of Hugging Face's DeepSeek-V3 attention, so its ``state_dict``
    loads as it is; every rank must hold the same values.

    Raises ``ValueError`` or ``TypeError`` for an unknown form, kernel or option, and where the heads cannot be split
    evenly over the group.
    """

    def __init__(
        self,
        config: MLAConfig,
        form: str = "laga",
        kernel: str = "eager",
        group: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **form_options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(config, MLAConfig):
            raise TypeError(f"MLAAttention takes an MLAConfig, got {type(config).__name__}")
        if group is not None and not isinstance(group, ProcessGroup):
            raise TypeError(
                f"group must be a torch.distributed process group this rank belongs to, or None, got {group!r}"
            )
        check_kernel(kernel)
        self.config, self.form, self.kernel, self.group = config, form, kernel, group
        self._form, self.form_options = resolve_form(form, form_options)
        config.check_degree(degree(group))

        c, heads = config, config.num_attention_heads
        linear = partial(nn.Linear, bias=False, dtype=dtype, device=device)
        norm = partial({"rms": nn.RMSNorm, "layer": nn.LayerNorm}[c.norm], eps=c.norm_eps, dtype=dtype, device=device)
        if c.q_lora_rank is None:
            self.q_proj = linear(c.hidden_size, heads * c.qk_head_dim)
        else:
            self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
            self.q_a_layernorm = norm(c.q_lora_rank)
            self.q_b_proj = linear(c.q_lora_rank, heads * c.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.latent_dim)
        self.kv_a_layernorm = norm(c.kv_lora_rank)
        self.kv_b_proj = linear(c.kv_lora_rank, heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(heads * c.v_head_dim, c.hidden_size)

    def forward(self, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """``[batch, seq/sp, hidden]`` to the same shape.

        ``positions`` are the global positions of this rank's tokens, ``[seq/sp]`` integers, which the rotary embedding
        and the causal mask follow; by default shards are contiguous and in rank order. Under a causal mask given
        positions are gathered too, 8 bytes a token.

        Raises ``ValueError`` on every rank, before any data moves, for a wrong shape, dtype or device, or where the
        ranks' shards differ.
        """
        self._check(hidden, positions)
        seq_local = hidden.shape[1]
        order = None
        if positions is None:
            first = 0 if self.group is None else dist.get_rank(self.group) * seq_local
            positions = torch.arange(first, first + seq_local, device="cpu")
        elif self.config.causal:
            order = _token_order(positions, self.group)
        rotary = rotary_tables(self.config, positions, hidden.dtype, hidden.device)
        out = self._form(self, hidden, rotary, self._attend(order), self.group, **self.form_options)
        return self.o_proj(out.flatten(2))  # [batch, seq/sp, heads * v] -> [batch, seq/sp, hidden]

    def query(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """``[batch, s, hidden]`` to the rotated query ``[batch, s, heads, nope + rope]``."""
        c = self.config
        direct = c.q_lora_rank is None
        q = self.q_proj(hidden) if direct else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        q = q.unflatten(-1, (c.num_attention_heads, c.qk_head_dim))
        if rotary is None:
            return q
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return torch.cat((q_nope, rotate(q_rope, rotary)), dim=-1)

    def latent(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """To the normalised latent ``[batch, s, kv_lora]`` and the rotated shared key band ``[batch, s, rope]``."""
        c = self.config
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent), rotate(k_rope, rotary)

    def up_projection(self) -> Tensor:
        """kv_b_proj's weight as ``[heads, nope + v, kv_lora]``, a view."""
        return self.kv_b_proj.weight.unflatten(0, (self.config.num_attention_heads, -1))

    def extra_repr(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.form_options.items())
        return f"form={self.form!r}{options}, kernel={self.kernel!r}, sp={degree(self.group)}"

    def _attend(self, order: Tensor | None) -> Attend:
        attend = partial(attention, scale=softmax_scale(self.config), causal=self.config.causal, kernel=self.kernel)
        return attend if order is None else partial(_attend_in_order, attend, order)

    def _check(self, hidden: Tensor, positions: Tensor | None) -> None:
        problem = _input_problem(self, hidden, positions)
        shape = list(hidden.shape) if isinstance(hidden, Tensor) and hidden.dim() == 3 else [-1, -1, -1]
        signature: dict[str, int | str] = {
            "batch": shape[0],
            "local sequence length": shape[1],
            "positions given": int(positions is not None),
            "dtype": str(self.o_proj.weight.dtype),
            "form": f"{self.form} {self.form_options}",
            "configuration": str(self.config),
        }
        # Ranks on a device check once for each new shape: a check at every step would hold back the host.
        if problem is None and hidden.device.type != "cpu" and self._checked == signature:
            return
        agree(signature, problem, self.group, self.o_proj.weight.device)
        self._checked = signature

    _checked: dict[str, int | str] | None = None


def _input_problem(module: MLAAttention, hidden: Tensor, positions: Tensor | None) -> str | None:
    """What is wrong with the input of this rank, in words; ``None`` if nothing is."""
    weight, size = module.o_proj.weight, module.config.hidden_size
    if not isinstance(hidden, Tensor):
        return f"hidden must be a tensor, got {type(hidden).__name__}"
    if hidden.dim() != 3 or hidden.shape[-1] != size:
        return f"hidden must be [batch, seq/sp, {size}], got {list(hidden.shape)}"
    if 0 in hidden.shape:
        return f"hidden is empty: {list(hidden.shape)}; every rank needs at least one token"
    if hidden.dtype != weight.dtype:
        return f"hidden is {hidden.dtype} but the parameters are {weight.dtype}; cast one of them"
    if hidden.device != weight.device:
        return f"hidden is on {hidden.device} but the parameters are on {weight.device}; move one of them"
    if positions is None:
        return None
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.is_complex():
        return "positions must be a tensor of whole numbers"
    if list(positions.shape) != [hidden.shape[1]]:
        return f"positions must be [seq/sp] = [{hidden.shape[1]}], got {list(positions.shape)}"
    return None


def _token_order(positions: Tensor, group: ProcessGroup | None) -> Tensor | None:
    """The order that sorts the whole sequence by position, ``[seq]``; ``None`` if it is sorted already."""
    everywhere = gather_sequence(positions.to(torch.int64)[None, :, None], group).flatten()  # [seq]
    if len(everywhere.unique()) < len(everywhere):
        raise ValueError(
            "positions repeat: they are global, no two tokens of the whole sequence share one; "
            "for contiguous shards rank r's begin at r * seq/sp (the default)"
        )
    order = everywhere.argsort()
    return None if torch.equal(order, torch.arange(len(order), device=order.device)) else order


def _attend_in_order(attend: Attend, order: Tensor, q: Parts, k: Parts, v: Tensor) -> Tensor:
    """Attend with the tokens in ``order`` and give the output back in the order of the input."""
    inverse = order.argsort()

    def sort(x: Parts) -> Parts:
        return tuple(part[:, order] for part in x) if isinstance(x, tuple) else x[:, order]

    return attend(sort(q), sort(k), sort(v))[:, inverse]
