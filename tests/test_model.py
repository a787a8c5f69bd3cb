"""The language model: its blocks, its weights, and its loss over shards."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from ranks import on_ranks, raised

from laga_core import MLAConfig
from laga_core.experts import ExpertConfig, reduce_gradients
from laga_core.loss import next_labels, token_mean
from laga_core.model import LanguageModel, ModelConfig
from laga_core.training import shard

VOCAB, BATCH, SEQ = 19, 2, 12


def config(**changes) -> ModelConfig:
    sizes = {
        "attention": MLAConfig.preset("toy"),
        "vocab_size": VOCAB,
        "num_hidden_layers": 2,
        "intermediate_size": 40,
        "initializer_range": 0.2,
    }
    return ModelConfig(**{**sizes, **changes})


EXPERTS = ExpertConfig(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, n_shared_experts=1)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels, of which the ranks have different numbers that count."""
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (BATCH, SEQ), generator=source)
    labels = torch.randint(VOCAB, (BATCH, SEQ), generator=source)
    labels[:, 7:] = -100
    labels[0, 0] = -100
    return tokens, labels


def gradients(group, form: str, tied: bool, ep: int) -> dict[str, torch.Tensor]:
    model = LanguageModel(
        config(tie_word_embeddings=tied, experts=EXPERTS if ep else None, first_k_dense_replace=1),
        form,
        group=group,
        dtype=torch.float64,
    )
    tokens, labels = (shard(x, group) for x in batch())
    loss = token_mean(model(tokens), labels, group)
    loss.backward()
    reduce_gradients(model, group)
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


VARIANTS = [("laga", False, 1), ("absorbed", True, 0), ("explicit", False, 0)]


def everything(group) -> dict[str, Any]:
    """What a rank finds, for all tests of this module: starting ranks takes longer than what they do."""
    return {
        "gradients": [gradients(group, *variant) for variant in VARIANTS],
        "labels": next_labels(shard(torch.arange(24).view(2, 12), group), group),
        "weights": weights_of(group, 2),
        "bad tokens": bad_tokens(group),
    }


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, Any]]]:
    return {sp: on_ranks(everything, sp=sp) for sp in (2, 4)}


@pytest.mark.parametrize("sp", [2, 4])
def test_loss_and_every_gradient_do_not_depend_on_the_degree(sp: int, found) -> None:
    for rank in found[sp]:
        for variant, got in zip(VARIANTS, rank["gradients"], strict=True):
            want = gradients(None, *variant)
            assert got.keys() == want.keys()
            for name, expected in want.items():
                assert (got[name] - expected).abs().max() <= 1e-12, f"{variant} sp {sp}: {name}"


def test_the_loss_is_the_mean_over_all_tokens_that_count() -> None:
    source = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, SEQ, VOCAB, generator=source)
    _, labels = batch()
    by_hand = [
        -logits[b, s].log_softmax(-1)[labels[b, s]] for b in range(BATCH) for s in range(SEQ) if labels[b, s] >= 0
    ]
    assert torch.allclose(token_mean(logits, labels, None), torch.stack(by_hand).mean())
    assert torch.allclose(token_mean(logits, labels, None, count=7), torch.stack(by_hand).sum() / 7)


def test_labels_are_shifted_across_the_borders_of_shards(found) -> None:
    labels = torch.arange(24).view(2, 12)
    want = torch.cat((labels[:, 1:], torch.full((2, 1), -100)), dim=1)
    for ranks in found.values():
        assert torch.equal(torch.cat([rank["labels"] for rank in ranks], dim=1), want)
    assert torch.equal(next_labels(labels, None), want)


def weights_of(group, ep: int) -> dict[str, torch.Tensor]:
    model = LanguageModel(config(experts=EXPERTS), group=group, ep=ep, seed=3)
    found = dict(model.named_parameters())
    first = model.layers[0].mlp.experts.first
    return {"first": torch.tensor(first), **{name: p.detach() for name, p in found.items()}}


def test_every_expert_has_the_same_weights_whatever_ep_is(found) -> None:
    whole = weights_of(None, 1)
    assert not torch.equal(whole["layers.0.mlp.experts.down_proj"][0], whole["layers.0.mlp.experts.down_proj"][1])
    for rank in (rank for ranks in found.values() for rank in ranks):
        first = int(rank["weights"].pop("first"))
        for name, weight in rank["weights"].items():
            own = whole[name][first : first + 2] if ".experts." in name else whole[name]
            assert torch.equal(weight, own), name


def test_dtype_does_not_change_the_draw_and_a_seed_does() -> None:
    one, other = LanguageModel(config()), LanguageModel(config(), dtype=torch.float64)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.double(), b)
    assert not torch.equal(one.embed_tokens.weight, LanguageModel(config(), seed=1).embed_tokens.weight)
    assert 0.9 < one.embed_tokens.weight.std() < 1.1
    assert LanguageModel(config(tie_word_embeddings=True)).embed_tokens.weight.std() < 0.3


def test_later_tokens_do_not_change_earlier_logits() -> None:
    model = LanguageModel(config(experts=EXPERTS), dtype=torch.float64)
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :8], after[:, :8], rtol=0, atol=1e-13)
    assert not torch.allclose(before[:, 8], after[:, 8])


def bad_tokens(group) -> dict[str, str]:
    model, rank = LanguageModel(config(), group=group), torch.distributed.get_rank(group)
    tokens, labels = (shard(x, group) for x in batch())
    bad_token, bad_label = tokens.clone(), labels.clone()
    bad_token[0, 0], bad_label[0, 0] = VOCAB, -1
    logits = model(tokens).detach()
    return {
        "token": raised(lambda: model(bad_token if rank else tokens)),
        "floats": raised(lambda: model(tokens.float() if rank else tokens)),
        "label": raised(lambda: token_mean(logits, bad_label if rank else labels, group)),
        "labels": raised(lambda: token_mean(logits, labels[:, 1:] if rank else labels, group)),
        "count": raised(lambda: token_mean(logits, labels, group, count=5 + rank)),
        "fine": raised(lambda: token_mean(model(tokens), labels.int(), group)),
    }


def test_what_stops_one_rank_stops_all(found) -> None:
    first, second = (rank["bad tokens"] for rank in found[2])
    assert first == second
    assert first.pop("count").startswith("ValueError: the ranks do not agree: count is 5.0 on rank 0, 6.0 on rank 1")
    assert first == {
        "token": "ValueError: rank 1: tokens must be numbers from 0 to 18, got 19",
        "floats": "ValueError: rank 1: tokens must be a tensor of whole numbers, got torch.float32",
        "label": "ValueError: rank 1: labels must be numbers from 0 to 18, or -100 for what does not count, got -1",
        "labels": "ValueError: rank 1: labels must be [2, 6], got [2, 5]",
        "fine": "nothing",
    }


def test_bad_sizes_raise() -> None:
    with pytest.raises(ValueError, match="vocab_size must be a whole number of at least 1, got 0"):
        config(vocab_size=0)
    with pytest.raises(ValueError, match="unknown form 'lega'"):
        LanguageModel(config(), "lega")
    refusal = pytest.raises(ValueError, match="a sequence of 11 tokens cannot be split evenly over sp=2")
    with mock.patch("laga_core.training.degree", return_value=2), refusal:
        shard(torch.zeros(1, 11), None)
