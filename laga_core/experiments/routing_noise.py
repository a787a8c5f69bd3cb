"""Does routing amplify rounding? Two runs that differ in the order of summation only (paper §8).

On a CPU a matrix product always sums in the same order, so the noise is supplied: every product is cut along the
dimension that is summed over, and the pieces are added in an order that is drawn anew at each call (*split-K* in a
random order, as a device does whose blocks finish when they finish). Nothing else differs, and any order is as right as
any other. With the order fixed, the same program repeats itself bit for bit.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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

EXPERIMENT, TIES = "routing_noise", "near_ties"
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

NEAR = 0.005
"""Below this a gap between two scores counts as near, in the estimate of how many gaps lie at zero."""


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

    Returns ``loss`` in nats, formed in fp64 from the model's fp32 logits. Of a model that chooses also ``choices``, the
    experts of every token, ``[steps, layers, tokens, top_k]``, sorted, and ``gaps``, by how much the last expert chosen
    leads the first one left out, ``[steps, layers, tokens]``; ``None`` otherwise.
    """
    config = model_config(model, hidden, layers, experts, top_k)
    trainer = Trainer(LanguageModel(config, seed=seed), lr=lr)
    choices: list[Tensor] = []
    gaps: list[Tensor] = []
    logits: list[Tensor] = []
    for module in trainer.model.modules():
        if isinstance(module, Router) and module.top_k < experts:
            module.register_forward_hook(lambda _, __, out: choices.append(out[1].sort(-1).values))
            module.register_forward_hook(lambda router, given, _: gaps.append(_gap(router, given[0])))
    trainer.model.register_forward_hook(lambda _, __, out: logits.append(out.detach().double()))
    source = torch.Generator().manual_seed(seed)
    table = torch.randint(config.vocab_size, (config.vocab_size, 4), generator=source)
    loss = []
    with SplitK(order, pieces):
        for _ in range(steps):
            tokens = chain(table, seq + 1, source)
            trainer.step(tokens)
            loss.append(torch.nn.functional.cross_entropy(logits.pop()[0], tokens[0, 1:]).item())
    shape = (steps, layers, seq)
    found = {"choices": torch.stack(choices).view(*shape, -1), "gaps": torch.stack(gaps).view(shape)} if choices else {}
    return {"loss": loss, "choices": None, "gaps": None, **found}


def _gap(router: Router, tokens: Tensor) -> Tensor:
    """Score of the last expert chosen less that of the next, ``[n]`` in fp64; no product that :class:`SplitK` sees."""
    tokens, weight = tokens.detach().double(), router.weight.detach().double()
    best = (tokens[:, None] * weight).sum(-1).sigmoid().topk(router.top_k + 1).values
    return best[:, -2] - best[:, -1]


def pair(model: str, seed: int, noise: bool = True, **sizes: Any) -> dict[str, Any]:
    """Two runs of the same seed, with two orders of summation each of its own, or with ``noise=False`` one for both.

    Returns ``loss`` of the first run, ``difference`` of the second from it at each step, ``flipped`` tokens (those sent
    to other experts in any layer) at each step, ``first_flip`` (a step) and the ``jump`` there: the difference over the
    median of the ten steps before. ``None`` where there is no flip.
    """
    one, other = (run(model, 2 * seed + i if noise else None, seed, **SIZES | sizes) for i in range(2))
    difference = [abs(a - b) for a, b in zip(one["loss"], other["loss"], strict=True)]
    flipped, first = _flips(one, other)
    return {
        "loss": one["loss"],
        "difference": difference,
        "flipped": flipped,
        "first_flip": first,
        "jump": None if first is None else growth(difference, first),
    }


def growth(difference: Sequence[float], step: int) -> float | None:
    """The difference at a step over the median of the ten before, those of exactly zero left out; ``None`` for none."""
    before = [d for d in difference[max(step - 10, 0) : step] if d]
    return difference[step] / statistics.median(before) if before else None


