"""Rotary embedding: interleaved pairs turn as complex numbers, YaRN as in transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from laga_core import MLAConfig
from laga_core.rotary import rotary_tables, rotate, softmax_scale

BASE = replace(MLAConfig.preset("toy"), qk_rope_head_dim=16)
CPU = torch.device("cpu")


def tables(config: MLAConfig, positions: torch.Tensor):
    return rotary_tables(config, positions, torch.float64, CPU)


def turned(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Pairs as complex numbers, times exp(i position theta^(-2k/d))."""
    d = x.shape[-1]
    speed = torch.tensor([theta ** (-2 * k / d) for k in range(d // 2)], dtype=torch.float64)
    factor = torch.exp(1j * positions.double()[:, None] * speed)
    if x.dim() == 4:
        factor = factor[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * factor).flatten(-2)


@pytest.mark.parametrize("shape", [(2, 7, 16), (2, 7, 3, 16)])
def test_pairs_turn_as_complex_numbers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    positions = torch.tensor([0, 1, 5, 100, 4095, 163839, 3])
    rotated = rotate(x, tables(BASE, positions))
    assert torch.allclose(rotated, turned(x, positions), rtol=0, atol=1e-12)
    assert torch.equal(rotated[:, 0], x[:, 0])
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    scores = [
        (rotate(q, tables(BASE, torch.tensor([p + 5]))) * rotate(k, tables(BASE, torch.tensor([p])))).sum().item()
        for p in (0, 10, 10000)
    ]
    assert max(scores) - min(scores) < 1e-10


def test_no_theta_no_rotation() -> None:
    config = replace(BASE, rope_theta=None)
    assert tables(config, torch.arange(3)) is None
    x = torch.randn(1, 3, 16)
    assert rotate(x, None) is x
    assert softmax_scale(config) == config.qk_head_dim**-0.5


def test_far_positions_stay_exact_in_small_types() -> None:
    """Angles are formed in fp64: at position 163839 an fp32 angle would already be off by 1e-2."""
    positions = torch.tensor([163839])
    cos, sin = rotary_tables(BASE, positions, torch.float32, CPU)
    exact_cos, exact_sin = tables(BASE, positions)
    assert (cos - exact_cos).abs().max() < 6e-8 and (sin - exact_sin).abs().max() < 6e-8
    assert rotary_tables(BASE, positions, torch.bfloat16, CPU)[0].dtype == torch.bfloat16


YARNS = {
    "plain": {"factor": 40.0},
    "both": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "v2": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    "unequal": {"factor": 8.0, "mscale": 0.9, "mscale_all_dim": 0.4},
    "only-all": {"factor": 8.0, "mscale_all_dim": 0.8},
    "only-mscale": {"factor": 8.0, "mscale": 0.8},
    "betas": {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "given": {"factor": 4.0, "attention_factor": 1.25},
    "untruncated": {"factor": 4.0, "truncate": False},
    "one": {"factor": 1.0},
}


@pytest.mark.parametrize("name", YARNS)
@pytest.mark.parametrize("dim", [4, 16, 64])
def test_yarn_turns_as_in_transformers(name: str, dim: int) -> None:
    pytest.importorskip("transformers")
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 4096, **YARNS[name]}
    theirs = DeepseekV3Config(qk_rope_head_dim=dim, rope_parameters={"rope_theta": 10000.0, **scaling})
    speed, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert len(speed) == dim // 2

    config = replace(BASE, qk_rope_head_dim=dim, rope_scaling=scaling)
    cos, sin = tables(config, torch.tensor([1]))  # one step: the angle is the speed itself
    assert torch.allclose(torch.atan2(sin, cos)[0].float(), speed, rtol=2e-6, atol=0)
    assert (cos.square() + sin.square()).sqrt().sub(amplitude).abs().max() < 1e-12


@pytest.mark.parametrize("all_dim", [None, 0.0, 0.707, 1.0])
def test_softmax_scale_has_mscale_squared_where_it_is_set(all_dim: float | None) -> None:
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale_all_dim": all_dim}
    mscale = 0.1 * (all_dim or 0.0) * math.log(40) + 1
    scale = softmax_scale(replace(MLAConfig.preset("deepseek-v3"), rope_scaling=scaling))
    assert scale == pytest.approx(192**-0.5 * mscale**2, rel=1e-15)
