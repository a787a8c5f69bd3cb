"""Swap the attention of a Hugging Face model for :class:`~laga_core.MLAAttention`, its weights in place.

    import laga_core.hf
    laga_core.hf.apply(model, group, form="laga")
    loss = model(input_ids=ids, labels=labels).loss    # each rank passes its own contiguous shard of every sequence
    loss.backward()
    all_reduce_gradients(model, group)

Loss and gradients are those of the untouched model on the whole sequence; logits are this rank's shard of its logits.
Needs ``transformers`` (``pip install laga-core[hf]``), version 5.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .attention import MLAAttention
from .config import MLAConfig
from .forms import FORMS, resolve_form
from .forms.projections import Attend
from .kernels import Parts, attention
from .loss import IGNORED, next_labels, token_mean, token_problem
from .parallel import agree, degree
from .rotary import Rotary

ATTENTIONS = ("DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention", "YoutuAttention")
"""Classes of ``transformers`` that compute what :class:`~laga_core.MLAAttention` does. Kimi-K2 uses DeepSeek-V3's."""


def apply(
    model: nn.Module, group: ProcessGroup | None = None, form: str = "laga", kernel: str = "eager", **form_options: Any
) -> nn.Module:
    """Swap every attention of ``model`` and make it take shards; returns the same ``model``, changed.

    ``model`` is a causal language model of ``transformers``, or its base model, whose attention is DeepSeek-V2's
    or V3's, or one that computes the same (``ATTENTIONS``).
    Parameters stay the same objects under the same names, so optimizers, ``state_dict`` and ``save_pretrained`` go on
    as before. Norms, rotary tables (whatever their scaling) and softmax scale stay the model's own. Afterwards

    - every rank passes its contiguous shard ``[batch, seq/sp]`` of ``input_ids`` and of ``labels``, which the loss
      shifts across the borders of shards; the loss is the mean over all tokens of all ranks;
    - ``attention_mask`` may be a shard of zeros and ones with the zeros, padding, at the end of each sequence;
    - there is no cache: this is for training.

    Raises ``TypeError`` or ``ValueError``, with the model unchanged, for a model that is not supported, an unknown form
    or kernel, and heads that cannot be split evenly over the group. The model then raises ``ValueError``, on every
    rank, for another mask, packed sequences, positions that do not run on from rank to rank, a cache, autocast, and
    whatever would stop one rank and leave the others waiting: tokens or labels of a wrong shape or outside the
    vocabulary.
    """
    base = getattr(model, "base_model", None)
    if base is None or not hasattr(model, "loss_function"):
        raise TypeError(f"apply takes a model of transformers, got {type(model).__name__}")
    if base is not model and not type(model).__name__.endswith("ForCausalLM"):
        raise ValueError(
            f"{type(model).__name__} is not supported: pass a causal language model, or the base model inside it"
        )
    swaps = [
        (parent, name, _Attention.from_hf(child, group, form, kernel, form_options))
        for parent in base.modules()
        for name, child in parent.named_children()
        if hasattr(child, "kv_a_proj_with_mqa") or type(child).__name__.endswith("Attention")
    ]
    if not swaps:
        raise ValueError(f"{type(model).__name__} has no attention that could be swapped; known: {_known()}")
    for parent, name, attention_module in swaps:
        setattr(parent, name, attention_module)
    names = list(inspect.signature(base.forward).parameters)
    plain = swaps[0][2].is_plain
    base.register_forward_pre_hook(partial(_take_shard, names, plain, group), with_kwargs=True)
    if base is not model:
        names = list(inspect.signature(model.forward).parameters)
        model.register_forward_pre_hook(partial(_look_at_labels, names, group), with_kwargs=True)
        model.loss_function = partial(_loss, group)  # type: ignore[assignment]
    return model


class _Attention(MLAAttention):
    """An MLAAttention that is called as an attention of ``transformers``, and uses that one's parts."""

    @classmethod
    def from_hf(
        cls, theirs: nn.Module, group: ProcessGroup | None, form: str, kernel: str, form_options: dict[str, Any]
    ) -> _Attention:
        _check_supported(theirs)
        if form == "auto":
            raise ValueError(f"form='auto' is not supported here; name one of {', '.join(FORMS)}")
        sizes = ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        config = MLAConfig(
            **{name: getattr(theirs, name) for name in sizes},
            num_attention_heads=theirs.num_heads,  # type: ignore[arg-type]
            rope_theta=None,  # each call brings the model's own tables
        )
        ours = cls(config, form, kernel, group, device="meta", **form_options)
        if ours.form_options.get("layout", "contiguous") != "contiguous":
            raise ValueError("layout='zigzag' is not supported here: each rank's shard is contiguous; leave it out")
        if ours.form_options.get("query", "heads") != "heads":
            raise ValueError(
                "query='latent' is not supported here: the model's own tables rotate queries; leave it out"
            )
        for name, part in theirs.named_children():
            setattr(ours, name, part)
        ours.scale = float(theirs.scaling)  # type: ignore[arg-type]
        return ours.train(theirs.training)

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | tuple[Tensor, Tensor] | None = None,
        laga_lengths: list[int] | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """``laga_lengths``: tokens of each whole sequence that are no padding; ``None`` where there is no padding."""
        self._check(hidden_states, None)
        tokens = self._tokens(hidden_states.shape[1], None, self.form_options)
        attend = Attend(self.kernel, self.scale, True, tokens)
        if laga_lengths is not None:
            attend = _PaddedAttend(self.kernel, self.scale, True, tokens, laga_lengths)
        rotary = _rotary(position_embeddings, hidden_states)
        out = FORMS[self.form].function(self, hidden_states, rotary, attend, self.group, **self.form_options)
        return self.o_proj(out.flatten(2)), None

    @property
    def is_plain(self) -> bool:
        """Whether the form calls its attention as it is: laga's further options do it piece by piece."""
        return self.form != "laga" or self.form_options == resolve_form("laga", {})[1]

    scale: float


