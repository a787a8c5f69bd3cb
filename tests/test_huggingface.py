"""Against transformers' DeepseekV3Attention with the same weights: output and every gradient."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
from cases import VARIANTS, Case, worst_error

from laga_core import MLAAttention, MLAConfig

pytest.importorskip("transformers")
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as reference

NAMES = [f"{form}-{next(iter(options.values()), 'only')}" for form, options in VARIANTS]
BASE = MLAConfig(
    hidden_size=96,
    num_attention_heads=4,
    q_lora_rank=32,
    kv_lora_rank=40,
    qk_nope_head_dim=24,
    qk_rope_head_dim=16,
    v_head_dim=20,
)
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 4, "beta_slow": 1}
CONFIGS = {
    "rope": BASE,
    "rope-other-theta": replace(BASE, rope_theta=500.0),
    "direct-query": replace(BASE, q_lora_rank=None),
    "yarn": replace(BASE, rope_scaling=YARN),
    "yarn-mscale": replace(BASE, rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn-unequal-mscale": replace(BASE, rope_scaling={**YARN, "mscale": 1.3, "mscale_all_dim": 0.6}),
    # DeepSeek-V2-Lite's own head sizes and YaRN, with fewer heads and a smaller hidden size
    "v2-lite-like": replace(MLAConfig.preset("deepseek-v2-lite"), hidden_size=128, num_attention_heads=4),
}


def theirs(config: MLAConfig) -> DeepseekV3Config:
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling:
        rope |= {"rope_type": "yarn", **{k: v for k, v in config.rope_scaling.items() if k != "type"}}
    names = ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    names += ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    found = DeepseekV3Config(
        **{name: getattr(config, name) for name in names},
        num_key_value_heads=config.num_attention_heads,
        rope_parameters=rope,
        max_position_embeddings=4096,
        attn_implementation="eager",
    )
    found._attn_implementation = "eager"
    return found


@contextmanager
def in_fp64():
    """Lift what transformers hard-codes as fp32: norms, rotary tables, the eager softmax."""
    float32, softmax, to = torch.float32, torch.nn.functional.softmax, torch.Tensor.to

    def lifted_to(self, *args, **kwargs):
        args = tuple(torch.float64 if arg is float32 else arg for arg in args)
        if kwargs.get("dtype") is float32:
            kwargs["dtype"] = torch.float64
        return to(self, *args, **kwargs)

    def lifted_softmax(x, dim, dtype=None):
        return softmax(x, dim=dim)

    with (
        mock.patch.object(torch.Tensor, "to", lifted_to),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch.nn.functional, "softmax", lifted_softmax),
        mock.patch.object(torch, "float", torch.float64),
    ):
        yield


def reference_gradients(case: Case) -> dict[str, torch.Tensor]:
    weights, hidden, cotangent = case.drawn()
    config = theirs(case.config)
    module = reference.DeepseekV3Attention(config, layer_idx=0).to(case.dtype)
    module.load_state_dict(weights, strict=True)
    hidden.requires_grad_()
    positions = torch.arange(case.seq)[None]
    mask = torch.full((case.seq, case.seq), -torch.inf, dtype=case.dtype).triu(1)[None, None]

    def call() -> torch.Tensor:
        rotary = reference.DeepseekV3RotaryEmbedding(config)(hidden, positions)
        return module(hidden, rotary, mask)[0]

    if case.dtype == torch.float64:
        with in_fp64():
            out = call()
    else:
        out = call()
    out.backward(cotangent)
    return {"out": out.detach(), "hidden": hidden.grad, **{k: p.grad for k, p in module.named_parameters()}}


def our_gradients(case: Case) -> dict[str, torch.Tensor]:
    weights, hidden, cotangent = case.drawn()
    module = MLAAttention(case.config, form=case.form, dtype=case.dtype, **case.options)
    module.load_state_dict(weights, strict=True)
    out = module(hidden.requires_grad_())
    out.backward(cotangent)
    return {"out": out.detach(), "hidden": hidden.grad, **{k: p.grad for k, p in module.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("form", "options"), VARIANTS, ids=NAMES)
def test_output_and_gradients_match_transformers(form: str, options: dict, name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    case = Case(config, form, options, batch=2, seq=48, dtype=dtype, seed=3)
    limit = 2e-6 if dtype == torch.float32 else 1e-7 if config.rope_scaling else 1e-9
    error, where = worst_error(our_gradients(case), reference_gradients(case))
    assert error <= limit, f"{where} is off by {error:.1e}"


def test_fp64_has_really_been_lifted() -> None:
    """Without the lift the reference itself is only good to fp32, and the fp64 comparison would mean nothing."""
    case = Case(BASE, "explicit", seq=48)
    lifted = reference_gradients(case)["out"]
    with mock.patch(f"{__name__}.in_fp64", contextmanager(lambda: iter([None]))):
        plain = reference_gradients(case)["out"]
    assert 1e-9 < (lifted - plain).abs().max() / plain.abs().max() < 1e-4


def test_from_hf_reads_the_configuration_that_transformers_holds() -> None:
    for config in CONFIGS.values():
        read = MLAConfig.from_hf(theirs(config).to_dict())
        assert replace(read, rope_scaling=None) == replace(config, rope_scaling=None)
        wanted = {k: v for k, v in (config.rope_scaling or {}).items() if k not in ("type", "rope_type")}
        assert {k: (read.rope_scaling or {}).get(k) for k in wanted} == wanted
