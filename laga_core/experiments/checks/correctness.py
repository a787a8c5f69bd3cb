"""Claims that the forms compute the same: run here where one process can tell, read from records of real ranks else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ...attention import MLAAttention
from ...config import MLAConfig
from ...kernels import KERNELS, eager
from ...memory.fake import fake_group
from ...parallel import record_bytes
from .communication import prototype
from .records import hardware, published
from .rules import Claim, Finding, check, plainly

SMALL = MLAConfig(
    hidden_size=512,
    num_attention_heads=16,
    q_lora_rank=None,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    norm="layer",
)
"""The size of the paper's convergence run, §4.5, whose latent and head sizes it does not give."""

INVERSE = {"all_to_all": "all_to_all", "all_gather": "reduce_scatter"}


@cache
def _step(form: str) -> dict[str, Tensor]:
    """Output and every gradient of one fp32 step on one process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, hidden = MLAAttention(SMALL, form=form), torch.randn(1, 256, SMALL.hidden_size, requires_grad=True)
    out = layer(hidden)
    out.sum().backward()
    gradients = {name.removesuffix(".weight"): p.grad for name, p in layer.named_parameters()}
    return {"output": out.detach(), "hidden": hidden.grad, **gradients}


@check
def single_process_difference(claim: Claim, of: list[str]) -> Finding:
    """The largest element of Laga minus explicit at sp 1, fp32, over these tensors."""
    explicit, laga = _step("explicit"), _step("laga")
    worst = max((laga[name] - explicit[name]).abs().max().item() for name in of)
    return plainly(claim, worst, "measured", "fp32, 16 heads, 256 tokens, on one CPU")


@check
def parallel_difference(
    claim: Claim,
    of: list[str] | None,
    sp: list[int],
    dtype: str = "float32",
    measure: str = "absolute",
    forms: list[str] | None = None,
) -> Finding:
    """The largest element of a form on real ranks minus explicit in one process, over tensors (``None``: all) and sp.

    Of two forms the sum is taken, which is at least as large as the difference between them.
    """
    total, records = 0.0, []
    for form in forms or ["laga"]:
        found = [record for degree in sp for record in published("equivalence", sp=degree, dtype=dtype, form=form)]
        total += max(value for r in found for name, value in r.metrics[measure].items() if of is None or name in of)
        records += found
    return plainly(claim, total, "measured", f"{dtype}, {measure}, gloo on {hardware(records)}")


@check
def gradients_complete(claim: Claim, sp: list[int]) -> Finding:
    """Whether one all-reduce leaves the full gradient of kv_b_proj under every form, on real ranks in fp64."""
    worst = max(
        record.metrics["relative"]["kv_b_proj"]
        for degree in sp
        for form in ("explicit", "absorbed", "laga")
        for record in published("equivalence", sp=degree, dtype="float64", form=form)
    )
    return plainly(claim, worst < 1e-12, "measured", f"largest relative difference {worst:.0e}, fp64")


@check
def backward_collectives(claim: Claim) -> Finding:
    """Whether backward runs, in reverse order, the inverse of each collective of forward: for every form."""
    seen = {}
    for form in ("explicit", "absorbed", "laga"):
        with fake_group(4) as group, record_bytes() as ledger:
            layer = MLAAttention(MLAConfig.preset("toy"), form=form, group=group)
            layer(torch.zeros(1, 4, layer.config.hidden_size, requires_grad=True)).sum().backward()
        ran = {way: [e.collective for e in ledger.entries if e.direction == way] for way in ("forward", "backward")}
        seen[form] = sorted(ran["backward"]) == sorted(INVERSE[name] for name in ran["forward"]) and bool(
            ran["forward"]
        )
    return plainly(claim, all(seen.values()), "derived", "recorded from the forms on a group of four")


@check
def equal_flops(claim: Claim, forms: list[str], sp: int = 8, seq: int = 4096) -> Finding:
    """Whether the forms' forward and backward count the same floating-point operations on one rank."""
    counted = {form: _flops(form, sp, seq) for form in forms}
    remark = ", ".join(f"{form} {flops / 1e12:.2f} TFLOP" for form, flops in counted.items())
    return plainly(claim, len(set(counted.values())) == 1, "derived", remark)


def _flops(form: str, sp: int, seq: int) -> int:
    config = prototype()
    with fake_group(sp) as group, FakeTensorMode(), FlopCounterMode(display=False) as counter:
        layer = MLAAttention(config, form=form, group=group, dtype=torch.bfloat16)
        hidden = torch.empty(1, seq // sp, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        layer(hidden).sum().backward()
    return counter.get_total_flops()


@check
def key_heads(claim: Claim, form: str) -> Finding:
    """Key heads that reach the attention kernel."""
    _, key = _queries_and_keys(form)
    return plainly(claim, key.shape[2], "derived", "seen at the kernel")


@check
def rope_term(claim: Claim) -> Finding:
    """Whether the products of the queries' and keys' rotary bands agree across the forms, to fp64 rounding."""
    band = MLAConfig.preset("toy").qk_rope_head_dim
    terms = []
    for form in ("explicit", "absorbed", "laga"):
        q, k = (x[..., -band:] for x in _queries_and_keys(form))
        terms.append(torch.einsum("bqhd,bkhd->bhqk", q, k.expand(-1, -1, q.shape[2], -1)))
    worst = max((term - terms[0]).abs().max().item() for term in terms)
    return plainly(
        claim, worst < 1e-12, "measured", f"largest difference {worst:.0e}, fp64" if worst else "bit for bit, fp64"
    )


def _queries_and_keys(form: str) -> tuple[Tensor, Tensor]:
    """What a form hands to the kernel on one process, fp64: ``[batch, seq, heads, dim]`` each."""
    seen: list[tuple[Tensor, Tensor]] = []
    with torch.random.fork_rng(devices=[]), _watching(lambda q, k: seen.append((q, k))), torch.no_grad():
        torch.manual_seed(0)
        layer = MLAAttention(MLAConfig.preset("toy"), form=form, kernel="watched", dtype=torch.float64)
        layer(torch.randn(1, 8, layer.config.hidden_size, dtype=torch.float64))
    return seen[0]


@contextmanager
def _watching(look: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """A kernel ``"watched"`` that shows its queries and keys to ``look``."""

    def watched(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Tensor:
        look(q, k)
        return eager.attend(q, k, v, scale=scale, causal=causal)

    KERNELS["watched"] = watched
    try:
        yield
    finally:
        del KERNELS["watched"]


@check
def same_key_value_bytes(claim: Claim, kernel: str, seq: int, sp: int) -> Finding:
    """Whether key and value at the kernel have the same shape on each rank of sp, explicit and Laga."""
    shapes = {}
    for form in ("explicit", "laga"):
        seen: list[Tensor] = []
        with fake_group(sp) as group, FakeTensorMode(), _watching(lambda q, k, seen=seen: seen.append(k)):  # type: ignore[misc]
            layer = MLAAttention(prototype(), form=form, kernel="watched", group=group, dtype=torch.bfloat16)
            layer(torch.empty(1, seq // sp, layer.config.hidden_size, dtype=torch.bfloat16))
        shapes[form] = list(seen[0].shape)
    return plainly(
        claim, shapes["explicit"] == shapes["laga"], "derived", f"keys [batch, seq, heads/sp, dim]: {shapes['laga']}"
    )
