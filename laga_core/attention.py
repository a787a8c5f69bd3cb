"""``MLAAttention``: projections, norms, rotary embedding, and a form that says how ranks share the work."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .config import MLAConfig
from .costs import FormChoice, Machine, choose
from .forms import FORMS, check_form
from .forms.projections import Attend
from .kernels import PROBLEMS, check_kernel
from .kernels.products import Linear
from .parallel import agree, degree, gather_sequence
from .rotary import Rotary, rotary_tables, rotate, softmax_scale
from .sharding import TokenOrder, check_layout

_log = logging.getLogger(__name__)


class MLAAttention(nn.Module):
    """Multi-head Latent Attention over a sequence that is sharded across the ranks of ``group``.

    ``form`` is how the ranks share the work: ``"explicit"``, ``"absorbed"`` or ``"laga"`` (paper §3); they compute the
    same function. ``kernel`` names an attention kernel of :mod:`laga_core.kernels`. ``group=None`` means one process
    holds the whole sequence. Parameters carry the names of Hugging Face's DeepSeek-V3 attention, so its ``state_dict``
    loads as it is; every rank must hold the same values.

    ``form="auto"`` takes, for each shape it meets, the form that the cost model finds quickest on ``machine``
    (:class:`laga_core.costs.Machine`; by default a typical one of this kind of device) with room for what ``layers``
    layers keep. ``choice`` then says which and why.

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
        self.choice: FormChoice | None = None
        if form == "auto":
            self._machine, self._layers = _auto_options(form_options)
            self._chosen: dict[tuple[int, int], FormChoice] = {}
            self.form_options: dict[str, Any] = {}
        else:
            self.form_options = check_form(config, degree(group), form, form_options)

        c, heads = config, config.num_attention_heads
        linear = partial(Linear, bias=False, dtype=dtype, device=device)
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
        and the causal mask follow; by default shards are contiguous and in rank order, or as the form's ``layout``
        says. Under a causal mask given positions are gathered too, 8 bytes a token.

        Raises ``ValueError`` on every rank, before any data moves, for a wrong shape, dtype or device, or where the
        ranks' shards differ.
        """
        self._check(hidden, positions)
        form, options = self._choose(hidden) if self.form == "auto" else (self.form, self.form_options)
        tokens = self._tokens(hidden.shape[1], positions, options)
        first = 0 if self.group is None else dist.get_rank(self.group) * hidden.shape[1]
        mine = tokens.positions[first : first + hidden.shape[1]] if positions is None else positions
        rotary = rotary_tables(self.config, mine, hidden.dtype, hidden.device)
        attend = Attend(self.kernel, softmax_scale(self.config), self.config.causal, tokens)
        out = FORMS[form].function(self, hidden, rotary, attend, self.group, **options)
        return self.o_proj(out.flatten(2))  # [batch, seq/sp, heads * v] -> [batch, seq/sp, hidden]

    def query(self, hidden: Tensor, rotary: Rotary) -> Tensor:
        """``[batch, s, hidden]`` to the rotated query ``[batch, s, heads, nope + rope]``."""
        c = self.config
        q = self.q_proj(hidden) if c.q_lora_rank is None else self.q_b_proj(self.query_latent(hidden))
        q = q.unflatten(-1, (c.num_attention_heads, c.qk_head_dim))
        if rotary is None:
            return q
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return torch.cat((q_nope, rotate(q_rope, rotary)), dim=-1)

    def query_latent(self, hidden: Tensor) -> Tensor:
        """``[batch, s, hidden]`` to the normalised latent of the query ``[batch, s, q_lora]``, where there is one."""
        return self.q_a_layernorm(self.q_a_proj(hidden))

    def latent(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """To the normalised latent ``[batch, s, kv_lora]`` and the rotated shared key band ``[batch, s, rope]``."""
        c = self.config
        latent, k_rope = self.kv_a_proj_with_mqa(hidden).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        return self.kv_a_layernorm(latent), rotate(k_rope, rotary)

    def up_projection(self) -> Tensor:
        """kv_b_proj's weight as ``[heads, nope + v, kv_lora]``, a view."""
        return self.kv_b_proj.weight.unflatten(0, (self.config.num_attention_heads, -1))

    def query_up_projection(self) -> Tensor:
        """q_b_proj's weight as ``[heads, nope + rope, q_lora]``, a view."""
        return self.q_b_proj.weight.unflatten(0, (self.config.num_attention_heads, -1))

    def extra_repr(self) -> str:
        options = "".join(f", {key}={value!r}" for key, value in self.form_options.items())
        return f"form={self.form!r}{options}, kernel={self.kernel!r}, sp={degree(self.group)}"

    def _choose(self, hidden: Tensor) -> tuple[str, dict[str, Any]]:
        """The form for this shape by the cost model, the same on every rank; ``choice`` says why."""
        batch, seq, sp = hidden.shape[0], hidden.shape[1] * degree(self.group), degree(self.group)
        machine = self._machine or Machine.typical(hidden.device.type)
        if (batch, seq) not in self._chosen:
            choice = choose(self.config, seq, sp, machine, self._layers, batch=batch, dtype=hidden.dtype)
            _log.info("form for %d tokens on %d ranks: %s", seq, sp, choice.reason)
            self._chosen[batch, seq] = choice
        self.choice = self._chosen[batch, seq]
        return self.choice.form, check_form(self.config, sp, self.choice.form, self.choice.options)

    def _tokens(self, seq_local: int, positions: Tensor | None, options: Mapping[str, Any]) -> TokenOrder:
        """How the tokens lie over the ranks: as ``positions`` say, by default as the form's layout does."""
        layout, context = options.get("layout", "contiguous"), options.get("context", 1)
        tokens = TokenOrder.of_layout(seq_local * degree(self.group), layout, context)
        if positions is None or not (self.config.causal or options.get("query") == "latent"):
            return tokens
        everywhere = gather_sequence(positions.to(torch.int64)[None, :, None], self.group).flatten()  # [seq]
        if not self.config.causal:
            return TokenOrder(tokens.pieces, everywhere)
        given = TokenOrder.of_positions(everywhere)
        if layout != "contiguous" and given.pieces != tokens.pieces:
            raise ValueError(
                f"positions are not those of layout={layout!r} with context={context}; take them from "
                "laga_core.sharding.sequence_positions, or leave layout out: the layer then follows any positions"
            )
        return given

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
        if self.form == "auto":  # each rank chooses for itself, and all have to choose alike
            signature["machine and layers"] = f"{self._machine} {self._layers}"
        # Ranks on a device check once for each new shape: a check at every step would hold back the host.
        if problem is None and hidden.device.type != "cpu" and self._checked == signature:
            return
        agree(signature, problem, self.group, self.o_proj.weight.device)
        self._checked = signature

    _checked: dict[str, int | str] | None = None