def _check_supported(theirs: nn.Module) -> None:
    """Raise ``ValueError`` unless MLAAttention computes the same as this attention."""
    name = type(theirs).__name__
    if isinstance(theirs, MLAAttention):
        raise ValueError("the attention of this model has been swapped before; apply to a model as it was loaded")
    if name not in ATTENTIONS:
        raise ValueError(f"attention {name} is not supported; known: {_known()}")
    if not type(theirs).__module__.startswith("transformers."):
        raise ValueError(f"this {name} is not the one of transformers; load the model without trust_remote_code")
    config: Any = theirs.config
    if getattr(config, "attention_bias", False):
        raise ValueError("attention_bias=true is not supported; MLA projections here have no bias")
    if getattr(theirs, "attention_dropout", 0):
        raise ValueError(f"attention_dropout={theirs.attention_dropout} is not supported; set it to 0")
    if not getattr(config, "rope_interleave", True):
        raise ValueError("rope_interleave=false is not supported: the rotary embedding here turns interleaved pairs")
    if getattr(theirs, "num_key_value_groups", 1) != 1:
        raise ValueError("num_key_value_heads must equal num_attention_heads")
    if type(theirs.kv_b_proj) is not nn.Linear:
        kind = type(theirs.kv_b_proj).__name__
        raise ValueError(
            f"kv_b_proj is a {kind}, but its plain weight is needed; leave it out of adapters, unquantised"
        )


def _known() -> str:
    return ", ".join(ATTENTIONS)


