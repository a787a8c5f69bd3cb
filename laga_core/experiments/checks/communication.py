"""Claims about bytes sent: decided by the closed forms, under both accountings."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch

from ...config import MLAConfig
from ...costs import communication, substitutions, transfers
from ..paper import read_table
from .rules import Claim, Finding, by_accounting, check, plainly

MB = 1e6
BF16 = torch.bfloat16.itemsize


def prototype(n_heads: int = 128, d_model: int = 7168) -> MLAConfig:
    """The paper's prototype, §4.1, with another number of heads or hidden size."""
    return replace(MLAConfig.preset("paper-v3"), num_attention_heads=n_heads, hidden_size=d_model)


def _sent(form: str, accounting: str, *, seq: int, sp: int, n_heads: int = 128) -> int:
    return communication(prototype(n_heads), form, seq, sp, accounting).total_bytes


def _ratio(accounting: str, **sizes: Any) -> float:
    return _sent("explicit", accounting, **sizes) / _sent("laga", accounting, **sizes)


@check
def bytes_sent(claim: Claim, form: str, seq: int, sp: int) -> Finding:
    """MB that one rank sends in one forward."""
    return by_accounting(claim, lambda accounting: _sent(form, accounting, seq=seq, sp=sp) / MB)


@check
def bytes_ratio(claim: Claim, seq: int, sp: int, n_heads: int = 128, hardware: str = "") -> Finding:
    """Explicit over Laga; the same on any hardware."""
    return by_accounting(claim, lambda accounting: _ratio(accounting, seq=seq, sp=sp, n_heads=n_heads))


@check
def bytes_share(claim: Claim, seq: int, sp: int) -> Finding:
    """Laga's bytes in per cent of explicit's."""
    return by_accounting(claim, lambda accounting: 100 / _ratio(accounting, seq=seq, sp=sp))


@check
def ratio_is_constant(claim: Claim, sp: list[int], seq: list[int], digits: int) -> Finding:
    """Whether explicit over Laga prints as one number over all these settings."""

    def constant(accounting: str) -> bool:
        return len({round(_ratio(accounting, seq=s, sp=p), digits) for s in seq for p in sp}) == 1

    return by_accounting(claim, constant)


@check
def ratio_grows_with_heads(claim: Claim, n_heads: list[int], seq: int, sp: int) -> Finding:
    """Whether each doubling of the heads raises explicit over Laga."""

    def grows(accounting: str) -> bool:
        return _increases([_ratio(accounting, seq=seq, sp=sp, n_heads=n) for n in n_heads])

    return by_accounting(claim, grows)


@check
def bytes_do_not_grow(claim: Claim, form: str, n_heads: list[int], seq: int, sp: int) -> Finding:
    """Whether a form sends the same at each number of heads."""
    return by_accounting(
        claim, lambda accounting: len({_sent(form, accounting, seq=seq, sp=sp, n_heads=n) for n in n_heads}) == 1
    )


@check
def bytes_proportional_to_heads(claim: Claim, form: str, seq: int, sp: int) -> Finding:
    """Whether twice the heads send exactly twice the bytes."""
    return by_accounting(
        claim,
        lambda accounting: (
            _sent(form, accounting, seq=seq, sp=sp, n_heads=128)
            == 2 * _sent(form, accounting, seq=seq, sp=sp, n_heads=64)
        ),
    )


@check
def same_bytes(claim: Claim, forms: list[str], sp: list[int], seq: list[int]) -> Finding:
    """Whether the forms send the same at every setting."""

    def same(accounting: str) -> bool:
        return all(len({_sent(form, accounting, seq=s, sp=p) for form in forms}) == 1 for s in seq for p in sp)

    return by_accounting(claim, same)


