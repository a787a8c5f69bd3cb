"""Routing noise: the noise is rounding alone, a fixed order removes it, and the factors are computed right."""

from __future__ import annotations

import pytest
import torch
from drawing import drawn

from laga_core.charts import training as charts
from laga_core.experiments import routing_noise
from laga_core.experiments.checks.records import published
from laga_core.experiments.routing_noise import SplitK, beside_the_paper, factors, model_config, pair
from laga_core.model import LanguageModel
from laga_core.results import Record, Store

SMALL = {"seq": 16, "hidden": 16, "layers": 1, "experts": 4, "steps": 4}


def test_any_order_is_a_right_product_forward_and_backward() -> None:
    source = torch.Generator().manual_seed(0)
    a, b = (torch.randn(30, 30, generator=source, requires_grad=True) for _ in range(2))
    results = []
    for order in (None, 1, 2):
        with SplitK(order):
            product = a @ b
            results.append((product, *torch.autograd.grad(product.square().sum(), (a, b))))
    exact = a.double() @ b.double()
    bound = 30 * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())
    for product, *_ in results:
        assert ((product - exact).abs() <= bound).all()
    for index in range(3):  # the product and both gradients change with the order, and by no more than rounding
        assert not torch.equal(results[1][index], results[2][index])
        assert torch.allclose(results[1][index], results[2][index], rtol=1e-4, atol=1e-4)


def test_the_same_order_gives_the_same_bits() -> None:
    a, b = torch.randn(20, 20), torch.randn(20, 20)
    assert torch.equal(SplitK(4).product(a, b), SplitK(4).product(a, b))
    with pytest.raises(ValueError, match="a sum of two has only one order"):
        SplitK(0, pieces=2)


def test_the_noise_is_as_small_as_that_of_pytorchs_own_order() -> None:
    rows = {row["product"]: row for row in routing_noise.rounding()}
    errors = [row["error"] for row in rows.values()]
    assert max(errors) < 3e-7
    assert rows["pieces in a drawn order"]["differ"] > 0.1


def test_models_are_of_one_size() -> None:
    sizes = {
        model: sum(
            p.numel() for n, p in LanguageModel(model_config(model)).named_parameters() if "gate.weight" not in n
        )
        for model in routing_noise.MODELS
    }
    assert len(set(sizes.values())) == 1
    with pytest.raises(ValueError, match="unknown model 'moe'; known: experts, every expert, dense"):
        model_config("moe")


@pytest.mark.parametrize("model", routing_noise.MODELS)
def test_a_fixed_order_removes_the_divergence_and_a_drawn_one_brings_it(model: str) -> None:
    assert max(pair(model, 0, noise=False, **SMALL)["difference"]) == 0
    noisy = pair(model, 0, noise=True, **SMALL)
    assert 0 < max(noisy["difference"]) < 1e-4
    assert len(noisy["flipped"]) == len(noisy["loss"]) == 4


def test_flips_and_the_jump_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = torch.zeros(12, 2, 5, 2, dtype=torch.int64)
    moved = choices.clone()
    moved[11, 1, 3, 0] = 1
    runs = iter(
        [
            {"loss": [1.0] * 12, "choices": choices},
            {"loss": [1.0 + 1e-6] * 11 + [1.0 + 1e-3], "choices": moved},
        ]
    )
    monkeypatch.setattr(routing_noise, "run", lambda *args, **kwargs: next(runs))
    found = pair("experts", 0)
    assert found["first_flip"] == 11
    assert found["flipped"] == [0] * 11 + [1]
    assert found["jump"] == pytest.approx(1000, rel=1e-3)


def test_gaps_are_those_between_the_last_chosen_and_the_first_left_out() -> None:
    found = routing_noise.run("experts", None, 0, **routing_noise.SIZES | SMALL)
    assert found["gaps"].shape == (4, 1, 16)
    assert (found["gaps"] > 0).all()
    # The first step's, from the definition: the model as drawn, its first walk.
    config = model_config("experts", 16, 1, 4)
    model, source = LanguageModel(config), torch.Generator().manual_seed(0)
    table = torch.randint(256, (256, 4), generator=source)
    seen = {}
    model.layers[0].mlp.gate.register_forward_pre_hook(lambda _, given: seen.update(tokens=given[0]))
    model(routing_noise.chain(table, 17, source)[:, :-1])
    scores = torch.sigmoid(seen["tokens"] @ model.layers[0].mlp.gate.weight.T).sort(-1, descending=True).values
    assert torch.allclose(found["gaps"][0, 0].float(), scores[:, 1] - scores[:, 2], atol=1e-6)
    assert routing_noise.run("every expert", None, 0, **routing_noise.SIZES | SMALL)["gaps"] is None