def _rotary(embeddings: Tensor | tuple[Tensor, Tensor] | None, hidden: Tensor) -> Rotary:
    """The model's rotary tables as ours, ``[seq/sp, rope/2]`` each, the same for every sequence of a batch."""
    if embeddings is None:
        raise ValueError("the model passed no position_embeddings to its attention; this version is not supported")
    if isinstance(embeddings, Tensor):  # complex, DeepSeek-V2
        cos, sin = embeddings.real, embeddings.imag
    else:  # each pair's angle stands twice, in both halves
        cos, sin = (table[..., : table.shape[-1] // 2] for table in embeddings)
    return cos[0].to(hidden), sin[0].to(hidden)


@dataclass(frozen=True)
class _PaddedAttend(Attend):
    """Causal attention in which the padding at the end of each sequence is seen by nobody, and itself sees the rest."""

    lengths: list[int]

    def __call__(self, q: Parts, k: Parts, v: Tensor) -> Tensor:
        attend = partial(attention, scale=self.scale, kernel=self.kernel)
        rows = []
        for row, length in enumerate(self.lengths):
            real, padding = (slice(row, row + 1), slice(length)), (slice(row, row + 1), slice(length, None))
            keys, values = _cut(k, real), v[real]
            parts = [attend(_cut(q, real), keys, values, causal=True)]
            if length < v.shape[1]:
                parts.append(attend(_cut(q, padding), keys, values, causal=False))
            rows.append(torch.cat(parts, dim=1))
        return torch.cat(rows)


def _cut(x: Parts, where: tuple[slice, slice]) -> Parts:
    return tuple(part[where] for part in x) if isinstance(x, tuple) else x[where]


def _look_at_labels(
    names: list[str], group: ProcessGroup | None, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Before the whole model runs: labels of every rank or of none, each fit for its tokens."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    tokens = given["input_ids"] if given.get("input_ids") is not None else given.get("inputs_embeds")
    shape: Any = "[batch, seq/sp]"
    if isinstance(tokens, Tensor) and tokens.dim() > 1:  # if it is none, the base model says so
        shape = tokens.shape[:2]
    labels = {name: given[name] for name in ("labels", "shift_labels") if given.get(name) is not None}
    vocab_size, ignored = model.config.vocab_size, given.get("ignore_index", IGNORED)
    problems = [token_problem(name, each, vocab_size, shape, ignored) for name, each in labels.items()]
    keep = given.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        problems.append("logits_to_keep is not supported: this is for training, where all logits count; leave it out")
    problem = next(filter(None, problems), None)
    agree({"labels given": ", ".join(labels) or "none"}, problem, group, next(model.parameters()).device)


def _take_shard(
    names: list[str],
    plain: bool,
    group: ProcessGroup | None,
    base: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the base model runs: global positions in, mask and cache out."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    problem = _tokens_problem(given, base)
    tokens: Any = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    batch, seq_local = (-1, -1) if problem else tokens.shape[:2]
    first = 0 if group is None else dist.get_rank(group) * seq_local
    device = next(base.parameters()).device
    signature = {"batch": batch, "local sequence length": seq_local, "attention_mask given": int(mask is not None)}
    agree(signature, problem or _call_problem(given, [batch, seq_local], first, device.type), group, device)

    expected = torch.arange(first, first + seq_local, device=tokens.device)[None]
    given["position_ids"] = expected if positions is None else positions
    given["laga_lengths"] = None if mask is None else _lengths(mask, plain, group)
    given["use_cache"] = False
    given["attention_mask"] = tokens.new_zeros(1, 1, 1, 1)  # a finished mask, so that the model makes none of its own
    return (), given


def _tokens_problem(given: dict[str, Any], base: Any) -> str | None:
    """What is wrong with ``input_ids`` or ``inputs_embeds``, of which there must be one; ``None`` if nothing."""
    tokens, embeddings = given.get("input_ids"), given.get("inputs_embeds")
    if (tokens is None) == (embeddings is None):
        return "pass this rank's shard as input_ids or as inputs_embeds: one of them, and not both"
    if embeddings is None:
        return token_problem("input_ids", tokens, base.config.vocab_size)
    size = base.config.hidden_size
    if not isinstance(embeddings, Tensor) or embeddings.dim() != 3 or embeddings.shape[-1] != size:
        return f"inputs_embeds must be [batch, seq/sp, {size}], got {list(getattr(embeddings, 'shape', []))}"
    return None


def _call_problem(given: dict[str, Any], shape: list[int], first: int, kind: str) -> str | None:
    """What a call on this kind of device asks for that is not supported, in words; ``None`` if nothing."""
    caches = [name for name in ("cache", "past_key_values") if given.get(name) is not None]
    if caches or given.get("use_cache"):
        return f"{caches[0] if caches else 'use_cache=True'} is not supported: this is for training; leave it out"
    if torch.is_autocast_enabled(kind):
        return "autocast is not supported: the attention computes in the dtype of its weights; cast the model instead"
    if packed := [name for name in given if name.startswith("cu_seq_lens") or name == "seq_idx"]:
        return f"{packed[0]} is not supported: a row holds one sequence, of which every rank has a shard"
    if given.get("output_attentions"):
        return "output_attentions=True is not supported: the whole attention matrix is on no rank"
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and list(mask.shape) == shape):
        what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        return f"attention_mask must be this rank's shard {shape} of zeros and ones with padding at the end, got {what}"
    if positions is not None:
        wanted = torch.arange(first, first + shape[1], device=positions.device)
        if positions.shape[-1:] != wanted.shape or not bool((positions == wanted).all()):
            return f"position_ids must run from {first} to {first + shape[1] - 1} on this rank; leave them out"
    return None


def _lengths(mask: Tensor, plain: bool, group: ProcessGroup | None) -> list[int] | None:
    """Tokens of each whole sequence before its padding, from this rank's shard of the mask ``[batch, seq/sp]``."""
    shard = mask != 0
    counts = shard.sum(1)  # [batch]
    if degree(group) > 1:
        everywhere = counts.new_empty(degree(group), len(counts))
        dist.all_gather_single(everywhere.view(-1), counts, group=group)
    else:
        everywhere = counts[None]
    lengths = everywhere.sum(0)
    first = dist.get_rank(group) * mask.shape[1] if group else 0
    wanted = torch.arange(first, first + mask.shape[1], device=mask.device) < lengths[:, None]
    problem = None
    if not torch.equal(shard, wanted):
        problem = "attention_mask must have its zeros, the padding, at the end of each sequence"
    elif not bool(lengths.all()):
        problem = "attention_mask masks a whole sequence; every sequence needs at least one token"
    full = bool((lengths == degree(group) * mask.shape[1]).all())
    if problem is None and not full and not plain:
        problem = (
            "an attention_mask with padding needs form='laga' without further options; leave the mask out: causal "
            "attention never looks at padding at the end, and labels of -100 keep it out of the loss"
        )
    agree({}, problem, group, mask.device)
    return None if full else lengths.tolist()


def _loss(
    group: ProcessGroup | None,
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The model's own loss, over all ranks. ``num_items_in_batch``, if given, counts the tokens of all ranks."""
    if shift_labels is None:
        if labels is None:
            raise ValueError("the loss needs labels or shift_labels")
        shift_labels = next_labels(labels, group, ignore_index)
    return token_mean(logits, shift_labels.to(logits.device), group, num_items_in_batch, ignore_index)
