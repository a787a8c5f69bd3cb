"""Does routing amplify rounding? Two runs that differ in the order of summation only (paper §8).

On a CPU a matrix product always sums in the same order, so the noise is supplied: every product is cut along the
dimension that is summed over, and the pieces are added in an order that is drawn anew at each call (*split-K* in a
random order, as a device does whose blocks finish when they finish). Nothing else differs, and any order is as right as
any other. With the order fixed, the same program repeats itself bit for bit.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..config import MLAConfig
from ..experts import ExpertConfig, Router
from ..launch import launch
from ..model import LanguageModel, ModelConfig
from ..results import Record, Store, provenance
from ..training import Trainer

EXPERIMENT = "routing_noise"
MODELS = ("experts", "every expert", "dense")
PAPER = {"moe_over_dense": 16, "jump": 1000}
"""What the paper reports (§8): by how much experts diverge more than dense, and the step at the first routing flip."""

LABELS = {"moe_over_dense": "divergence, experts / dense", "jump": "jump at the first flip"}

SIZES: dict[str, Any] = {
    "steps": 200,
    "seq": 256,
    "hidden": 64,
    "layers": 2,
    "experts": 16,
    "top_k": 2,
    "lr": 2e-2,
    "pieces": 4,
}
"""What a run takes unless told otherwise."""


class SplitK(TorchDispatchMode):
    """Sum every matrix product, forward and backward, in ``pieces`` partial products added in a drawn order.

    ``seed=None`` keeps the pieces in their natural order. Three pieces at least: a sum of two has only one order.
    """

    def __init__(self, seed: int | None, pieces: int = 4) -> None:
        if pieces < 3:
            raise ValueError(f"pieces must be at least 3, since a sum of two has only one order, got {pieces}")
        super().__init__()
        self.pieces = pieces
        self.source = None if seed is None else torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and not kwargs:
            return self.product(*args)
        return func(*args, **(kwargs or {}))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b`` for two matrices or two stacks of them."""
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        parts = [multiply(x, y) for x, y in zip(a.chunk(self.pieces, -1), b.chunk(self.pieces, -2), strict=True)]
        order = range(len(parts)) if self.source is None else torch.randperm(len(parts), generator=self.source).tolist()
        return functools.reduce(torch.add, [parts[i] for i in order])


def model_config(model: str, hidden: int = 64, layers: int = 2, experts: int = 16, top_k: int = 2) -> ModelConfig:
    """Three models of one size: routed experts; the same without a choice, each token to every expert; one wide MLP."""
    if model not in MODELS:
        raise ValueError(f"unknown model {model!r}; known: {', '.join(MODELS)}")
    attention = MLAConfig(
        hidden_size=hidden,
        num_attention_heads=4,
        q_lora_rank=None,
        kv_lora_rank=hidden // 4,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    width = hidden // 4  # of one expert
    routed = ExpertConfig(
        n_routed_experts=experts,
        num_experts_per_tok=top_k if model == "experts" else experts,
        moe_intermediate_size=width,
    )
    return ModelConfig(
        attention=attention,
        vocab_size=256,
        num_hidden_layers=layers,
        intermediate_size=experts * width,
        experts=None if model == "dense" else routed,
    )


def chain(table: Tensor, length: int, source: torch.Generator) -> Tensor:
    """A walk ``[1, length]`` in which each token is followed by one of those in its row of ``table``."""
    turns = torch.randint(table.shape[1], (length,), generator=source).tolist()
    rows, walk = table.tolist(), [0]
    for turn in turns[1:]:
        walk.append(rows[walk[-1]][turn])
    return torch.tensor([walk])


def run(
    model: str,
    order: int | None,
    seed: int,
    *,
    steps: int,
    seq: int,
    hidden: int,
    layers: int,
    experts: int,
    top_k: int,
    lr: float,
    pieces: int,
) -> dict[str, Any]:
    """Train on random walks, a new one at each step; ``order`` seeds the order of summation (``None``: fixed).

    Returns ``loss`` in nats, formed in fp64 from the model's fp32 logits, and ``choices``, the experts of every token:
    ``[steps, layers, tokens, top_k]``, sorted, or ``None``.
    """
    config = model_config(model, hidden, layers, experts, top_k)
    trainer = Trainer(LanguageModel(config, seed=seed), lr=lr)
    choices: list[Tensor] = []
    logits: list[Tensor] = []
    for module in trainer.model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, out: choices.append(out[1].sort(-1).values))
    trainer.model.register_forward_hook(lambda _, __, out: logits.append(out.detach().double()))
    source = torch.Generator().manual_seed(seed)
    table = torch.randint(config.vocab_size, (config.vocab_size, 4), generator=source)
    loss = []
    with SplitK(order, pieces):
        for _ in range(steps):
            tokens = chain(table, seq + 1, source)
            trainer.step(tokens)
            loss.append(torch.nn.functional.cross_entropy(logits.pop()[0], tokens[0, 1:]).item())
    shape = (steps, layers, seq, -1)
    return {"loss": loss, "choices": torch.stack(choices).view(shape) if choices else None}