def _flips(one: dict[str, Any], other: dict[str, Any]) -> tuple[list[int], int | None]:
    """Tokens that two runs send to other experts, in any layer, at each step, and the first step that has one."""
    if one["choices"] is None:
        return [0] * len(one["loss"]), None
    moved = (one["choices"] != other["choices"]).any(-1)  # [steps, layers, tokens]
    flipped = moved.any(1).sum(1).tolist()
    return flipped, next((step for step, count in enumerate(flipped) if count), None)


def ties(seed: int, **sizes: Any) -> dict[str, Any]:
    """How many flips two runs with experts should have had before their first, if rounding moves gaps at random.

    Of ``decisions`` a step, ``density`` is the share whose gap is near, for each unit of gap, and ``moved`` the mean
    distance between a gap in one run and in the other; lists over the steps before ``first_flip``. Half of the moves
    go down, so decisions × density × moved / 2 flips a step are to be ``expected``: the sum over those steps.
    """
    one, other = (run("experts", 2 * seed + i, seed, **SIZES | sizes) for i in range(2))
    first = _flips(one, other)[1]
    gaps, others = (each["gaps"][:first].flatten(1) for each in (one, other))  # [steps before, decisions]
    density, moved = (gaps < NEAR).double().mean(1) / NEAR, (gaps - others).abs().mean(1)
    decisions = gaps.shape[1]
    return {
        "decisions": decisions,
        "first_flip": first,
        "density": density.tolist(),
        "moved": moved.tolist(),
        "expected": (decisions * density * moved / 2).sum().item(),
    }


def near_ties(
    store: Store, seeds: Sequence[int] = range(8), workers: int = 2, timeout: float = 3600.0, **sizes: Any
) -> list[Record]:
    """A measured record of each seed with the metrics of :func:`ties`. One thread a worker."""
    cells = [{"seed": seed, **SIZES, "steps": 150, **sizes} for seed in seeds]
    return _measure(store, TIES, ties, cells, workers, timeout)


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
    return _measure(store, EXPERIMENT, pair, cells, workers, timeout)


def _measure(
    store: Store,
    experiment: str,
    measurement: Callable[..., dict[str, Any]],
    cells: list[dict[str, Any]],
    workers: int,
    timeout: float,
) -> list[Record]:
    nproc = min(workers, len(cells))
    found = launch(_share, measurement, cells, nproc=nproc, device="cpu", threads_per_rank=1, timeout=timeout)
    metrics = {number: result for share in found for number, result in share.items()}
    where = provenance(device="cpu")
    records = [
        Record(experiment=experiment, kind="measured", parameters=cell, metrics=metrics[number], provenance=where)
        for number, cell in enumerate(cells)
    ]
    for record in records:
        store.write(record)
    return records


def _share(measurement: Callable[..., dict[str, Any]], cells: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Every n-th cell, on the n-th of n workers."""
    own = range(dist.get_rank(), len(cells), dist.get_world_size())
    return {number: measurement(**cells[number]) for number in own}


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


def foreseen(records: Iterable[Record]) -> list[dict[str, Any]]:
    """A row a seed of :func:`near_ties`, means over its steps, and a last one with the sums over all seeds."""
    rows = [
        {
            "seed": record.parameters["seed"],
            "steps": len(record.metrics["density"]),
            **{name: statistics.fmean(record.metrics[name]) for name in ("density", "moved")},
            "expected": record.metrics["expected"],
            "flips": int(record.metrics["first_flip"] is not None),
        }
        for record in sorted(records, key=lambda record: record.parameters["seed"])
    ]
    total = {name: sum(row[name] for row in rows) for name in ("steps", "expected", "flips")}
    mean = {name: sum(row[name] * row["steps"] for row in rows) / total["steps"] for name in ("density", "moved")}
    return [*rows, {"seed": "all", **total, **mean}]


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
