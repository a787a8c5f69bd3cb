"""Closed forms of memory against the simulation, over models, lengths, degrees, heads, masks and batches."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from laga_core import MLAConfig, simulate_memory
from laga_core.costs import FLOOR, longest_sequence, memory_cost
from laga_core.costs.memory import memory_values

MODELS = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "minicpm3-4b", "paper-v3")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("explicit", {}),
    ("explicit", {"key_rope": "headless"}),
    ("absorbed", {}),
    ("absorbed", {"score": "split"}),
    ("laga", {}),
]


def configurations(count: int) -> list[tuple[str, MLAConfig, int, int, int]]:
    draw = random.Random(20)
    found = []
    while len(found) < count:
        name = draw.choice(MODELS)
        heads, sp = draw.choice((8, 16, 32, 40, 64, 128)), 2 ** draw.randint(0, 6)
        seq, batch = 1024 * 2 ** draw.randint(0, 10), draw.choice((1, 1, 2, 4))
        if heads % sp == 0 and batch * seq * seq * heads // sp <= 2**52:
            config = replace(MLAConfig.preset(name), num_attention_heads=heads, causal=draw.random() < 0.5)
            found.append((name, config, seq, sp, batch))
    return found


@pytest.mark.parametrize(("kernel", "count"), [("eager", 30), ("fused", 30)])
def test_closed_forms_are_the_simulation(kernel: str, count: int) -> None:
    for name, config, seq, sp, batch in configurations(count):
        for form, options in VARIANTS:
            if kernel != "eager" and options.get("score") == "split":
                continue
            run = simulate_memory(config, form, kernel, seq, sp, batch, **options)
            cost = memory_cost(config, form, kernel, seq, sp, batch, **options)
            case = (name, form, options, seq, sp, batch, config.num_attention_heads, config.causal)
            assert cost.peak_bytes == pytest.approx(run.peak_bytes, rel=0.02), case
            assert cost.saved_bytes == pytest.approx(run.saved_bytes, rel=0.02), case
            assert sum(cost.breakdown.values()) == cost.peak_bytes


@pytest.mark.parametrize(("form", "options"), VARIANTS)
def test_layers(form: str, options: dict[str, Any]) -> None:
    config = MLAConfig.preset("deepseek-v3")
    run = simulate_memory(config, form, "eager", 8192, 8, layers=4, **options)
    cost = memory_cost(config, form, "eager", 8192, 8, layers=4, **options)
    assert cost.peak_bytes == pytest.approx(run.peak_bytes, rel=0.02)
    assert cost.saved_bytes == pytest.approx(run.saved_bytes, rel=0.02)


def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    config = MLAConfig.preset("deepseek-v3")
    longest = longest_sequence(config, "laga", "fused", 8, 80e9)
    assert memory_cost(config, "laga", "fused", longest, 8).peak_bytes <= 80e9
    assert memory_cost(config, "laga", "fused", longest + 8, 8).peak_bytes > 80e9
    assert longest_sequence(config, "laga", "eager", 8, 1e6) == 0


def test_nothing_saves_less_than_the_floor() -> None:
    config = MLAConfig.preset("deepseek-v3")
    values = memory_values(config, seq=16384, sp=8)
    floor = sum(int(size.subs(values)) for size in FLOOR.values())
    least = simulate_memory(config, "laga", "fused", 16384, 8, query="latent", recompute=True).saved_bytes
    assert 0.99 * least < floor <= least
    for form in ("explicit", "absorbed", "laga"):
        assert memory_cost(config, form, "fused", 16384, 8).saved_bytes > floor


def test_what_has_no_closed_form_says_so() -> None:
    config = MLAConfig.preset("deepseek-v3")
    with pytest.raises(ValueError, match="no closed form"):
        memory_cost(config, "laga", "tiled", 16384, 8)
    with pytest.raises(ValueError, match="simulate_memory has its bytes"):
        memory_cost(config, "laga", "fused", 16384, 8, recompute=True)