def _elements(form: str, tensors: list[str] | None = None, n_heads: int = 128) -> int:
    """Elements a token of the named tensors (``None``: all that go through an all-to-all)."""
    values = substitutions(prototype(n_heads), seq=1, sp=1, batch=1, dtype=torch.bfloat16)
    return sum(
        int(moved.elements.subs(values))
        for moved in transfers(form)
        if (moved.collective == "all_to_all" if tensors is None else moved.tensor in tensors)
    )


@check
def elements_behind_table1(claim: Claim, form: str, tensors: list[str]) -> Finding:
    """Elements a token of these tensors, as the form that gives table 1 to the last digit moves them."""
    for row in read_table("table1"):
        reckoned = _sent(form, "paper", seq=int(row["seq"]), sp=int(row["sp"])) / MB
        if f"{reckoned:.1f}" != row[f"{form}_mb"]:
            raise RuntimeError(f"{form} no longer gives table 1: {reckoned:.1f} MB, printed {row[f'{form}_mb']}")
    return plainly(claim, _elements(form, tensors), "derived", "the count that gives every cell of table 1")


@check
def elements_sent(claim: Claim, tensor: str, sp: int, form: str = "laga") -> Finding:
    """Elements of one tensor that go out for each token a rank holds."""
    return by_accounting(
        claim,
        lambda accounting: communication(prototype(), form, sp, sp, accounting).by_tensor[tensor] // BF16,
    )


@check
def tensor_share(claim: Claim, form: str, tensors: list[str], seq: int, sp: int) -> Finding:
    """These tensors' part of all a form sends, in per cent."""

    def share(accounting: str) -> float:
        sent = communication(prototype(), form, seq, sp, accounting)
        return 100 * sum(sent.by_tensor[tensor] for tensor in tensors) / sent.total_bytes

    return by_accounting(claim, share)


@check
def tensor_growth(claim: Claim, form: str, tensors: list[str], n_heads: list[int], seq: int, sp: int) -> Finding:
    """How much more of these tensors is sent at the last number of heads than at the first."""

    def growth(accounting: str) -> float:
        few, many = (
            communication(prototype(n), form, seq, sp, accounting).by_tensor for n in (n_heads[0], n_heads[-1])
        )
        return sum(many[tensor] for tensor in tensors) / sum(few[tensor] for tensor in tensors)

    return by_accounting(claim, growth)


@check
def cells_on_the_wire(claim: Claim) -> Finding:
    """How many cells of table 1 are, to their last digit, what a rank sends."""
    forms = ("explicit", "absorbed", "laga")
    cells = sum(
        f"{_sent(form, 'wire', seq=int(row['seq']), sp=int(row['sp'])) / MB:.1f}" == row[f"{form}_mb"]
        for row in read_table("table1")
        for form in forms
    )
    return plainly(claim, cells, "derived", "all-to-alls are counted twice, the gather once for sp - 1 peers")


@check
def latent_compression(claim: Claim) -> Finding:
    """Per-head keys and values over what is cached of the latent, in elements a token.

    The paper's convention counts one of keys and values, and the latent without its rotary band.
    """
    c = prototype()

    def compression(accounting: str) -> float:
        if accounting == "paper":
            return c.num_attention_heads * c.v_head_dim / c.kv_lora_rank
        return c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim) / c.latent_dim

    finding = by_accounting(claim, compression)
    return Finding(
        finding.ours,
        finding.kind,
        finding.verdict,
        f"keys and values over latent and rotary band: {compression('wire'):.0f}×",
    )


@check
def dimension(claim: Claim, name: str, times: str | None = None) -> Finding:
    """A dimension of DeepSeek-V3, or a product of two, from its published configuration."""
    config = MLAConfig.preset("deepseek-v3")
    return plainly(claim, getattr(config, name) * (getattr(config, times) if times else 1), "derived")


@check
def dimension_absent(claim: Claim, name: str) -> Finding:
    """Whether DeepSeek-V3's configuration leaves a dimension out."""
    value = getattr(MLAConfig.preset("deepseek-v3"), name)
    return plainly(claim, value is None, "derived", "" if value is None else f"{name} is {value}")


def _increases(values: list[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))
