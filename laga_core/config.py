"""MLA dimensions under their Hugging Face names, with presets and a reader for ``config.json``."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
_LARGEST = 1 << 40  # of a size; beyond it counts of bytes and operations leave what numbers can hold
_YARN_REQUIRED = ("factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """The dimensions of one Multi-head Latent Attention layer (DeepSeek-V2, arXiv 2405.04434, §2.1).

    All sizes are element counts. ``q_lora_rank=None`` means queries are projected directly from the hidden state.
    ``rope_theta=None`` switches the rotation off. ``rope_scaling`` is ``None`` or a YaRN dictionary with the keys of a
    Hugging Face ``config.json``. ``norm`` is the normalisation of the latents: ``"rms"`` (DeepSeek) or ``"layer"``.

    Raises ``ValueError`` or ``TypeError`` for a size that is no positive integer, an odd rotary size, an unknown norm
    or an unknown kind of ``rope_scaling``.
    """

    hidden_size: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float | None = 10000.0
    # A mapping cannot be hashed; equality still compares it.
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    norm: str = "rms"
    norm_eps: float = 1e-6
    causal: bool = True

    def __post_init__(self) -> None:
        for name in _REQUIRED:
            value = getattr(self, name)
            if name == "q_lora_rank" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"MLAConfig: {name} must be a whole number, got {value!r}")
            if not 1 <= value <= _LARGEST:
                raise ValueError(f"MLAConfig: {name} must be at least 1 and at most {_LARGEST}, got {value}")
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"MLAConfig: qk_rope_head_dim must be even (RoPE rotates pairs), got {self.qk_rope_head_dim}"
            )
        if self.norm not in ("rms", "layer"):
            raise ValueError(f"MLAConfig: unknown norm {self.norm!r}; known: 'rms', 'layer'")
        if not (_is_number(self.norm_eps) and self.norm_eps > 0):
            raise ValueError(f"MLAConfig: norm_eps must be a positive number, got {self.norm_eps!r}")
        if self.rope_theta is not None and not (_is_number(self.rope_theta) and self.rope_theta > 1):
            raise ValueError(f"MLAConfig: rope_theta must be a number above 1, or None, got {self.rope_theta!r}")
        if not isinstance(self.causal, bool):
            raise TypeError(f"MLAConfig: causal must be True or False, got {self.causal!r}")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", _check_rope_scaling(self.rope_scaling))

    @property
    def qk_head_dim(self) -> int:
        """Elements of one query or key head: the part without position and the rotary band."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements a token that the latent gather moves: the key-value latent and the shared rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def check_degree(self, sp: int) -> None:
        """Raise ``ValueError`` unless ``sp`` ranks can split this configuration's heads evenly."""
        if isinstance(sp, bool) or not isinstance(sp, int) or sp < 1:
            raise ValueError(f"sequence parallel degree sp must be a whole number of at least 1, got {sp!r}")
        if self.num_attention_heads % sp:
            raise ValueError(
                f"{self.num_attention_heads} heads cannot be split evenly over sp={sp} ranks; "
                f"choose sp among {divisors(self.num_attention_heads)}"
            )

    @classmethod
    def preset(cls, name: str) -> MLAConfig:
        """The configuration of a published model; ``ValueError`` lists the known names."""
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}")
        return cls(**PRESETS[name])

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> MLAConfig:
        """Read a Hugging Face ``config.json``: a file, a folder that holds one, or its dictionary.

        Raises ``FileNotFoundError``, or ``ValueError`` naming the fields that are missing or not supported.
        """
        values, origin = _read_hf(source)
        missing = [name for name in _REQUIRED if name not in values]
        if missing:
            raise ValueError(
                f"{origin}: missing {', '.join(missing)}; an MLA model's config has {', '.join(_REQUIRED)} "
                "(q_lora_rank may be null)"
            )
        if values.get("attention_bias"):
            raise ValueError(f"{origin}: attention_bias=true is not supported; MLA projections here have no bias")
        rope = values.get("rope_parameters") or {}  # transformers 5 keeps theta and the scaling in one entry
        if not isinstance(rope, Mapping):
            raise ValueError(f"{origin}: rope_parameters must be a dictionary, got {rope!r}")
        scaling = values.get("rope_scaling") or {k: v for k, v in rope.items() if k != "rope_theta"} or None
        if isinstance(scaling, Mapping) and scaling.get("rope_type", scaling.get("type")) == "default":
            scaling = None
        dimensions = {name: values[name] for name in _REQUIRED}
        theta = values.get("rope_theta", rope.get("rope_theta", 10000.0))
        try:
            return cls(**dimensions, rope_theta=theta, rope_scaling=scaling)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{origin}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def divisors(number: int) -> list[int]:
    """The numbers that divide ``number``, in order."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _check_rope_scaling(scaling: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(scaling, Mapping):
        raise TypeError(f"MLAConfig: rope_scaling must be a dictionary or None, got {scaling!r}")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind != "yarn":
        raise ValueError(f"MLAConfig: unknown rope_scaling type {kind!r}; known: 'yarn' (or rope_scaling=None)")
    missing = [name for name in _YARN_REQUIRED if name not in scaling]
    if missing:
        raise ValueError(f"MLAConfig: rope_scaling lacks {', '.join(missing)}")
    for name, value in scaling.items():
        if name in ("rope_type", "type", "truncate"):
            continue
        if value is not None and not (_is_number(value) and value >= 0):
            raise ValueError(f"MLAConfig: rope_scaling[{name!r}] must be a number of at least 0, got {value!r}")
    for name in _YARN_REQUIRED:
        if not scaling[name] or scaling[name] < 1:
            raise ValueError(f"MLAConfig: rope_scaling[{name!r}] must be at least 1, got {scaling[name]!r}")
    return dict(scaling)


def _read_hf(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config dictionary"
    if not isinstance(source, (str, Path)):
        raise TypeError(f"from_hf takes a path or a dictionary, got {type(source).__name__}")
    path = Path(source)
    if os.path.isdir(path):  # unlike Path's own, these take what cannot be a path for one that is not there
        path = path / "config.json"
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such config.json; give a file, a model folder or a dictionary")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a JSON object with the model's fields, got {type(values).__name__}")
    return values, str(path)


def _yarn(factor: float, mscale: float, beta_fast: float = 32) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


_HEAD = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

PRESETS: dict[str, dict[str, Any]] = {
    # config.json of deepseek-ai/DeepSeek-V2-Lite on the Hugging Face hub
    "deepseek-v2-lite": dict(
        hidden_size=2048, num_attention_heads=16, q_lora_rank=None, **_HEAD, rope_scaling=_yarn(40, 0.707)
    ),
    # arXiv 2405.04434 §3.1.2; YaRN as in §3.1.4, 0.0707 ln s + 1
    "deepseek-v2": dict(
        hidden_size=5120, num_attention_heads=128, q_lora_rank=1536, **_HEAD, rope_scaling=_yarn(40, 0.707)
    ),
    # config.json of deepseek-ai/DeepSeek-V3; arXiv 2412.19437 §4.2
    "deepseek-v3": dict(
        hidden_size=7168, num_attention_heads=128, q_lora_rank=1536, **_HEAD, rope_scaling=_yarn(40, 1.0)
    ),
    # config.json of moonshotai/Kimi-K2-Instruct
    "kimi-k2": dict(
        hidden_size=7168,
        num_attention_heads=64,
        q_lora_rank=1536,
        **_HEAD,
        rope_theta=50000.0,
        rope_scaling=_yarn(32, 1.0, beta_fast=1),
    ),
    # config.json of openbmb/MiniCPM3-4B (its long-context RoPE factors are left out: they change no size)
    "minicpm3-4b": {
        "hidden_size": 2560,
        "num_attention_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
    },
    # The paper's prototype, §4.1: V3 dimensions, direct query projection, LayerNorm on the latent. The paper says
    # neither whether the rotary bands were rotated nor whether a mask was used; without both, its memory comes out.
    "paper-v3": dict(
        hidden_size=7168,
        num_attention_heads=128,
        q_lora_rank=None,
        **_HEAD,
        rope_theta=None,
        norm="layer",
        causal=False,
    ),
    # Small enough to read by eye and to run on a laptop in milliseconds; no published model.
    "toy": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
}
