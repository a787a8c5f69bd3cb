"""The family: every combination of its options on real ranks against one process, what it sends, keeps and refuses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, expected, worst_error
from ranks import on_ranks
from torch import Tensor

from laga_core import MLAAttention, MLAConfig, all_reduce_gradients, communication
from laga_core.parallel import degree, record_bytes

TOY = MLAConfig.preset("toy")


@dataclass(frozen=True)
class Member(Case):
    """A case of the family: its kernel, and the tokens that each rank holds, given to the layer or left to it."""

    kernel: str = "eager"
    held: list[int] = field(default_factory=list)  # positions of all tokens in rank order
    given: bool = False

    def __str__(self) -> str:
        return f"{self.form} {self.options} {self.kernel} {self.batch}x{self.seq} given={self.given} {self.config}"


def zigzag(seq: int, context: int) -> list[int]:
    """Written out anew: group r has the r-th piece from the front and the r-th from the back."""
    size = seq // (2 * context)
    pieces = [list(range(i * size, (i + 1) * size)) for i in range(2 * context)]
    return [p for r in range(context) for p in pieces[r] + pieces[2 * context - 1 - r]]


def run(group: Any, members: list[Member]) -> list[dict[str, Any]]:
    """Output, gradients and ledger of each member on this rank."""
    return [_run(group, member) for member in members]


def _run(group: Any, member: Member) -> dict[str, Any]:
    weights, hidden, cotangent = member.drawn()
    sp, rank = degree(group), dist.get_rank(group) if group is not None else 0
    mine = torch.tensor(member.held[rank * member.seq // sp : (rank + 1) * member.seq // sp])
    module = MLAAttention(member.config, member.form, member.kernel, group=group, dtype=member.dtype, **member.options)
    module.load_state_dict(weights, strict=True)
    x = hidden[:, mine].requires_grad_()
    with record_bytes() as ledger:
        out = module(x, mine) if member.given else module(x)
        out.backward(cotangent[:, mine])
    found = {"ledger": {d: ledger.by_collective("wire", d) for d in ("forward", "backward")}}
    if group is not None:
        all_reduce_gradients(module, group)
    return {**found, "out": out.detach(), "hidden": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def check(member: Member, shards: list[dict[str, Any]]) -> None:
    """Equal to the oracle, alike on all ranks, and on the wire what the closed form says."""
    shards = [dict(shard) for shard in shards]
    ledgers = [shard.pop("ledger") for shard in shards]
    order = torch.tensor(member.held).argsort()
    whole: dict[str, Tensor] = dict(shards[0])
    for name in ("out", "hidden"):
        whole[name] = torch.cat([shard[name] for shard in shards], 1)[:, order]
    for shard in shards:
        assert all(torch.equal(shard[n], whole[n]) for n in shard if n not in ("out", "hidden")), str(member)
    error, where = worst_error(whole, expected(member))
    assert error <= 1e-12, f"{where} is off by {error:.1e} at sp={len(shards)}: {member}"
    for direction in ("forward", "backward") if not member.given and len(shards) > 1 else ():
        sent = communication(
            member.config, member.form, member.seq, len(shards), "wire", member.batch, member.dtype, direction,
            member.kernel, **member.options,
        ).by_collective  # fmt: skip
        sent = {name: count for name, count in sent.items() if count}
        assert all(ledger[direction] == sent for ledger in ledgers), f"{direction} {member}: {ledgers} {sent}"


# --- every combination ---


def drawn(sp: int, number: int) -> list[Member]:
    """Members with every option drawn anew, the same for the same sp."""
    source, members = random.Random(sp), []
    heads = TOY.num_attention_heads
    contexts = [r for r in range(1, sp + 1) if sp % r == 0 and heads % (sp // r) == 0]
    for seed in range(number):
        pick = source.choice
        q_lora, context = pick([None, 24]), pick(contexts)
        options: dict[str, Any] = {"context": context}
        options["layout"] = pick(["contiguous", "zigzag"])
        options["query"] = pick(["heads", "latent"]) if q_lora else "heads"
        options["recompute"], options["overlap"] = pick([False, True]), pick([False, True])
        options["head_chunk"] = pick([None, 1, heads * context // sp])
        config = replace(TOY, q_lora_rank=q_lora, causal=pick([True, True, False]), norm=pick(["rms", "layer"]))
        seq, given = 2 * sp * pick([1, 2, 3]), pick([False, False, True])
        held = zigzag(seq, context) if options["layout"] == "zigzag" else list(range(seq))
        if given and options["layout"] == "contiguous":
            source.shuffle(held)
        kernel, batch = pick(["eager", "tiled"]), pick([1, 1, 3])
        members.append(Member(config, "laga", options, batch, seq, seed=seed, kernel=kernel, held=held, given=given))
    for key_rope in ("replicated", "headless"):
        if heads % sp == 0:
            options = {"key_rope": key_rope, "packed": True}
            members.append(Member(TOY, "explicit", options, 2, 4 * sp, kernel="tiled", held=list(range(4 * sp))))
    return members


@cache
def results(sp: int) -> list[tuple[Member, list[dict[str, Any]]]]:
    members = drawn(sp, {1: 16, 2: 40, 4: 48, 8: 32, 16: 12}[sp])
    by_rank = [run(None, members)] if sp == 1 else on_ranks(run, members, sp=sp, timeout=110)
    return [(member, [values[i] for values in by_rank]) for i, member in enumerate(members)]


@pytest.mark.parametrize("sp", [1, 2, 4, 8, 16])
def test_every_combination_equals_one_process_and_sends_what_the_closed_form_says(sp: int) -> None:
    for member, shards in results(sp):
        check(member, shards)


@pytest.mark.parametrize("sp", [2, 4, 8])
def test_the_draw_has_every_pair_of_options(sp: int) -> None:
    seen = {
        pair
        for member in drawn(sp, {2: 40, 4: 48, 8: 32}[sp])
        if member.form == "laga"
        for pair in __import__("itertools").combinations(
            [(k, v if k != "head_chunk" else bool(v)) for k, v in member.options.items()]
            + [("kernel", member.kernel), ("causal", member.config.causal)],
            2,
        )
    }
    flags = [("recompute", True), ("overlap", True), ("query", "latent"), ("layout", "zigzag"), ("kernel", "tiled")]
    for one in flags:
        for other in flags:
            assert one == other or (one, other) in seen or (other, one) in seen, (one, other)