def test_expected_flips_add_up_over_the_steps_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, choices = [1.0] * 3, torch.zeros(3, 1, 4, 2, dtype=torch.int64)
    moved = choices.clone()
    moved[2, 0, 1, 0] = 1
    gaps = torch.tensor([0.001, 0.004, 0.1, 0.2]).double().expand(3, 1, 4)
    runs = iter(
        [
            {"loss": loss, "choices": choices, "gaps": gaps},
            {"loss": loss, "choices": moved, "gaps": gaps + 2e-5},
        ]
    )
    monkeypatch.setattr(routing_noise, "run", lambda *args, **kwargs: next(runs))
    found = routing_noise.ties(0)
    assert (found["decisions"], found["first_flip"]) == (4, 2)
    assert found["density"] == [100.0, 100.0]  # two of four below 0.005
    assert found["expected"] == pytest.approx(2 * 4 * 100 * 2e-5 / 2)


def test_charts_mark_the_first_flip_and_hold_every_seed_beside_the_paper() -> None:
    first, other = (drawn(charts.divergence().to_dict(), seed=seed) for seed in (0, 3))
    assert first[0] != other[0]
    for _, texts in (first, other):
        assert "first token routed elsewhere" in texts and set(charts.MODEL_LABELS.values()) <= set(texts)
    svg, _ = drawn(charts.factors().to_dict())
    assert svg.count(f'fill="{charts.MODEL_COLOURS["experts"]}"') == 2 * len(factors(published("routing_noise")))


def record(model: str, seed: int, difference: list[float], **metrics) -> Record:
    known = {"loss": [], "flipped": [], "first_flip": None, "jump": None}
    return Record(
        experiment="routing_noise",
        kind="measured",
        parameters={"model": model, "seed": seed, "noise": True},
        metrics={**known, "difference": difference, **metrics},
        provenance={},
    )


def test_factors_are_ratios_of_means_a_row_a_seed() -> None:
    records = [
        record("experts", 1, [0.0, 8.0], first_flip=1, jump=50.0),
        record("dense", 1, [1.0, 1.0]),
        record("experts", 0, [2.0, 2.0]),
        record("dense", 0, [1.0, 1.0]),
    ]
    rows = factors(records)
    assert [(row["seed"], row["moe_over_dense"], row["first_flip"]) for row in rows] == [(0, 2.0, None), (1, 4.0, 1)]
    ratio, jump = beside_the_paper(rows)
    assert (ratio["reported"], ratio["median"], ratio["least"], ratio["most"], ratio["seeds"]) == (16, 3.0, 2.0, 4.0, 2)
    assert (jump["reported"], jump["median"], jump["seeds"]) == (1000, 50.0, 1)


def test_sweep_writes_a_record_of_each_model_and_seed(tmp_path) -> None:
    records = routing_noise.sweep(Store(tmp_path), [0, 1], ("experts", "dense"), **SMALL)
    assert [(r.parameters["seed"], r.parameters["model"]) for r in records] == [
        (seed, model) for seed in (0, 1) for model in ("experts", "dense")
    ]
    assert records[0].metrics["difference"] == pair("experts", 0, **SMALL)["difference"]
    assert len(Store(tmp_path).load("routing_noise", seed=1)) == 2


def test_as_many_first_flips_come_as_near_ties_let_one_expect() -> None:
    """The expected number is a Poisson mean, so the count should lie within two roots of it."""
    *rows, total = routing_noise.foreseen(published("near_ties"))
    assert len(rows) == 8 and total["steps"] == sum(row["steps"] for row in rows)
    assert abs(total["flips"] - total["expected"]) < 2 * total["expected"] ** 0.5
    assert min(row["density"] for row in rows) < total["density"] < max(row["density"] for row in rows)


def test_committed_records_say_what_the_notebook_says() -> None:
    rows = factors(published("routing_noise", noise=True))
    assert len(rows) >= 5
    assert all(row["experts"] > 2 * row["dense"] and row["jump"] > 5 for row in rows)
    assert all(row["every expert"] < 1e-5 for row in rows)
    assert all(max(r.metrics["difference"]) == 0 for r in published("routing_noise", noise=False))
