"""A small language model of MLA blocks, its sequence sharded across ranks; every part is plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from .attention import MLAAttention
from .config import MLAConfig
from .experts import MLP, ExpertConfig, Experts, MoE, expert_groups
from .loss import token_problem
from .parallel import agree


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of :class:`LanguageModel`, under their Hugging Face names where there is one.

    With ``experts``, the blocks from ``first_k_dense_replace`` on hold a mixture of experts, the others an MLP.
    Weights are drawn from a normal distribution of width ``initializer_range``; an embedding that is no head as well
    has width 1, as ``nn.Embedding`` has by itself.
    """

    attention: MLAConfig
    vocab_size: int
    num_hidden_layers: int
    intermediate_size: int
    experts: ExpertConfig | None = None
    first_k_dense_replace: int = 0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_hidden_layers", "intermediate_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"ModelConfig: {name} must be a whole number of at least 1, got {value!r}")


class LanguageModel(nn.Module):
    """Embedding, blocks of MLA and a feed-forward, norm and head, on one contiguous shard of each sequence.

    ``form``, ``kernel``, ``group`` and ``form_options`` as in :class:`laga_core.MLAAttention`; ``ep`` is the expert
    parallel degree. The weights follow from ``seed`` alone: they are the same on every rank, and each expert's are the
    same whatever ``ep`` is.
    """

    def __init__(
        self,
        config: ModelConfig,
        form: str = "laga",
        kernel: str = "eager",
        group: ProcessGroup | None = None,
        ep: int = 1,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **form_options: Any,
    ) -> None:
        super().__init__()
        self.config, self.group = config, group
        hidden = config.attention.hidden_size
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        groups = expert_groups(group, ep)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, **where)
        self.layers = nn.ModuleList()
        for number in range(config.num_hidden_layers):
            attention = MLAAttention(config.attention, form, kernel, group, **where, **form_options)
            feed_forward: nn.Module
            if config.experts is None or number < config.first_k_dense_replace:
                feed_forward = MLP(hidden, config.intermediate_size, **where)
            else:
                feed_forward = MoE(hidden, config.experts, groups, **where)
            self.layers.append(Block(hidden, attention, feed_forward, config.attention.norm_eps, **where))
        self.norm = nn.RMSNorm(hidden, eps=config.attention.norm_eps, **where)
        self.lm_head = None if config.tie_word_embeddings else nn.Linear(hidden, config.vocab_size, bias=False, **where)
        self.draw_weights(seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers ``[batch, seq/sp]`` to logits ``[batch, seq/sp, vocab]``.

        Raises ``ValueError`` on every rank, before anything moves, where one has tokens that are none.
        """
        agree({}, token_problem("tokens", tokens, self.config.vocab_size), self.group, self.norm.weight.device)
        hidden = self.embed_tokens(tokens)  # [batch, seq/sp, hidden]
        for layer in self.layers:
            hidden = layer(hidden)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return F.linear(self.norm(hidden), head.weight)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Draw every weight anew, on the CPU and in fp32, so that no device or dtype changes the draw."""
        source = torch.Generator().manual_seed(seed)

        def draw(shape: torch.Size, width: float = self.config.initializer_range) -> Tensor:
            return torch.randn(shape, generator=source) * width

        for module in self.modules():
            if isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
                continue  # they start as the identity
            if module is self.embed_tokens and self.lm_head is not None:
                module.weight.copy_(draw(module.weight.shape, width=1.0))
                continue
            for weight in module.parameters(recurse=False):
                if not isinstance(module, Experts):
                    weight.copy_(draw(weight.shape))
                    continue
                assert self.config.experts is not None
                for number in range(self.config.experts.n_routed_experts):  # all of them, to stay in step
                    one, place = draw(weight.shape[1:]), number - module.first
                    if 0 <= place < module.count:
                        weight[place].copy_(one)


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + feed_forward(norm(x))``."""

    def __init__(
        self, hidden_size: int, attention: MLAAttention, feed_forward: nn.Module, norm_eps: float, **where: Any
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps, **where)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=norm_eps, **where)
        self.mlp = feed_forward

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
