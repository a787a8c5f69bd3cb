"""Laga and expert parallelism over the same ranks: right answers, and collectives that keep apart (paper §6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ..config import MLAConfig
from ..experts import ExpertConfig, Experts, MoE, expert_groups, reduce_gradients
from ..launch import launch
from ..loss import token_mean
from ..model import LanguageModel, ModelConfig
from ..parallel import Ledger, record_bytes
from ..results import Record, Store, provenance
from ..training import shard

EXPERIMENT = "experts"
ROUTINGS = ("as drawn", "an idle expert", "all to one expert", "capacity")
"""How the tokens of the block alone are spread; *capacity* lets an expert take 7 tokens, fewer than want to go."""


def model_config(experts: int = 8, top_k: int = 3, layers: int = 3) -> ModelConfig:
    """A small model whose first block is dense."""
    routed = ExpertConfig(
        n_routed_experts=experts, num_experts_per_tok=top_k, moe_intermediate_size=24, n_shared_experts=1
    )
    return ModelConfig(
        attention=MLAConfig.preset("toy"),
        vocab_size=64,
        num_hidden_layers=layers,
        intermediate_size=96,
        experts=routed,
        first_k_dense_replace=1,
        initializer_range=0.2,
    )


def sweep(
    store: Store,
    sp: int = 4,
    degrees: Sequence[int] = (1, 2, 4),
    form: str = "laga",
    batch: int = 2,
    seq: int = 36,
    experts: int = 8,
    top_k: int = 3,
    layers: int = 3,
    seed: int = 0,
    timeout: float = 300.0,
) -> list[Record]:
    """The whole model on ``sp`` ranks, at each expert parallel degree, against one process that has no ranks, in fp64.

    Metrics of a record: ``loss_error`` and ``gradient_error``, the largest absolute deviations (of any gradient of any
    parameter); ``schedule``, the collectives of one rank in the order of the calls, each with its layer;
    ``interleaved``, how many of attention's and of experts' are out of their place (:func:`interleaved`).
    """
    size = {"form": form, "batch": batch, "seq": seq, "experts": experts, "top_k": top_k, "layers": layers}
    cells = [{"sp": sp, "ep": ep, **size, "seed": seed} for ep in degrees]
    found = launch(_run_cells, cells, nproc=sp, device="cpu", threads_per_rank=1, timeout=timeout)
    where = provenance(device="cpu", backend="gloo", ranks=sp)
    records = []
    for number, cell in enumerate(cells):
        loss, gradients, _ = _step(None, cell)
        ranks = [rank[number] for rank in found]
        schedule = ranks[0]["schedule"]
        metrics = {
            "loss_error": max(abs(rank["loss"] - loss) for rank in ranks),
            "gradient_error": max(_worst(rank["gradients"], gradients) for rank in ranks),
            "schedule": schedule,
            "interleaved": interleaved(schedule),
        }
        records.append(
            Record(experiment=EXPERIMENT, kind="measured", parameters=cell, metrics=metrics, provenance=where)
        )
        store.write(records[-1])
    return records


def block(
    sp: int = 4, degrees: Sequence[int] = (1, 2, 4), seed: int = 0, timeout: float = 120.0
) -> list[dict[str, Any]]:
    """The block alone under each routing, 2 sequences of 20 tokens to 3 of 8 experts, against one dense process, fp64.

    The dense process sends every token through every expert and weights what the router did not choose by zero. Rows
    with ``routing``, ``tokens`` of each expert, ``ep``, and the largest absolute ``error`` of output and any gradient.
    """
    found = launch(_run_blocks, degrees, seed, nproc=sp, device="cpu", threads_per_rank=1, timeout=timeout)
    rows = []
    for routing in ROUTINGS:
        want, tokens = dense_block(*_block_case(routing, seed))
        for ep in degrees:
            ranks = [rank[ep][routing] for rank in found]
            whole = {name: torch.cat([rank.pop(name) for rank in ranks], dim=1) for name in ("output", "input")}
            error = max(_worst(result, want) for result in (whole, *ranks))
            rows.append({"routing": routing, "tokens": tokens, "ep": ep, "error": error})
    return rows


def interleaved(schedule: Sequence[dict[str, Any]]) -> int:
    """How many calls belong to another part of the model than the one that is running, or return to one that was left.

    A call's own name says whose it is (``expert_dispatch``, …); which part is running, the model's modules say.
    """
    strays = sum(call["collective"].startswith("expert") != (call["running"] == "experts") for call in schedule)
    places = [(call["direction"], call["layer"], call["running"]) for call in schedule]
    runs = [place for number, place in enumerate(places) if number == 0 or place != places[number - 1]]
    return strays + len(runs) - len(set(runs))


def dense_block(
    config: ExpertConfig, weights: dict[str, Tensor], hidden: Tensor, cotangent: Tensor
) -> tuple[dict[str, Tensor], list[int]]:
    """Output, gradients (experts one by one) and tokens of each expert, with every token through every expert."""
    weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    hidden = hidden.clone().requires_grad_()
    tokens, count = hidden.flatten(0, 1), config.n_routed_experts
    scores = torch.sigmoid(tokens @ weights["gate"].T)
    top, chosen = scores.topk(config.num_experts_per_tok)
    weight_of = torch.zeros_like(scores).scatter(1, chosen, top / top.sum(1, keepdim=True))  # [n, experts]
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    if config.capacity is not None:
        taken &= taken.cumsum(0) <= config.capacity
    out = torch.zeros_like(tokens)
    for number in range(count):
        gate, up = (tokens @ weights[f"gate_up_proj.{number}"].T).chunk(2, dim=-1)
        expert = (nn.functional.silu(gate) * up) @ weights[f"down_proj.{number}"].T
        out = out + expert * (weight_of[:, number] * taken[:, number])[:, None]
    out = out.view_as(hidden)
    out.backward(cotangent)
    results = {"output": out.detach(), "input": hidden.grad, **{name: w.grad for name, w in weights.items()}}
    return {name: result for name, result in results.items() if result is not None}, taken.sum(0).tolist()


def _step(group: ProcessGroup | None, cell: dict[str, Any]) -> tuple[float, dict[str, Tensor], list[dict[str, Any]]]:
    """Loss, gradients (of this rank's experts one by one) and collectives of one step."""
    config = model_config(cell["experts"], cell["top_k"], cell["layers"])
    ep = 1 if group is None else cell["ep"]
    model = LanguageModel(config, cell["form"], group=group, ep=ep, seed=cell["seed"], dtype=torch.float64)
    source = torch.Generator().manual_seed(cell["seed"])
    tokens = torch.randint(config.vocab_size, (cell["batch"], cell["seq"] + 1), generator=source)
    with record_bytes() as ledger:
        marks = _Marks(model, ledger)
        loss = token_mean(model(shard(tokens[:, :-1], group)), shard(tokens[:, 1:], group), group)
        loss.backward()
    reduce_gradients(model, group)
    return loss.item(), _gradients(model), marks.schedule()


def _run_cells(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results = []
    for cell in cells:
        loss, gradients, schedule = _step(dist.group.WORLD, cell)
        results.append({"loss": loss, "gradients": gradients, "schedule": schedule})
    return results


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every gradient by name, with those of experts one by one under the expert's number."""
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if isinstance(module, Experts):
                found.update({f"{prefix}.{name}.{module.first + place}": one for place, one in enumerate(grad)})
            else:
                found[f"{prefix}.{name}"] = grad
    return found


class _Marks:
    """Where in the ledger each block's attention and feed-forward begin, forward and backward."""

    def __init__(self, model: LanguageModel, ledger: Ledger) -> None:
        self.ledger, self.marks = ledger, [(0, -1, "none")]
        for layer, block in enumerate(model.layers):
            parts: tuple[tuple[str, Any], ...] = (("attention", block.self_attn), ("experts", block.mlp))
            for part, module in parts:
                mark = partial(self._mark, layer, part)
                module.register_forward_pre_hook(mark)
                module.register_full_backward_pre_hook(mark)

    def _mark(self, layer: int, part: str, *_: Any) -> None:
        self.marks.append((len(self.ledger.entries), layer, part))

    def schedule(self) -> list[dict[str, Any]]:
        """Each call with its layer and the part of it that was running."""
        calls = []
        for number, entry in enumerate(self.ledger.entries):
            _, layer, running = [mark for mark in self.marks if mark[0] <= number][-1]
            calls.append({**asdict(entry), "layer": layer, "running": running})
        return calls


def _run_blocks(degrees: Sequence[int], seed: int) -> dict[int, dict[str, dict[str, Tensor]]]:
    return {ep: _run_block(ep, seed) for ep in degrees}


def _run_block(ep: int, seed: int) -> dict[str, dict[str, Tensor]]:
    group = dist.group.WORLD
    groups = expert_groups(group, ep)
    results = {}
    for routing in ROUTINGS:
        config, weights, hidden, cotangent = _block_case(routing, seed)
        moe = MoE(hidden.shape[-1], config, groups, dtype=torch.float64)
        with torch.no_grad():
            moe.gate.weight.copy_(weights["gate"])
            for place in range(moe.experts.count):
                for name, stacked in moe.experts.named_parameters():
                    stacked[place].copy_(weights[f"{name}.{moe.experts.first + place}"])
        x = shard(hidden, group).clone().requires_grad_()
        out = moe(x)
        out.backward(shard(cotangent, group))
        reduce_gradients(moe, group)
        gradients = {name.removeprefix("experts."): grad for name, grad in _gradients(moe).items()}
        gradients["gate"] = gradients.pop("gate.weight")
        assert x.grad is not None
        results[routing] = {"output": out.detach(), "input": x.grad, **gradients}
    return results


def _block_case(routing: str, seed: int) -> tuple[ExpertConfig, dict[str, Tensor], Tensor, Tensor]:
    """Configuration, weights, input and incoming gradient. The first element of every token is 1, for the router."""
    source = torch.Generator().manual_seed(seed)
    batch, seq, size, experts, width = 2, 20, 16, 8, 12
    config = ExpertConfig(
        n_routed_experts=experts,
        num_experts_per_tok=1 if routing == "all to one expert" else 3,
        moe_intermediate_size=width,
        capacity=7 if routing == "capacity" else None,
    )

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source, dtype=torch.float64)

    weights = {"gate": 0.3 * normal(experts, size)}
    for number in range(experts):
        weights[f"gate_up_proj.{number}"] = normal(2 * width, size) / size**0.5
        weights[f"down_proj.{number}"] = normal(size, width) / width**0.5
    hidden, cotangent = normal(batch, seq, size), normal(batch, seq, size)
    hidden[..., 0] = 1.0
    if routing == "an idle expert":
        weights["gate"][5, 0] = -20.0
    if routing == "all to one expert":
        weights["gate"][2, 0] = 20.0
    return config, weights, hidden, cotangent


def _worst(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest absolute deviation of what was found."""
    return max((found[name] - wanted[name]).abs().max().item() for name in found)
