"""A mixture-of-experts block whose experts are spread over the ranks that already share the sequence (paper §6).

Sequence parallelism splits the tokens; inside the block each token travels to the ranks that hold its experts
(*dispatch*) and back (*combine*), two all-to-alls with uneven counts. Routing is DeepSeek-V3's (arXiv 2412.19437,
eq. 12-15, without its bias): sigmoid scores, the top-k of them, normalised to sum to one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from .device import resolve_device
from .kernels.products import Linear
from .parallel import agree, all_reduce_gradients, degree
from .parallel.ledger import note


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Sizes of a mixture-of-experts block, under their Hugging Face names.

    ``capacity`` is how many tokens of one batch (over the whole sequence) an expert takes, first come first served;
    what is above it is dropped. ``None`` drops nothing.

    Raises ``ValueError`` or ``TypeError`` for a size that is no whole number of at least 1 (``n_shared_experts``: of at
    least 0), and where a token would need more experts than there are.
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 0
    capacity: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "capacity" and value is None:
                continue
            least = 0 if name == "n_shared_experts" else 1
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"ExpertConfig: {name} must be a whole number, got {value!r}")
            if value < least:
                raise ValueError(f"ExpertConfig: {name} must be at least {least}, got {value}")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"ExpertConfig: a token cannot go to num_experts_per_tok={self.num_experts_per_tok} of "
                f"n_routed_experts={self.n_routed_experts} experts; lower the one or raise the other"
            )


class ExpertGroups(NamedTuple):
    """Who shares what: the ranks that together hold every expert once, and the ranks that hold the same experts."""

    sequence: ProcessGroup | None = None
    experts: ProcessGroup | None = None
    replicas: ProcessGroup | None = None


def expert_groups(group: ProcessGroup | None, ep: int) -> ExpertGroups:
    """Split the ranks of ``group`` into blocks of ``ep`` neighbours, each of which holds all experts once.

    Call it once, on every rank of ``group``, and give the result to every block: it makes process groups.
    Raises ``ValueError`` on every rank where ``ep`` does not divide the degree of ``group``, or differs between ranks.
    """
    sp, problem = degree(group), None
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
        problem = f"expert parallel degree ep must be a whole number of at least 1, got {ep!r}"
    elif sp % ep:
        divisors = [d for d in range(1, sp + 1) if sp % d == 0]
        problem = f"ep={ep} does not divide the {sp} ranks of the group; choose ep among {divisors}"
    on_cpu = group is None or dist.get_backend(group) == "gloo"
    agree({"ep": repr(ep)}, problem, group, resolve_device("cpu" if on_cpu else None))
    if group is None or ep == 1:
        return ExpertGroups(group, None, group)
    if ep == sp:
        return ExpertGroups(group, group, None)
    ranks = dist.get_process_group_ranks(group)
    block, place = divmod(dist.get_rank(group), ep)
    new_group = partial(dist.new_group, use_local_synchronization=True)
    return ExpertGroups(group, new_group(ranks[block * ep : (block + 1) * ep]), new_group(ranks[place::ep]))


class MLP(nn.Module):
    """The gated feed-forward of DeepSeek: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden_size: int, intermediate_size: int, **where: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False, **where)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False, **where)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Which experts a token goes to, and with what weights."""

    def __init__(self, hidden_size: int, config: ExpertConfig, **where: Any) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, hidden_size, **where))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, hidden]`` to weights and expert numbers, both ``[n, top_k]``; weights in the dtype of the tokens."""
        scores = F.linear(tokens, self.weight).sigmoid()  # [n, experts]
        top, chosen = scores.topk(self.top_k, dim=-1)
        return top / top.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """The feed-forwards of ``count`` experts, of which the first has the number ``first`` among all."""

    def __init__(self, first: int, count: int, hidden_size: int, intermediate_size: int, **where: Any) -> None:
        super().__init__()
        self.first, self.count = first, count
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * intermediate_size, hidden_size, **where))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, intermediate_size, **where))

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """``[sum(counts), hidden]`` to the same shape: the first ``counts[0]`` rows by the first expert, and so on."""
        outputs = []
        for part, gate_up, down in zip(rows.split(counts), self.gate_up_proj, self.down_proj, strict=True):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)


