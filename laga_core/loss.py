"""Next-token loss over a sequence that is sharded across ranks, and a look at token numbers before they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from .parallel import agree, degree

IGNORED = -100
"""The label of a token that does not count, as in PyTorch and Hugging Face."""


def token_problem(
    name: str,
    tokens: Any,
    vocab_size: int,
    shape: Sequence[int] | str = "[batch, seq/sp]",
    ignored: int | None = None,
) -> str | None:
    """What is wrong with token numbers of ``shape``, or of any two sizes under these names; ``None`` if nothing is.

    Where one rank stumbled over a number, the others would go on into a collective and wait there.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        return f"{name} must be a tensor of whole numbers, got {getattr(tokens, 'dtype', type(tokens).__name__)}"
    fits = tokens.dim() == 2 and 0 not in tokens.shape if isinstance(shape, str) else tokens.shape == tuple(shape)
    if not fits:
        return f"{name} must be {shape if isinstance(shape, str) else list(shape)}, got {list(tokens.shape)}"
    outside = (tokens < 0) | (tokens >= vocab_size)
    outside = outside if ignored is None else outside & (tokens != ignored)
    if outside.any():
        besides = "" if ignored is None else f", or {ignored} for what does not count"
        return f"{name} must be numbers from 0 to {vocab_size - 1}{besides}, got {int(tokens[outside][0])}"
    return None


def next_labels(labels: Tensor, group: ProcessGroup | None, ignored: int = IGNORED) -> Tensor:
    """Shift labels by one token, across the borders of shards: ``[batch, seq/sp]`` to the same shape.

    The last token of a shard is to predict the first of the next rank's; the last of all has nothing to predict.
    """
    first = labels[:, 0].contiguous()  # [batch]
    following = torch.full_like(first, ignored)
    if degree(group) > 1:
        firsts = first.new_empty(degree(group) * len(first))
        dist.all_gather_single(firsts, first, group=group)
        following = torch.cat((firsts[len(first) :], following)).view(-1, len(first))[dist.get_rank(group)]
    return torch.cat((labels[:, 1:], following[:, None]), dim=1)


def token_mean(
    logits: Tensor,
    labels: Tensor,
    group: ProcessGroup | None,
    count: int | Tensor | None = None,
    ignored: int = IGNORED,
) -> Tensor:
    """Mean cross-entropy of all tokens on all ranks: logits ``[batch, seq/sp, vocab]``, labels ``[batch, seq/sp]``.

    The value, in fp32 at least, is the same on every rank. Backward gives each rank the part that its own tokens have
    in the gradient of that mean: the sum over ranks is the whole. ``count`` replaces the number of tokens that are not
    ``ignored``, for means over more than one batch.

    Raises ``ValueError`` on every rank where one has labels of another shape or outside the vocabulary, or where their
    counts differ.
    """
    problem = token_problem("labels", labels, logits.shape[-1], logits.shape[:-1], ignored)
    agree({"count": "none" if count is None else str(float(count))}, problem, group, logits.device)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), ignore_index=ignored, reduction="sum")
    if count is None:
        count = (labels != ignored).sum()
        if degree(group) > 1:
            dist.all_reduce(count, group=group)
    mean = total / count
    return mean if degree(group) == 1 else _Sum.apply(mean, group)


class _Sum(torch.autograd.Function):
    """The sum over ranks; backward hands each rank its own gradient, as the ranks' gradients are added up later."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