def _auto_options(options: Mapping[str, Any]) -> tuple[Machine | None, int]:
    """``machine`` and ``layers`` of ``form="auto"``; ``ValueError`` or ``TypeError`` for anything else."""
    if unknown := sorted(options.keys() - {"machine", "layers"}):
        raise ValueError(f"form 'auto' has no option {unknown[0]!r}; its options: machine, layers")
    machine, layers = options.get("machine"), options.get("layers", 1)
    if machine is not None and not isinstance(machine, Machine):
        raise TypeError(f"form 'auto': machine must be a laga_core.costs.Machine or None, got {machine!r}")
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ValueError(f"form 'auto': layers must be a whole number of at least 1, got {layers!r}")
    return machine, layers


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
    try:
        options, sp = module.form_options, degree(module.group)
        check_layout(hidden.shape[1] * sp, sp, options.get("layout", "contiguous"), options.get("context", 1))
    except ValueError as error:
        return str(error)
    if problem := _kernel_problem(module, hidden):
        return problem
    if positions is None:
        return None
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.is_complex():
        return "positions must be a tensor of whole numbers"
    if list(positions.shape) != [hidden.shape[1]]:
        return f"positions must be [seq/sp] = [{hidden.shape[1]}], got {list(positions.shape)}"
    return None


def _kernel_problem(module: MLAAttention, hidden: Tensor) -> str | None:
    """Why the kernel cannot take the query, key and value that the form will give it; ``None`` where it can."""
    problem = PROBLEMS.get(module.kernel)
    if problem is None:
        return None
    c, sp, context = module.config, degree(module.group), module.form_options.get("context", 1)
    heads, keys = c.num_attention_heads * context // sp, hidden.shape[1] * sp
    dim, dim_v = (c.latent_dim, c.kv_lora_rank) if module.form == "absorbed" else (c.qk_head_dim, c.v_head_dim)
    like = hidden.detach()[0, 0, :1]  # their device and dtype, at no cost
    shapes = ((keys // context, heads, dim), (keys, heads, dim), (keys, heads, dim_v))
    reason = problem(*(like.expand(1, s, n, size) for s, n, size in shapes))
    return reason and f"kernel {module.kernel!r} cannot do this: {reason}; use kernel='tiled', or 'auto' to choose one"
