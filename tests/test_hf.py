"""A transformers model with its attention swapped, on shards, against the untouched model on the whole sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import COMPILER, on_ranks, raised

from laga_core import all_reduce_gradients
from laga_core.training import shard

transformers = pytest.importorskip("transformers")

from laga_core import hf  # noqa: E402

BATCH, SEQ = 3, 24
LENGTHS = (24, 17, 5)  # with sp = 4, one sequence ends inside a shard and one leaves three shards empty
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MODELS = {
    "v3": ("DeepseekV3", {"q_lora_rank": 12, "n_group": 2, "topk_group": 1, "rope_parameters": YARN}),
    "v2": (
        "DeepseekV2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | {"rope_parameters": YARN},
    ),
    "glm": ("Glm4MoeLite", {"q_lora_rank": 12, "n_group": 1, "topk_group": 1, "rope_parameters": YARN}),
    "youtu": ("Youtu", {"q_lora_rank": 12, "tie_word_embeddings": True}),
}
CASES = [  # with options there is no padding
    ("v3", "laga", torch.float64, {}),
    ("v3", "laga", torch.float32, {}),
    ("v3", "absorbed", torch.float64, {}),
    ("v3", "explicit", torch.float64, {}),
    ("v3", "laga", torch.float64, {"kernel": "tiled", "recompute": True, "head_chunk": 1, "overlap": True}),
    ("v2", "laga", torch.float64, {}),
    ("v2", "laga", torch.float32, {}),
    ("glm", "laga", torch.float64, {}),
    ("youtu", "laga", torch.float64, {}),
]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def build(name: str, dtype: torch.dtype = torch.float64, **changes):
    family, sizes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes, **changes})
    config._attn_implementation = "sdpa"  # the eager one computes its softmax in fp32
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)


def batch(padding: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels (some of them not to be learnt, but those of padding among the others) and a padding mask."""
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 40, (BATCH, SEQ), generator=source)
    labels = tokens.masked_fill(torch.rand(BATCH, SEQ, generator=source) < 0.2, -100)
    lengths = torch.tensor(LENGTHS if padding else [SEQ] * BATCH)
    return tokens, labels, (torch.arange(SEQ) < lengths[:, None]).long()