def pair(model: str, seed: int, noise: bool = True, **sizes: Any) -> dict[str, Any]:
    """Two runs of the same seed, with two orders of summation each of its own, or with ``noise=False`` one for both.

    Returns ``loss`` of the first run, ``difference`` of the second from it at each step, ``flipped`` tokens (those sent
    to other experts in any layer) at each step, ``first_flip`` (a step) and the ``jump`` there: the difference over the
    median of the ten steps before. ``None`` where there is no flip.
    """
    one, other = (run(model, 2 * seed + i if noise else None, seed, **SIZES | sizes) for i in range(2))
    difference = [abs(a - b) for a, b in zip(one["loss"], other["loss"], strict=True)]
    flipped = [0] * len(difference)
    if one["choices"] is not None:
        moved = (one["choices"] != other["choices"]).any(-1)  # [steps, layers, tokens]
        flipped = moved.any(1).sum(1).tolist()
    first = next((step for step, count in enumerate(flipped) if count), None)
    before = [d for d in difference[max(first - 10, 0) : first] if d] if first else []
    return {
        "loss": one["loss"],
        "difference": difference,
        "flipped": flipped,
        "first_flip": first,
        "jump": difference[first] / statistics.median(before) if first is not None and before else None,
    }


def sweep(
    store: Store,
    seeds: Sequence[int] = range(6),
    models: Sequence[str] = MODELS,
    noise: bool = True,
    workers: int = 2,
    timeout: float = 3600.0,
    **sizes: Any,
) -> list[Record]:
    """A measured record of each model and seed; the metrics are those of :func:`pair`. One thread a worker."""
    cells = [{"model": m, "seed": s, "noise": noise, **SIZES, **sizes} for s in seeds for m in models]
    found = launch(_share, cells, nproc=min(workers, len(cells)), device="cpu", threads_per_rank=1, timeout=timeout)
    metrics = {number: result for share in found for number, result in share.items()}
    where = provenance(device="cpu")
    records = [
        Record(experiment=EXPERIMENT, kind="measured", parameters=cell, metrics=metrics[number], provenance=where)
        for number, cell in enumerate(cells)
    ]
    for record in records:
        store.write(record)
    return records


def _share(cells: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Every n-th cell, on the n-th of n workers."""
    own = range(dist.get_rank(), len(cells), dist.get_world_size())
    return {number: pair(**cells[number]) for number in own}


def factors(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row a seed: the mean difference of each model, ``moe_over_dense``, ``first_flip`` and ``jump``."""
    by_seed: dict[int, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        if record.parameters["noise"]:
            by_seed.setdefault(record.parameters["seed"], {})[record.parameters["model"]] = record.metrics
    rows = []
    for seed, metrics in sorted(by_seed.items()):
        mean = {model: statistics.fmean(m["difference"]) for model, m in metrics.items()}
        rows.append(
            {
                "seed": seed,
                **mean,
                "moe_over_dense": mean["experts"] / mean["dense"],
                "first_flip": metrics["experts"]["first_flip"],
                "jump": metrics["experts"]["jump"],
            }
        )
    return rows


def beside_the_paper(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The two factors: as reported, and ours as median, least and most over the seeds."""
    result = []
    for name, reported in PAPER.items():
        values = [row[name] for row in rows if row[name] is not None]
        if values:
            spread = {"median": statistics.median(values), "least": min(values), "most": max(values)}
            result.append({"factor": LABELS[name], "reported": reported, **spread, "seeds": len(values)})
    return result


def rounding(size: int = 256, pieces: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """How wrong a product of two random fp32 matrices is under each order of summation.

    Rows with ``error``, the root mean square against fp64 in units of that of the elements, and ``differ``, the share
    of elements that are not bit for bit those of the natural order.
    """
    source = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(size, size, generator=source) for _ in range(2))
    exact, natural = a.double() @ b.double(), SplitK(None, pieces).product(a, b)
    products = {
        "one piece, PyTorch's own order": a @ b,
        "pieces in their natural order": natural,
        "pieces in a drawn order": SplitK(1, pieces).product(a, b),
        "pieces in another": SplitK(2, pieces).product(a, b),
    }
    return [
        {
            "product": name,
            "error": ((product - exact).norm() / exact.norm()).item(),
            "differ": (product != natural).double().mean().item(),
        }
        for name, product in products.items()
    ]
