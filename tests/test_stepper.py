"""The stepper shows what happens: its bytes are the closed forms', its shapes and tokens those of real ranks."""

from __future__ import annotations

import contextlib
import html
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from browser import NARROW, Visit
from drawing import drawn
from ranks import on_ranks
from torch import Tensor

from laga_core import MLAAttention, MLAConfig, communication, shard_sequence
from laga_core.charts import dataflow, stepper
from laga_core.charts.dataflow import MEMBERS, PER_NODE, RANKS, STEPS
from laga_core.parallel import gather_sequence, record_bytes, topology

FORMS = [import_module(f"laga_core.forms.{name}") for name in ("explicit", "absorbed", "laga", "family", "projections")]
V3 = MLAConfig.preset("deepseek-v3")
# No two sizes alike, so that a shape tells which tensor it is of.
SMALL = MLAConfig(
    hidden_size=60,
    num_attention_heads=8,
    q_lora_rank=9,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    causal=False,  # so that queries meet all keys in one call
)
SEQ = 32


# --- bytes ---


@pytest.mark.parametrize("name", MEMBERS)
def test_bytes_of_each_step_are_the_closed_forms(name: str) -> None:
    member = MEMBERS[name]
    sent = communication(V3, member.form, 16384, RANKS, ranks_per_node=PER_NODE, **member.options)
    told = [dataflow.sent_bytes(member, step, V3, 16384) for step in range(STEPS + 1)]
    for step, (total, outside) in enumerate(told):
        assert total == sum(sent.by_tensor[tensor] for tensor in member.sent.get(step, ()))
        assert outside <= total
    shown = [tensor for step in sorted(member.sent) for tensor in member.sent[step]]
    assert sorted(shown) == sorted(sent.by_tensor), "every tensor is sent at one step"
    assert [sum(column) for column in zip(*told, strict=True)] == [sent.total_bytes, sent.inter_node_bytes]


# --- shapes and tokens ---


def observed(group: Any) -> dict[str, dict[str, Any]]:
    """For each member: shapes seen on this rank, bytes sent, and whose tokens each group of ranks has."""
    return {name: {**_ran(group, member), **_placed(group, member)} for name, member in MEMBERS.items()}


def _ran(group: Any, member: dataflow.Member) -> dict[str, Any]:
    seen: list[tuple[int, ...]] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found = real(*args, **options)
            seen.extend(tuple(each.shape[1:]) for each in (*args, found) if isinstance(each, Tensor))
            return found

        return call

    def latent(*args: Any) -> tuple[Tensor, Tensor]:
        parts = MLAAttention.latent(layer, *args)
        seen.append(tuple(torch.cat(parts, dim=-1).shape[1:]))
        return parts

    layer = MLAAttention(SMALL, member.form, group=group, dtype=torch.bfloat16, **member.options)
    hidden = torch.randn(1, SEQ // RANKS, SMALL.hidden_size, dtype=torch.bfloat16)
    with contextlib.ExitStack() as stack:
        for module in FORMS:
            for name in ("sequence_to_heads", "gather_sequence", "heads_to_sequence", "attention"):
                if real := getattr(module, name, None):
                    stack.enter_context(mock.patch.object(module, name, watched(real)))
        stack.enter_context(mock.patch.object(layer, "latent", latent))
        ledger = stack.enter_context(record_bytes())
        layer(hidden)
    return {"shapes": seen, "sent": ledger.total(direction="forward")}


def _placed(group: Any, member: dataflow.Member) -> dict[str, Any]:
    own = shard_sequence(torch.arange(RANKS)[None, :, None], group, layout=member.layout, context=member.context)
    ranks = topology(group, member.context)
    return {
        "own": own.flatten().tolist(),
        "counterparts": sorted(gather_sequence(own, ranks.across).flatten().tolist()),
        "group": sorted(gather_sequence(own, ranks.within).flatten().tolist()),
        "heads": 0 if ranks.within is None else dist.get_rank(ranks.within),
    }


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, dict[str, Any]]]:
    return on_ranks(observed, sp=RANKS)


