"""One case of a form: drawn by its seed alike on every rank, run on ranks, compared with the oracle in the parent."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import oracle
import torch
import torch.distributed as dist
from torch import Tensor

from laga_core import MLAAttention, MLAConfig, all_reduce_gradients
from laga_core.forms import FORMS
from laga_core.parallel import degree

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("explicit", {"key_rope": "replicated"}),
    ("explicit", {"key_rope": "headless"}),
    ("absorbed", {"score": "joint"}),
    ("absorbed", {"score": "split"}),
    ("laga", {}),
]
"""Every form with every value of its options."""

assert {form for form, _ in VARIANTS} <= set(FORMS)


@dataclass(frozen=True)
class Case:
    config: MLAConfig
    form: str
    options: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    seq: int = 16
    dtype: torch.dtype = torch.float64
    seed: int = 0
    order: str = "default"  # of the tokens over the ranks: default, contiguous, zigzag, shuffled
    strided: bool = False  # whether input and incoming gradient are views with unusual strides

    def __str__(self) -> str:
        size = {k: v for k, v in asdict(self.config).items() if v is not None}
        return f"{self.form} {self.options} {self.batch}x{self.seq} {self.dtype} {self.order} {self.strided=} {size}"

    def drawn(self) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Weights, input and incoming gradient ``[batch, seq, hidden]``, in this case's dtype."""
        source = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, dtype=torch.float64)

        weights = {}
        for name, weight in MLAAttention(self.config, device="meta").state_dict().items():
            if "norm" in name:
                weights[name] = float(name.endswith("weight")) + 0.2 * normal(*weight.shape)
            else:
                weights[name] = normal(*weight.shape) / weight.shape[1] ** 0.5
        hidden, cotangent = (normal(self.batch, self.seq, self.config.hidden_size) for _ in range(2))
        return {k: v.to(self.dtype) for k, v in weights.items()}, hidden.to(self.dtype), cotangent.to(self.dtype)

    def positions(self, sp: int) -> Tensor:
        """Global positions of the tokens in the order in which the ranks hold them, ``[seq]``."""
        if self.order == "shuffled":
            return torch.randperm(self.seq, generator=torch.Generator().manual_seed(self.seed))
        pieces = torch.arange(self.seq).tensor_split(2 * sp)
        if self.order == "zigzag":  # rank r holds pieces r and 2 sp - 1 - r, which evens out the causal work
            return torch.cat([p for r in range(sp) for p in (pieces[r], pieces[2 * sp - 1 - r])])
        return torch.arange(self.seq)


def run(group: Any, cases: list[Case]) -> list[dict[str, Tensor]]:
    """Each case on this rank: output and input gradient of its tokens, and the reduced gradients of all parameters."""
    return [_run(group, case) for case in cases]


def _run(group: Any, case: Case) -> dict[str, Tensor]:
    weights, hidden, cotangent = case.drawn()
    sp = degree(group)
    rank = dist.get_rank(group) if sp > 1 else 0
    mine = slice(rank * case.seq // sp, (rank + 1) * case.seq // sp)
    positions = case.positions(sp)[mine]
    x, dy = hidden[:, case.positions(sp)][:, mine], cotangent[:, case.positions(sp)][:, mine]
    if case.strided:
        x, dy = x.transpose(0, 2).contiguous().transpose(0, 2), torch.stack((dy, dy), -1)[..., 0]
    module = MLAAttention(case.config, form=case.form, group=group, dtype=case.dtype, **case.options)
    module.load_state_dict(weights, strict=True)
    x.requires_grad_()
    out = module(x) if case.order == "default" else module(x, positions)
    out.backward(dy)
    if group is not None:
        all_reduce_gradients(module, group)
    return {"out": out.detach(), "hidden": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def assembled(case: Case, shards: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole result from the ranks' shards, tokens by position; checks that the ranks hold equal gradients."""
    first = shards[0]
    for rank, shard in enumerate(shards):
        for name in first:
            alike = name in ("out", "hidden") or torch.equal(shard[name], first[name])
            assert alike, f"rank {rank} holds another gradient of {name} than rank 0: {case}"
    order = case.positions(len(shards)).argsort()
    whole = {name: torch.cat([shard[name] for shard in shards], 1)[:, order] for name in ("out", "hidden")}
    return {**first, **whole}


def expected(case: Case) -> dict[str, Tensor]:
    """What the oracle says, in fp64."""
    weights, hidden, cotangent = case.drawn()
    return oracle.gradients(weights, hidden, cotangent, case.config)


def worst_error(actual: dict[str, Tensor], wanted: dict[str, Tensor], floor: float = 1e-3) -> tuple[float, str]:
    """The largest error relative to the largest element of its tensor, and where; names must be the same.

    A tensor that is zero but for rounding (the query's gradient where there is one key) counts as ``floor`` of the
    largest of all.
    """
    assert actual.keys() == wanted.keys(), f"{sorted(actual)} against {sorted(wanted)}"
    least = floor * max(want.abs().max().item() for want in wanted.values())
    errors = []
    for name, want in wanted.items():
        assert actual[name].shape == want.shape, f"{name}: {list(actual[name].shape)} against {list(want.shape)}"
        error = (actual[name].double() - want.double()).abs().max().item()
        errors.append((error / max(want.abs().max().item(), least) if error == error else float("inf"), name))
    return max(errors)
