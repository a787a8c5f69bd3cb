"""Experts over the ranks that share the sequence: against one dense process, whatever the routing."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from drawing import drawn
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import on_ranks, raised

from laga_core.charts import training as charts
from laga_core.experiments import experts as experiment
from laga_core.experts import ExpertConfig, MoE, Router, expert_groups
from laga_core.results import Store

SIZES = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}


@pytest.fixture(scope="module")
def blocks() -> list[dict[str, Any]]:
    return experiment.block(sp=4, degrees=(1, 2, 4))


def test_the_block_is_the_dense_one_under_every_routing_and_degree(blocks: list[dict[str, Any]]) -> None:
    assert {(row["routing"], row["ep"]) for row in blocks} == {(r, ep) for r in experiment.ROUTINGS for ep in (1, 2, 4)}
    assert max(row["error"] for row in blocks) <= 1e-12


def test_the_routings_are_what_they_are_called(blocks: list[dict[str, Any]]) -> None:
    tokens = {row["routing"]: row["tokens"] for row in blocks}
    assert 0 in tokens["an idle expert"]
    assert sorted(tokens["all to one expert"]) == [0] * 7 + [40]
    assert max(tokens["capacity"]) == 7 < max(tokens["as drawn"])


def test_the_model_is_that_of_one_process_and_collectives_keep_apart(tmp_path) -> None:
    records = experiment.sweep(Store(tmp_path), sp=4, degrees=(1, 2, 4), layers=2)
    for record in records:
        assert record.metrics["loss_error"] <= 1e-12
        assert record.metrics["gradient_error"] <= 1e-12
        assert record.metrics["interleaved"] == 0
    names = [call["collective"] for call in records[1].metrics["schedule"]]
    attention, back = ["all_to_all", "all_gather", "all_to_all"], ["all_to_all", "reduce_scatter", "all_to_all"]
    routed = ["expert_counts", "expert_dispatch", "expert_combine"]
    assert names == [*attention, *attention, *routed, *reversed(routed[1:]), *back, *back]
    assert not [c for c in records[0].metrics["schedule"] if c["collective"].startswith("expert")]
    assert Store(tmp_path).load("experts", ep=2) == [records[1]]


def test_the_figure_of_the_schedule_shows_every_call_once_and_no_two_rows_at_a_time() -> None:
    spec = charts.schedule().to_dict()
    (rows,) = spec["datasets"].values()
    assert [(row["call"], row["after"]) for row in rows] == [(i, i + 1) for i in range(28)]
    assert all(row["row"].startswith("experts") == row["collective"].startswith("expert") for row in rows)
    svg, texts = drawn(spec)
    for name in {row["collective"] for row in rows}:
        assert name.replace("_", "-") in texts
        assert svg.count(charts.CALL_COLOURS[name]) > 1


def test_calls_out_of_place_are_counted() -> None:
    def call(name: str, layer: int, running: str) -> dict[str, Any]:
        return {"collective": name, "direction": "forward", "layer": layer, "running": running}

    good = [
        call("all_gather", 0, "attention"),
        call("expert_dispatch", 0, "experts"),
        call("all_gather", 1, "attention"),
    ]
    assert experiment.interleaved(good) == 0
    assert experiment.interleaved([*good, call("expert_combine", 0, "experts")]) == 1  # a return
    assert experiment.interleaved([good[0], call("all_to_all", 0, "experts")]) == 1  # a stray


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_one_process_routes_like_the_dense_reference(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 6))
    config = ExpertConfig(
        n_routed_experts=experts,
        num_experts_per_tok=data.draw(st.integers(1, experts)),
        moe_intermediate_size=5,
        capacity=data.draw(st.none() | st.integers(1, 9)),
    )
    batch, seq, source = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7)), torch.Generator().manual_seed(7)
    normal = functools.partial(torch.randn, generator=source, dtype=torch.float64)
    moe = MoE(4, config, dtype=torch.float64)
    weights = {"gate": normal(experts, 4)}
    for number in range(experts):
        weights |= {f"gate_up_proj.{number}": normal(10, 4), f"down_proj.{number}": normal(4, 5)}
    with torch.no_grad():
        moe.gate.weight.copy_(weights["gate"])
        for name, stacked in moe.experts.named_parameters():
            stacked.copy_(torch.stack([weights[f"{name}.{number}"] for number in range(experts)]))
    hidden, cotangent = normal(batch, seq, 4), normal(batch, seq, 4)
    want, _ = experiment.dense_block(config, weights, hidden, cotangent)
    x = hidden.clone().requires_grad_()
    out = moe(x)
    out.backward(cotangent)
    assert torch.allclose(out, want["output"], rtol=0, atol=1e-12)
    assert torch.allclose(x.grad, want["input"], rtol=0, atol=1e-12)
    assert torch.allclose(moe.gate.weight.grad, want["gate"], rtol=0, atol=1e-12)


def test_weights_of_a_token_sum_to_one() -> None:
    router = Router(4, ExpertConfig(**SIZES))
    torch.nn.init.normal_(router.weight)
    weights, chosen = router(torch.randn(9, 4))
    assert torch.allclose(weights.sum(-1), torch.ones(9))
    assert all(len(set(row)) == 3 for row in chosen.tolist())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts_per_tok": 9}, ValueError, "num_experts_per_tok=9 of n_routed_experts=8 experts"),
        ({"n_routed_experts": 0}, ValueError, "n_routed_experts must be at least 1, got 0"),
        ({"moe_intermediate_size": 2.5}, TypeError, "moe_intermediate_size must be a whole number, got 2.5"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"n_shared_experts": -1}, ValueError, "n_shared_experts must be at least 0"),
    ],
)
def test_bad_sizes_raise(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ExpertConfig(**{**SIZES, **changes})


def bad_calls(group) -> dict[str, str]:
    rank = torch.distributed.get_rank(group)
    moe = MoE(4, ExpertConfig(**SIZES), expert_groups(group, 2))
    other = MoE(4, ExpertConfig(**{**SIZES, "num_experts_per_tok": 2 + rank}), moe.groups)
    torch.nn.init.normal_(moe.gate.weight)
    return {
        "three": raised(lambda: expert_groups(group, 3)),
        "zero": raised(lambda: expert_groups(group, 0)),
        "different": raised(lambda: expert_groups(group, 1 + rank)),
        "one bad": raised(lambda: expert_groups(group, 3 if rank else 2)),
        "no config": raised(lambda: MoE(4, SIZES)),  # type: ignore[arg-type]
        "other top k": raised(lambda: other(torch.randn(1, 2, 4))),
        "no tensor": raised(lambda: moe(None if rank else torch.randn(1, 2, 4))),
        "odd experts": raised(
            lambda: MoE(4, ExpertConfig(**{**SIZES, "n_routed_experts": 7}), expert_groups(group, 2))
        ),
        "width": raised(lambda: moe(torch.randn(1, 2, 4 + rank))),
        "dtype": raised(lambda: moe(torch.randn(1, 2, 4, dtype=torch.float64 if rank else torch.float32))),
        "batch": raised(lambda: moe(torch.randn(1 + rank, 2, 4))),
        "uneven sequences": raised(lambda: moe(torch.randn(1, 2 + rank, 4))),
    }


def test_bad_degrees_and_inputs_raise_alike_on_every_rank() -> None:
    first, second = on_ranks(bad_calls, sp=2)
    assert first == second
    assert "rank 0: ep=3 does not divide the 2 ranks of the group; choose ep among [1, 2]" in first["three"]
    assert "ep is 1 on rank 0, 2 on rank 1" in first["different"]
    assert first["one bad"].startswith("ValueError: rank 1: ep=3 does not divide")
    assert first["no config"] == "TypeError: MoE takes an ExpertConfig, got dict"
    assert re.search("do not agree: .*num_experts_per_tok=2.* rank 0, .*num_experts_per_tok=3", first["other top k"])
    assert first["no tensor"].startswith("ValueError: rank 1: hidden must be") and "NoneType" in first["no tensor"]
    assert "at least 1, got 0" in first["zero"]
    assert "7 experts cannot be split evenly over ep=2 ranks" in first["odd experts"]
    assert first["width"].startswith("ValueError: rank 1: hidden must be [batch, seq/sp, 4]")
    assert "got [1, 2, 4] of torch.float64" in first["dtype"]
    assert "batch is 1 on rank 0, 2 on rank 1" in first["batch"]
    assert first["uneven sequences"] == "nothing"  # counts are exchanged, so shards may differ