def unpacked(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """What travels side by side, apart: two latents, or latents of several ranks; and a single head is none."""
    tokens, *heads, size = shape
    if len(heads) == 1 and heads[0] > 1:
        return [shape]
    latent, query = SMALL.latent_dim, SMALL.q_lora_rank or 0
    found: list[tuple[int, ...]] = [(tokens, query)] if size % latent == query else []
    return [*found, (tokens * (size // latent), latent)] if size // latent else found


@pytest.mark.parametrize("name", MEMBERS)
def test_shapes_and_bytes_are_those_of_real_ranks(name: str, by_rank: list[dict[str, Any]]) -> None:
    member = MEMBERS[name]
    drawn_shapes = {
        dataflow.shape(t, member, SMALL, SEQ) for t in dataflow.tensors(member, SMALL) if t.name != "hidden"
    }
    for found in by_rank:
        real = {shape for seen in found[name]["shapes"] if seen[-1] != SMALL.hidden_size for shape in unpacked(seen)}
        assert real == drawn_shapes
        sent = sum(dataflow.sent_bytes(member, step, SMALL, SEQ)[0] for step in range(STEPS + 1))
        assert found[name]["sent"] == sent


@pytest.mark.parametrize("name", MEMBERS)
def test_tiles_lie_where_real_ranks_have_them(name: str, by_rank: list[dict[str, Any]]) -> None:
    member = MEMBERS[name]
    for tensor in dataflow.tensors(member, V3):
        for rank, found in enumerate(by_rank):
            held = list(range(RANKS)) if tensor.tokens == "all" else found[name][tensor.tokens]
            assert dataflow.quarters(tensor, member, rank) == held
        if tensor.heads == "own":
            share = 4 / dataflow.sharing(member)
            tiles = stepper._tiles(tensor, member, 0, nodes=True)
            tops = [found[name]["heads"] * share for found in by_rank]
            tiles = stepper._tiles(tensor, member, 0, nodes=True)
            assert {(tile["rank"], tile["y"]) for tile in tiles} == set(enumerate(tops))


# --- the picture ---


@pytest.mark.parametrize("name", MEMBERS)
def test_the_picture_tells_each_step(name: str) -> None:
    spec, member = stepper.family_stepper().to_dict(), MEMBERS[name]
    for step in range(STEPS + 1) if name == "context" else (2, 3):  # a drawing takes its time
        svg, texts = drawn(spec, member=name, step=step)
        lines = textwrap.wrap(f"{step}. {member.steps[step]}", 44)
        assert len(lines) <= 2, "more would run into what stands below"
        assert all(f">{line}<" in html.unescape(svg) for line in lines)
        held = {t.name for t in dataflow.tensors(member, V3) if t.first <= step <= t.last}
        assert {text.split(":")[0] for text in texts if " × " in text} == held
        sent = [each / 1e6 for each in dataflow.sent_bytes(member, step, V3, 16384)]
        told = next(text for text in texts if text.startswith(("Each rank sends", "Nothing is sent")))
        found = [float(number) for number in re.findall(r"[\d.]*\d", told)]
        if "all of it" in told or "none of it" in told:
            found.append(found[0] if "all of it" in told else 0.0)
        assert (found or [0.0, 0.0]) == pytest.approx(sent, abs=0.5), told


Open = Callable[..., Visit]


@pytest.mark.browser
@pytest.mark.parametrize("width", [NARROW, 1280])
def test_the_step_control_changes_the_picture(open_page: Open, width: int) -> None:
    chart = open_page("book/family.html", width=width).chart("family-stepper")
    chart.set("Member", "R = 2")
    pictures = []
    for step in range(STEPS + 1):
        chart.set("Step", step)
        assert any(text.startswith(f"{step}. ") for text in chart.texts)
        pictures.append(chart.svg)
    assert len(set(pictures)) == STEPS + 1
