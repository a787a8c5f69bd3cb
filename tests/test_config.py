"""MLAConfig: presets, reading a Hugging Face config, and errors that say what to do."""

from __future__ import annotations

import json
import math
import time
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from laga_core import MLAConfig
from laga_core.config import PRESETS

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
HF_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, **YARN},
    "rope_theta": 10000,
    "v_head_dim": 128,
}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_is_a_valid_configuration(name: str) -> None:
    config = MLAConfig.preset(name)
    assert config.qk_head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    assert config.latent_dim == config.kv_lora_rank + config.qk_rope_head_dim
    assert hash(config) == hash(MLAConfig.preset(name))


@pytest.mark.parametrize(
    ("name", "hidden", "heads", "q_lora"),
    [
        ("deepseek-v2-lite", 2048, 16, None),
        ("deepseek-v2", 5120, 128, 1536),
        ("deepseek-v3", 7168, 128, 1536),
        ("kimi-k2", 7168, 64, 1536),
        ("paper-v3", 7168, 128, None),
    ],
)
def test_presets_have_the_published_sizes(name: str, hidden: int, heads: int, q_lora: int | None) -> None:
    config = MLAConfig.preset(name)
    assert (config.hidden_size, config.num_attention_heads, config.q_lora_rank) == (hidden, heads, q_lora)
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (
        512,
        128,
        64,
        128,
    )


def test_the_papers_prototype() -> None:
    config = MLAConfig.preset("paper-v3")
    assert (config.norm, config.causal, config.rope_theta) == ("layer", False, None)


def test_a_configuration_does_not_change_and_keeps_its_own_scaling() -> None:
    scaling = dict(YARN)
    config = replace(MLAConfig.preset("toy"), rope_scaling=scaling)
    scaling["factor"] = 1e9
    assert config.rope_scaling["factor"] == 40
    with pytest.raises(FrozenInstanceError):
        config.hidden_size = 1
    with pytest.raises(TypeError):
        MLAConfig(64, 8, None, 16, 8, 4, 6)


# --- reading a Hugging Face config ---


def test_from_hf_reads_a_dictionary_a_file_and_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(HF_V3))
    for source in (HF_V3, file, str(file), tmp_path):
        assert MLAConfig.from_hf(source) == MLAConfig.preset("deepseek-v3")


def test_from_hf_reads_the_form_of_transformers_5() -> None:
    new = {k: v for k, v in HF_V3.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {
        "rope_theta": 50000.0,
        "rope_type": "yarn",
        **{k: v for k, v in YARN.items() if k != "type"},
    }
    config = MLAConfig.from_hf(new)
    assert config.rope_theta == 50000.0
    assert config.rope_scaling["factor"] == 40
    new["rope_parameters"] = {"rope_theta": 50000.0, "rope_type": "default"}
    assert MLAConfig.from_hf(new).rope_scaling is None


def test_from_hf_reads_what_transformers_writes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    written = transformers.DeepseekV3Config(num_hidden_layers=1, q_lora_rank=None, rope_scaling=YARN)
    written.save_pretrained(tmp_path)
    config = MLAConfig.from_hf(tmp_path)
    assert config.q_lora_rank is None
    assert (config.hidden_size, config.rope_theta, config.rope_scaling["factor"]) == (7168, 10000.0, 40)


@pytest.mark.parametrize("field", ["kv_lora_rank", "q_lora_rank", "v_head_dim", "hidden_size"])
def test_from_hf_names_the_missing_field(field: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({k: v for k, v in HF_V3.items() if k != field}))
    with pytest.raises(ValueError, match=f"config.json: missing {field}"):
        MLAConfig.from_hf(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1, 2]", "expected a JSON object"),
        (b"null", "expected a JSON object"),
        (json.dumps({**HF_V3, "hidden_size": "wide"}).encode(), "hidden_size must be a whole number"),
        (json.dumps({**HF_V3, "attention_bias": True}).encode(), "attention_bias"),
        (json.dumps({**HF_V3, "rope_scaling": {"type": "linear", "factor": 2}}).encode(), "'linear'; known: 'yarn'"),
        (json.dumps({**HF_V3, "rope_scaling": "yarn"}).encode(), "rope_scaling must be a dictionary"),
        (json.dumps({**HF_V3, "rope_scaling": {"type": "yarn", "factor": 2}}).encode(), "lacks original_max_position"),
    ],
)
def test_from_hf_says_what_is_wrong_with_a_file(content: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        MLAConfig.from_hf(file)
    assert str(file) in str(caught.value)


def test_from_hf_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such config"):
        MLAConfig.from_hf(tmp_path)
    with pytest.raises(TypeError, match="path or a dictionary"):
        MLAConfig.from_hf(3)


# --- impossible values ---


def test_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown preset"):
        MLAConfig.preset([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown preset 'v3'") as caught:
        MLAConfig.preset("v3")
    assert all(name in str(caught.value) for name in PRESETS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1"),
        ({"num_attention_heads": -8}, "num_attention_heads must be at least 1"),
        ({"kv_lora_rank": 16.0}, "kv_lora_rank must be a whole number"),
        ({"kv_lora_rank": True}, "kv_lora_rank must be a whole number"),
        ({"kv_lora_rank": None}, "kv_lora_rank must be a whole number"),
        ({"qk_rope_head_dim": 5}, "must be even"),
        ({"norm": "batch"}, "known: 'rms', 'layer'"),
        ({"norm_eps": 0.0}, "norm_eps must be a positive number"),
        ({"norm_eps": math.nan}, "norm_eps must be a positive number"),
        ({"norm_eps": math.inf}, "norm_eps must be a positive number"),
        ({"rope_theta": math.inf}, "rope_theta must be a number above 1"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 1"),
        ({"hidden_size": 10**20}, "hidden_size must be at least 1 and at most"),
        (
            {"rope_scaling": {"type": "yarn", "factor": math.inf, "original_max_position_embeddings": 4096}},
            "'factor'.*must be a number",
        ),
        ({"rope_theta": -1.0}, "rope_theta must be a number above 1"),
        ({"rope_theta": math.nan}, "rope_theta must be a number above 1"),
        ({"causal": 1}, "causal must be True or False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 8}}, "factor"),
        ({"rope_scaling": {**YARN, "beta_fast": "many"}}, "beta_fast"),
        ({"rope_scaling": {**YARN, "factor": None}}, "factor"),
    ],
)
def test_impossible_values_name_the_field(change: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(MLAConfig.preset("toy"), **change)


@pytest.mark.parametrize("sp", [0, -1, 2.0, True, "2"])
def test_degree_must_be_a_whole_number(sp: object) -> None:
    with pytest.raises(ValueError, match="whole number of at least 1"):
        MLAConfig.preset("toy").check_degree(sp)


def test_a_degree_for_very_many_heads_is_refused_at_once() -> None:
    config = replace(MLAConfig.preset("toy"), num_attention_heads=10**9)
    started = time.monotonic()
    with pytest.raises(ValueError, match=r"sp among \[1, 2, 4, 5, 8, .*, 500000000, 1000000000\]"):
        config.check_degree(3)
    assert time.monotonic() - started < 1


def test_degree_must_divide_the_heads() -> None:
    MLAConfig.preset("toy").check_degree(8)
    with pytest.raises(ValueError, match=r"8 heads .* sp=3 .*\[1, 2, 4, 8\]"):
        MLAConfig.preset("toy").check_degree(3)
