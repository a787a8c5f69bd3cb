"""Closed forms of memory against the simulation, over models, lengths, degrees, heads, masks, kernels and options."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from laga_core import MLAConfig, simulate_memory
from laga_core.costs import FLOOR, longest_sequence, memory_cost, saved_expression
from laga_core.costs.memory import memory_values
from laga_core.costs.moments import KERNELS
from laga_core.forms import STRONG_EXPLICIT, check_form

MODELS = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "minicpm3-4b", "paper-v3")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("explicit", {}),
    ("explicit", {"key_rope": "headless"}),
    ("explicit", STRONG_EXPLICIT),
    ("absorbed", {}),
    ("absorbed", {"score": "split"}),
    ("laga", {}),
    ("laga", {"overlap": True}),
    ("laga", {"recompute": True}),
    ("laga", {"recompute": True, "head_chunk": 2}),
    ("laga", {"query": "latent"}),
    ("laga", {"query": "latent", "overlap": True}),
    ("laga", {"query": "latent", "recompute": True}),
    ("laga", {"context": 2, "query": "latent", "recompute": True}),
]


def configurations(
    form: str, options: dict[str, Any], count: int = 16
) -> Iterator[tuple[MLAConfig, str, int, int, int]]:
    """Configuration, kernel, seq, sp and batch: every kernel in turn, the rest drawn."""
    draw = random.Random(f"{form} {options}")
    while count:
        heads, sp = draw.choice((8, 16, 32, 40, 64, 128)), 2 ** draw.randint(0, 6)
        seq, batch = 1024 * 2 ** draw.randint(0, 10), draw.choice((1, 1, 2, 4))
        causal = draw.random() < 0.5 and "context" not in options
        config = replace(MLAConfig.preset(draw.choice(MODELS)), num_attention_heads=heads, causal=causal)
        try:
            check_form(config, sp, form, options)
        except ValueError:
            continue  # heads that these ranks cannot share, or no query latent
        chunks = heads // sp // options.get("head_chunk", heads)
        if batch * seq * seq * heads // sp <= 2**52 and chunks <= 4:  # the simulation takes the time of each chunk
            count -= 1
            yield config, KERNELS[count % len(KERNELS)], seq, sp, batch


@pytest.mark.parametrize(("form", "options"), VARIANTS, ids=str)
def test_closed_forms_are_the_simulation(form: str, options: dict[str, Any]) -> None:
    for config, kernel, seq, sp, batch in configurations(form, options):
        run = simulate_memory(config, form, kernel, seq, sp, batch, **options)
        cost = memory_cost(config, form, kernel, seq, sp, batch, **options)
        case = (kernel, seq, sp, batch, config)
        assert cost.peak_bytes == pytest.approx(run.peak_bytes, rel=0.02), case
        assert cost.saved_bytes == pytest.approx(run.saved_bytes, rel=0.02), case
        assert sum(cost.breakdown.values()) == cost.peak_bytes


@pytest.mark.parametrize(("form", "options"), VARIANTS[:-1])
def test_layers(form: str, options: dict[str, Any]) -> None:
    config = MLAConfig.preset("deepseek-v3")
    run = simulate_memory(config, form, "fused", 8192, 8, layers=4, **options)
    cost = memory_cost(config, form, "fused", 8192, 8, layers=4, **options)
    assert cost.peak_bytes == pytest.approx(run.peak_bytes, rel=0.02)
    assert cost.saved_bytes == pytest.approx(run.saved_bytes, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"head_chunk": 4, "query": "latent"},
        {"context": 2, "layout": "zigzag"},
        {"context": 4, "query": "latent", "recompute": True},
    ],
)
def test_what_is_kept_has_a_closed_form_where_the_peak_has_none(options: dict[str, Any]) -> None:
    config = MLAConfig.preset("deepseek-v3")
    for kernel in ("fused", "tiled"):
        run = simulate_memory(config, "laga", kernel, 8192, 8, **options)
        values = memory_values(config, seq=8192, sp=8, context=options.get("context", 1))
        assert int(saved_expression("laga", kernel, **options).subs(values)) == pytest.approx(run.saved_bytes, rel=0.02)
        with pytest.raises(ValueError, match="no closed form of the peak"):
            memory_cost(config, "laga", kernel, 8192, 8, **options)


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


def test_a_kernel_without_closed_form_says_so() -> None:
    with pytest.raises(ValueError, match="there is one for: eager, fused, tiled"):
        memory_cost(MLAConfig.preset("deepseek-v3"), "laga", "npu", 16384, 8)