@contextmanager
def in_fp64() -> Iterator[None]:
    """Lift what transformers hard-codes as fp32 (norms, router, rotary tables, loss), where a model is in fp64."""

    class Lifted:
        float32 = float = torch.float64

        def __getattr__(self, name):
            return getattr(torch, name)

    modules = [
        f"transformers.models.{m}.modeling_{m}" for m in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu")
    ]
    for module in modules:
        __import__(module)
    patches = [mock.patch(f"{module}.torch", Lifted()) for module in modules]
    patches.append(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def exactly(dtype: torch.dtype) -> Iterator[None]:
    if dtype == torch.float64:
        with in_fp64():
            yield
    else:
        yield


def step(model, tokens, labels, mask) -> dict[str, torch.Tensor]:
    out = model(input_ids=tokens, labels=labels, attention_mask=mask)
    out.loss.backward()
    return {"loss": out.loss.detach(), "logits": out.logits.detach()}


def swapped(group, cases) -> list[dict[str, torch.Tensor]]:
    results = []
    for name, form, dtype, options in cases:
        with exactly(dtype):
            model = hf.apply(build(name, dtype), group, form=form, **options)
            result = step(model, *(shard(x, group) for x in batch(padding=not options)))
        if group is not None:
            all_reduce_gradients(model, group)
        results.append({**result, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    return results


@pytest.fixture(scope="module")
def untouched() -> dict[tuple[str, torch.dtype, bool], dict[str, torch.Tensor]]:
    results = {}
    for name, _, dtype, options in CASES:
        padding = not options
        if (name, dtype, padding) not in results:
            with exactly(dtype):
                model = build(name, dtype)
                result = step(model, *batch(padding))
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            results[name, dtype, padding] = {**result, **grads}
    return results


@pytest.mark.parametrize("sp", [1, 2, 4])
def test_loss_logits_and_every_gradient_are_those_of_the_untouched_model(sp: int, untouched) -> None:
    ranks = [swapped(None, CASES)] if sp == 1 else on_ranks(swapped, CASES, sp=sp, timeout=110, preload=[COMPILER])
    for number, (name, form, dtype, options) in enumerate(CASES):
        want = untouched[name, dtype, not options]
        got = {**ranks[0][number], "logits": torch.cat([rank[number]["logits"] for rank in ranks], dim=1)}
        assert got.keys() == want.keys()
        assert want["loss"].dtype == dtype
        assert want["model.layers.2.self_attn.kv_b_proj.weight"].abs().max() > 1e-3  # there is something to compare
        for tensor, expected in want.items():
            error = ((got[tensor] - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
            assert error <= TOLERANCE[dtype], f"{name} {form} {options} {dtype} sp {sp}: {tensor} is off by {error:.1e}"
        assert all(torch.equal(rank[number]["loss"], got["loss"]) for rank in ranks)


def test_weights_stay_in_place_and_what_is_saved_is_what_would_have_been(tmp_path: Path) -> None:
    model = build("v3", torch.float32)
    before = dict(model.named_parameters())
    model.save_pretrained(tmp_path / "before")
    assert hf.apply(model) is model
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    model.save_pretrained(tmp_path / "after")
    files = sorted(file.name for file in (tmp_path / "before").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "after").iterdir())
    for file in files:
        assert (tmp_path / "before" / file).read_bytes() == (tmp_path / "after" / file).read_bytes(), file


def test_gradient_checkpointing_and_embeddings_as_input_change_nothing() -> None:
    with in_fp64():
        tokens, labels, mask = batch()
        plain, other = hf.apply(build("v3")), hf.apply(build("v3"))
        other.activation_checkpointing_enable()
        plain.train()
        other.train()
        expected = step(plain, tokens, labels, mask)["loss"]
        out = other(inputs_embeds=other.model.embed_tokens(tokens), labels=labels, attention_mask=mask.bool())
        out.loss.backward()
    assert torch.equal(out.loss, expected)
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert (a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad), name


def test_num_items_in_batch_and_shifted_labels_are_taken_as_the_model_takes_them() -> None:
    with in_fp64():
        tokens, labels, _ = batch()
        untouched, ours = build("v3"), hf.apply(build("v3"))
        shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
        for keywords in ({"num_items_in_batch": 11}, {"shift_labels": shifted}):
            want, got = (model(input_ids=tokens, labels=labels, **keywords).loss for model in (untouched, ours))
            assert (want - got).abs() < 1e-12


def test_an_unsupported_model_is_refused_and_left_alone() -> None:
    model = build("v3", torch.float32)
    names = [type(m).__name__ for m in model.modules()]
    for kwargs, message in (
        ({"form": "lega"}, "unknown form 'lega'"),
        ({"kernel": "fast"}, "unknown kernel 'fast'"),
        ({"layout": "zigzag", "context": 1}, "zigzag"),
        ({"query": "latent"}, "query='latent' is not supported here"),
    ):
        with pytest.raises(ValueError, match=message):
            hf.apply(model, **kwargs)
    with pytest.raises(TypeError, match="a model of transformers, got Linear"):
        hf.apply(torch.nn.Linear(2, 2))
    for changes, message in (
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"rope_interleave": False}, "rope_interleave"),
    ):
        with pytest.raises(ValueError, match=message):
            hf.apply(build("v3", torch.float32, **changes))
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(ValueError, match="LlamaAttention is not supported; known: DeepseekV2Attention"):
        hf.apply(llama)
    classifier = transformers.DeepseekV3ForSequenceClassification(model.config)
    with pytest.raises(ValueError, match="DeepseekV3ForSequenceClassification is not supported"):
        hf.apply(classifier)
    assert names == [type(m).__name__ for m in model.modules()]
    attention = model.model.layers[1].self_attn
    own = type(attention)
    attention.__class__ = type("DeepseekV3Attention", (own,), {})  # as a model brings it that runs code of its own
    with pytest.raises(ValueError, match="not the one of transformers; load the model without trust_remote_code"):
        hf.apply(model)
    attention.__class__ = own
    hf.apply(model)
    with pytest.raises(ValueError, match="has been swapped before"):
        hf.apply(model)


def bad_calls(group) -> dict[str, str]:
    """What each bad call raises on this rank; a hang would be the worst answer."""
    model = hf.apply(build("v3"), group)
    tokens, labels, mask = (shard(x, group) for x in batch())
    whole = batch()[2]
    left = shard(whole.flip(1), group)
    hole = mask.clone()
    hole[0, 0] = 0
    calls = {
        "cache": {"use_cache": True},
        "past": {"past_key_values": transformers.DynamicCache()},
        "whole mask": {"attention_mask": whole},
        "4d mask": {"attention_mask": torch.ones(BATCH, 1, 12, 12)},
        "padding first": {"attention_mask": left},
        "a hole": {"attention_mask": hole},
        "nothing": {"attention_mask": torch.zeros_like(mask)},
        "positions": {"position_ids": torch.arange(12)[None] + 1},
        "attentions": {"output_attentions": True},
    }
    found = {name: raised(lambda k=k: model(input_ids=tokens, labels=labels, **k)) for name, k in calls.items()}
    rank = torch.distributed.get_rank(group)
    found["one rank"] = raised(lambda: model(input_ids=tokens[:, : 12 - rank]))
    found["mask on one rank"] = raised(lambda: model(input_ids=tokens, attention_mask=mask if rank else None))
    # What stops one rank by itself must stop the others too.
    bad_token, bad_label = tokens.clone(), labels.clone()
    bad_token[0, 0], bad_label[0, 0] = 40, -7
    whole_labels, embeds = batch()[1], model.model.embed_tokens(tokens)
    one_rank = {
        "token": {"input_ids": bad_token},
        "tokens": {"input_ids": tokens[0]},
        "no tokens": {"input_ids": None},
        "both": {"inputs_embeds": embeds},
        "width": {"input_ids": None, "inputs_embeds": embeds[..., 1:]},
        "label": {"labels": bad_label},
        "whole labels": {"labels": whole_labels},
        "no labels": {"labels": None},
        "count": {"num_items_in_batch": 7},
        "packed": {"cu_seq_lens_q": torch.tensor([0, 5, 12])},
        "logits": {"logits_to_keep": 1},
    }
    for name, keywords in one_rank.items():
        call = {"input_ids": tokens, "labels": labels, **(keywords if rank else {})}
        found[name] = raised(lambda call=call: model(**call))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found["autocast"] = raised(lambda: model(input_ids=tokens))
    found["generate"] = raised(lambda: model.generate(tokens, max_new_tokens=1))
    with in_fp64():
        found["fine"] = raised(lambda: model(input_ids=tokens, attention_mask=mask, labels=labels))
    model = hf.apply(build("v3"), group, recompute=True)
    found["padding with an option"] = raised(lambda: model(input_ids=tokens, attention_mask=mask))
    found["no heads"] = raised(lambda: hf.apply(build("v3", num_attention_heads=3, num_key_value_heads=3), group))
    return found


def test_bad_calls_raise_alike_on_every_rank() -> None:
    first, second = on_ranks(bad_calls, sp=2)
    assert first == second
    wanted = {
        "cache": "use_cache=True is not supported",
        "past": "is not supported: this is for training",
        "whole mask": r"attention_mask must be this rank's shard \[3, 12\]",
        "4d mask": r"this rank's shard \[3, 12\] .* got \[3, 1, 12, 12\]",
        "padding first": "the padding, at the end",
        "a hole": "the padding, at the end",
        "nothing": "masks a whole sequence",
        "positions": "position_ids must run from 0 to 11",
        "attentions": "output_attentions=True is not supported",
        "one rank": "local sequence length is 12 on rank 0, 11 on rank 1",
        "mask on one rank": "attention_mask given is 0 on rank 0, 1 on rank 1",
        "token": "^ValueError: rank 1: input_ids must be numbers from 0 to 39, got 40",
        "tokens": r"^ValueError: rank 1: input_ids must be \[batch, seq/sp\], got \[12\]",
        "no tokens": "^ValueError: rank 1: .* one of them, and not both",
        "both": "^ValueError: rank 1: .* one of them, and not both",
        "width": r"rank 1: inputs_embeds must be \[batch, seq/sp, 32\], got \[3, 12, 31\]",
        "label": "^ValueError: rank 1: labels must be numbers from 0 to 39, or -100 .*, got -7",
        "whole labels": r"^ValueError: rank 1: labels must be \[3, 12\], got \[3, 24\]",
        "no labels": "labels given is labels on rank 0, none on rank 1",
        "count": "count is none on rank 0, 7.0 on rank 1",
        "packed": "^ValueError: rank 1: cu_seq_lens_q is not supported",
        "logits": "^ValueError: rank 1: logits_to_keep is not supported",
        "autocast": "autocast is not supported",
        "generate": "this is for training",
        "padding with an option": "without further options",
        "no heads": "3 heads cannot be split evenly over sp",
    }
    assert first.pop("fine") == "nothing"
    assert first.keys() == wanted.keys()
    for name, message in wanted.items():
        assert first[name].startswith("ValueError"), f"{name}: {first[name]}"
        assert re.search(message, first[name]), f"{name}: {first[name]}"
