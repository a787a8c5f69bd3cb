"""Rotary position embedding on interleaved pairs, with YaRN scaling (arXiv 2309.00071)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .config import MLAConfig

Rotary = tuple[Tensor, Tensor] | None
"""Cosines and sines ``[seq, qk_rope_head_dim / 2]`` of the tokens at hand, or ``None`` for no rotation."""


def rotary_tables(config: MLAConfig, positions: Tensor, dtype: torch.dtype, device: torch.device) -> Rotary:
    """Cosines and sines of global ``positions`` (``[seq]`` integers), each ``[seq, qk_rope_head_dim / 2]``.

    Angles are formed in fp64 on the CPU and cast once, so that far positions stay exact and no device needs fp64.
    """
    if config.rope_theta is None:
        return None
    frequencies, amplitude = _frequencies(config)
    angles = positions.to("cpu", torch.float64)[:, None] * frequencies  # [seq, rope/2]
    return (angles.cos() * amplitude).to(device, dtype), (angles.sin() * amplitude).to(device, dtype)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate each pair (x[2i], x[2i+1]) of the last dimension; x is ``[batch, seq, (heads,) rope]``."""
    if rotary is None:
        return x
    cos, sin = (t if x.dim() == 3 else t[:, None] for t in rotary)  # [seq, (1,) rope/2]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def softmax_scale(config: MLAConfig) -> float:
    """What the scores are multiplied by: 1/sqrt(qk_head_dim), times YaRN's mscale squared where it is set."""
    scale = config.qk_head_dim**-0.5
    scaling = config.rope_scaling
    if config.rope_theta is not None and scaling is not None and scaling.get("mscale_all_dim"):
        scale *= _mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return scale


def _frequencies(config: MLAConfig) -> tuple[Tensor, float]:
    """Radians a token for each pair, and the factor on cosine and sine."""
    dim, theta, scaling = config.qk_rope_head_dim, float(config.rope_theta or 0), config.rope_scaling
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling is None:
        return plain, 1.0
    factor = scaling["factor"]
    low, high = (
        _turning_dim(scaling.get(name) or default, dim, theta, scaling["original_max_position_embeddings"])
        for name, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # keeps the ramp finite
    # 0: a pair turns often enough within the trained length to stay as it is; 1: it is stretched by the factor
    ramp = ((torch.arange(dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, _amplitude(scaling)


def _turning_dim(turns: float, dim: int, theta: float, trained_length: int) -> float:
    """The dimension whose pair turns ``turns`` times within the trained length."""
    return dim * math.log(trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _amplitude(scaling: Mapping[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