class MoE(nn.Module):
    """A mixture of experts over the ranks of ``groups``; tokens ``[batch, seq/sp, hidden]`` to the same shape.

    Rank ``r`` of its expert group holds experts ``r * n/ep`` to ``(r + 1) * n/ep - 1``. The router and the shared
    experts are the same on every rank. After backward, :func:`reduce_gradients` completes the gradients.

    Raises ``TypeError`` without an :class:`ExpertConfig`, and ``ValueError`` where the experts cannot be split evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        config: ExpertConfig,
        groups: ExpertGroups | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, ExpertConfig):
            raise TypeError(f"MoE takes an ExpertConfig, got {type(config).__name__}")
        self.config, self.groups = config, groups or ExpertGroups()
        ep = degree(self.groups.experts)
        where: dict[str, Any] = {"dtype": dtype, "device": device}
        if config.n_routed_experts % ep:
            raise ValueError(
                f"{config.n_routed_experts} experts cannot be split evenly over ep={ep} ranks; "
                "choose ep among the divisors of n_routed_experts"
            )
        count = config.n_routed_experts // ep
        first = dist.get_rank(self.groups.experts) * count if self.groups.experts else 0
        self.gate = Router(hidden_size, config, **where)
        self.experts = Experts(first, count, hidden_size, config.moe_intermediate_size, **where)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(hidden_size, shared, **where) if shared else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Raises ``ValueError`` on every rank, before any token moves, where one has a wrong input or configuration."""
        self._check(hidden)
        tokens = hidden.flatten(0, 1)  # [n, hidden]
        weights, chosen = self.gate(tokens)  # [n, k] each
        top_k, experts = self.config.num_experts_per_tok, self.config.n_routed_experts

        number = chosen.flatten()  # expert of each of the n * k copies of tokens
        if self.config.capacity is not None:
            number = self._drop_surplus(number, hidden.shape[0])
        counts = number.bincount(minlength=experts + 1)[:experts]  # the last bin holds what is dropped
        order = number.argsort(stable=True)[: int(counts.sum())]  # copies in the order of their experts

        rows = self._through_experts(tokens[order // top_k], counts)  # [kept copies, hidden]
        copies = rows.new_zeros(len(number), rows.shape[1]).index_copy(0, order, rows)
        out = (copies.unflatten(0, (-1, top_k)) * weights.unsqueeze(-1)).sum(1).view_as(hidden)
        return out if self.shared_experts is None else out + self.shared_experts(hidden)

    def _through_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows in the order of their experts, ``counts`` of them for each expert of all, to their experts' outputs."""
        group = self.groups.experts
        if group is None:
            return self.experts(rows, counts.tolist())
        arriving = _exchange_counts(counts, group)  # [ep, experts/ep]: from each rank, for each expert here
        send, receive = counts.view_as(arriving).sum(1).tolist(), arriving.sum(1).tolist()

        rows = _ExchangeRows.apply(rows, send, receive, group, "expert_dispatch")
        # Rows come by rank, then by expert; the experts want them by expert.
        number = torch.arange(self.experts.count, device=rows.device).repeat(len(arriving))
        order = number.repeat_interleave(arriving.flatten()).argsort(stable=True)
        rows = self.experts(rows[order], arriving.sum(0).tolist())
        rows = torch.empty_like(rows).index_copy(0, order, rows)
        return _ExchangeRows.apply(rows, receive, send, group, "expert_combine")

    def _drop_surplus(self, number: Tensor, batch: int) -> Tensor:
        """Give copies above their expert's capacity the number ``n_routed_experts``, which is no expert.

        Places in the queue follow the whole batch in its own order, so that the outcome does not depend on sp.
        """
        group, experts = self.groups.sequence, self.config.n_routed_experts
        ours = F.one_hot(number, experts).view(batch, -1, experts)  # [batch, copies a sequence here, experts]
        totals = ours.sum(1)  # [batch, experts]
        everyone = totals.new_empty(degree(group) * batch, experts)
        if degree(group) == 1:
            everyone.copy_(totals)
        else:
            note("expert_counts", "forward", wire_bytes=(degree(group) - 1) * totals.nbytes, paper_bytes=totals.nbytes)
            dist.all_gather_single(everyone, totals, group=group)
        queue = everyone.view(-1, batch, experts).transpose(0, 1).flatten(0, 1)  # [batch * sp, experts]
        before = (queue.cumsum(0) - queue).view(batch, -1, experts)[:, dist.get_rank(group) if group else 0]
        place = (before.unsqueeze(1) + ours.cumsum(1)).flatten(0, 1).gather(1, number.unsqueeze(1)).squeeze(1)
        return number.where(place <= int(self.config.capacity or 0), experts)

    def _check(self, hidden: Tensor) -> None:
        size, dtype, device = self.gate.weight.shape[1], self.gate.weight.dtype, self.gate.weight.device
        problem, batch = f"hidden must be [batch, seq/sp, {size}] of {dtype}, got {type(hidden).__name__}", 0
        if isinstance(hidden, Tensor):
            problem = f"hidden must be [batch, seq/sp, {size}] of {dtype}, got {list(hidden.shape)} of {hidden.dtype}"
            if hidden.dim() == 3 and hidden.shape[-1] == size and hidden.dtype == dtype:
                problem, batch = "", hidden.shape[0]
        # Ranks on a device check once for each new batch: a check at every step would hold back the host.
        if not problem and device.type != "cpu" and self._checked == batch:
            return
        agree({"batch": batch, "configuration": str(self.config)}, problem or None, self.groups.sequence, device)
        self._checked = batch

    _checked: int | None = None


def reduce_gradients(module: nn.Module, group: ProcessGroup | None) -> None:
    """:func:`laga_core.all_reduce_gradients` for a module with experts in it; without a group nothing is to be done.

    Gradients of experts are summed over the ranks that hold the same experts, all others over ``group`` (§6: "the two
    compose by summation").
    """
    if group is None:
        return
    blocks = [block for block in module.modules() if isinstance(block, MoE)]
    apart = {parameter for block in blocks for parameter in block.experts.parameters()}
    all_reduce_gradients(nn.ParameterList(p for p in module.parameters() if p not in apart), group)
    for block in blocks:
        if block.groups.replicas is not None:
            all_reduce_gradients(block.experts, block.groups.replicas)


def _exchange_counts(counts: Tensor, group: ProcessGroup) -> Tensor:
    """Tell every rank how many rows will come for each of its experts: ``[experts]`` to ``[ep, experts/ep]``."""
    ep = degree(group)
    sent = counts.nbytes // ep * (ep - 1)
    note("expert_counts", "forward", wire_bytes=sent, paper_bytes=2 * sent)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    return arriving.view(ep, -1)


class _ExchangeRows(torch.autograd.Function):
    """All-to-all of ``[sum(send), hidden]`` to ``[sum(receive), hidden]``, rows in rank order, and its inverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup, name: str) -> Tensor:
        ctx.send, ctx.receive, ctx.group, ctx.name = send, receive, group, name
        return _exchange_rows(rows, send, receive, group, name, "forward")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = _exchange_rows(grad, ctx.receive, ctx.send, ctx.group, ctx.name, "backward")
        return grad, None, None, None, None


def _exchange_rows(
    rows: Tensor, send: list[int], receive: list[int], group: ProcessGroup, name: str, direction: str
) -> Tensor:
    away = (sum(send) - send[dist.get_rank(group)]) * rows.shape[1] * rows.element_size()
    note(name, direction, wire_bytes=away, paper_bytes=2 * away)
    received = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=group)
    return received
