"""Training under sequence parallelism: it learns, it resumes as if it had not stopped, the forms learn alike."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from drawing import drawn
from ranks import COMPILER, on_ranks, raised

from laga_core import MLAConfig
from laga_core.charts import training as charts
from laga_core.experiments import convergence
from laga_core.experiments.checks.records import published
from laga_core.experts import ExpertConfig
from laga_core.model import LanguageModel, ModelConfig
from laga_core.results import Store
from laga_core.training import Trainer


def model(group=None, ep: int = 1, seed: int = 0, hidden: int = 32, **changes) -> LanguageModel:
    attention = MLAConfig(
        hidden_size=hidden,
        num_attention_heads=4,
        q_lora_rank=None,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    )
    experts = ExpertConfig(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    sizes = {"vocab_size": 23, "num_hidden_layers": 2, "intermediate_size": 32, "experts": experts}
    return LanguageModel(ModelConfig(attention=attention, **{**sizes, **changes}), group=group, ep=ep, seed=seed)


def tokens(step: int) -> torch.Tensor:
    return torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(step))


def train(trainer: Trainer, steps: range) -> list[float]:
    return [trainer.step(tokens(step)) for step in steps]


def stopped_and_not(group, folder: str, ep: int) -> tuple[list[float], list[float], bool]:
    """Losses without a stop, and with one after which another model with other weights goes on."""
    straight = Trainer(model(group, ep))
    without = train(straight, range(8))
    first = Trainer(model(group, ep))
    losses = train(first, range(4))
    first.save(folder)
    second = Trainer(model(group, ep, seed=5))
    train(second, range(2))
    second.load(folder)
    losses += train(second, range(second.steps, 8))
    pairs = zip(straight.model.parameters(), second.model.parameters(), strict=True)
    return without, losses, all(torch.equal(a, b) for a, b in pairs)


def test_a_resumed_run_is_the_same_bit_for_bit_in_one_process(tmp_path: Path) -> None:
    without, losses, same_weights = stopped_and_not(None, str(tmp_path / "checkpoint"), 1)
    assert losses == without
    assert same_weights
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def on_all_degrees(group, folder: str) -> list[tuple[list[float], list[float], bool]]:
    return [stopped_and_not(group, f"{folder}/{ep}", ep) for ep in (1, 2, 4)]


def with_other_ranks(group, folder: str, ep: int) -> list[float]:
    trainer = Trainer(model(group, ep, seed=9))
    trainer.load(folder)
    return train(trainer, range(trainer.steps, 8))


def test_a_resumed_run_is_the_same_bit_for_bit_on_ranks_with_experts(tmp_path: Path) -> None:
    ranks = on_ranks(on_all_degrees, str(tmp_path), sp=4, preload=[COMPILER])
    for rank in ranks:
        for without, losses, same_weights in rank:
            assert losses == without
            assert same_weights
    # The checkpoint of ep 4 on four ranks, read by two ranks at ep 2 and by one: rounding apart, the same run.
    want = torch.tensor(ranks[0][2][0][4:])
    for losses in (
        *on_ranks(with_other_ranks, str(tmp_path / "4"), 2, sp=2, preload=[COMPILER]),
        with_other_ranks(None, f"{tmp_path}/4", 1),
    ):
        assert torch.allclose(torch.tensor(losses), want, rtol=1e-5)


def test_saving_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(model())
    trainer.save(tmp_path / "c")
    train(trainer, range(2))
    trainer.save(tmp_path / "c")
    other = Trainer(model())
    other.load(tmp_path / "c")
    assert other.steps == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    Trainer(model()).save(tmp_path / "c")
    wide, deep, same = Trainer(model(vocab_size=24)), Trainer(model(num_hidden_layers=3)), Trainer(model())
    before = [p.clone() for p in wide.model.parameters()]
    with pytest.raises(ValueError, match=r"weight is \[23, 32\] of .* in the checkpoint but \[24, 32\]"):
        wide.load(tmp_path / "c")
    assert all(torch.equal(a, b) for a, b in zip(before, wide.model.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"the checkpoint has no layers\.2\."):
        deep.load(tmp_path / "c")
    deep.save(tmp_path / "deep")
    with pytest.raises(ValueError, match=r"this model has no layers\.2\.\S+; the checkpoint is of another model"):
        same.load(tmp_path / "deep")
    with pytest.raises(ValueError, match=r"is \[23, 32\] of torch.float32 in the checkpoint but .* of torch.float64"):
        Trainer(model().double()).load(tmp_path / "c")
    with pytest.raises(ValueError, match=r"holds no checkpoint; give the folder that Trainer\.save wrote"):
        wide.load(tmp_path / "nothing")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(model())
    trainer.save(tmp_path / "c")
    (data,) = (tmp_path / "c").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"the checkpoint is damaged: .*\.distcp has been cut short"):
        trainer.load(tmp_path / "c")
    data.unlink()
    with pytest.raises(ValueError, match=r"the checkpoint is damaged: FileNotFoundError"):
        trainer.load(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(ValueError, match="the checkpoint is damaged"):
        trainer.load(tmp_path / "c")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match="file/c: the checkpoint cannot be written"):
        trainer.save(tmp_path / "file" / "c")


def refused(group, folder: str) -> dict[str, str]:
    trainer, rank = Trainer(model(group)), torch.distributed.get_rank(group)
    good = tokens(0)
    too_large, label = good.clone(), good.clone()
    too_large[0, 0] = label[0, -1] = 23
    calls = {
        "other batch": tokens(rank),
        "rows": good[: 2 - rank],
        "one row": good[0],
        "odd": good[:, 1:],
        "nothing": good[:, :1],
        "floats": good.float(),
        "too large": too_large if rank else good,
        "label": label if rank else good,
    }
    found = {name: raised(lambda given=given: trainer.step(given)) for name, given in calls.items()}
    found["shape"] = raised(lambda: Trainer(model(group, vocab_size=24)).load(folder))
    found["one folder"] = raised(lambda: trainer.load(folder if rank else folder + "x"))
    return found


def test_every_rank_refuses_alike(tmp_path: Path) -> None:
    Trainer(model()).save(tmp_path / "c")
    first, second = on_ranks(refused, str(tmp_path / "c"), sp=2)
    assert first == second
    wanted = {
        "other batch": "the ranks do not agree: the batch's checksum is",
        "rows": "the ranks do not agree: the batch's checksum is",
        "one row": r"rank 1: tokens must be \[batch, seq \+ 1\], got \[9\]",
        "odd": r"\[batch, seq \+ 1\] with seq a multiple of sp=2, got \[2, 8\]",
        "nothing": r"\[batch, seq \+ 1\] with seq a multiple of sp=2, got \[2, 1\]",
        "floats": "must be a tensor of whole numbers, got torch.float32",
        "too large": "^ValueError: rank 1: tokens must be numbers from 0 to 22, got 23",
        "label": "^ValueError: rank 1: tokens must be numbers from 0 to 22, got 23",
        "shape": r"in the checkpoint but \[24, 32\] of torch.float32 in this model",
        "one folder": "^ValueError: rank 0: .* holds no checkpoint",
    }
    assert first.keys() == wanted.keys()
    for name, message in wanted.items():
        assert re.search(message, first[name]), f"{name}: {first[name]}"
    with pytest.raises(TypeError, match="Trainer takes a LanguageModel, got Linear"):
        Trainer(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_the_forms_memorise_alike_and_laga_is_explicit_bit_for_bit_on_one_rank(tmp_path: Path) -> None:
    sizes = {"hidden": 64, "heads": 4, "layers": 1, "vocab": 64, "seq": 32, "steps": 25, "lr": 1e-2}
    records = convergence.memorise(Store(tmp_path), (1, 2), **sizes)
    ends = {(row["sp"], row["form"]): row for row in convergence.ends(records)}
    assert len(ends) == 6
    assert all(row["start"] > 4 and row["end"] < 0.1 for row in ends.values())
    assert ends[1, "laga"]["weights"] == ends[1, "explicit"]["weights"]
    assert ends[1, "laga"]["weights"] != ends[1, "absorbed"]["weights"]
    apart = convergence.differences(records)
    assert all(row["difference"] == 0 for row in apart if row["sp"] == 1 and row["pair"] == "laga − explicit")
    assert 0 < max(row["difference"] for row in apart) < 0.05
    assert len(Store(tmp_path).load("convergence", task="random tokens")) == 6


def test_the_committed_runs_are_what_the_paper_reports() -> None:
    """Figure 6, but for the pairing: here it is Laga and explicit that are equal bit for bit on one rank."""
    records = published("convergence", task="random tokens", hidden=512, lr=1e-3)
    assert {(r.parameters["sp"], r.parameters["form"]) for r in records} == {
        (sp, form) for sp in (1, 2, 4) for form in convergence.FORMS
    }
    for row in convergence.ends(records):
        assert abs(row["start"] - 7.711) < 0.02
        assert row["end"] <= 0.01
    apart = convergence.differences(records)
    assert max(row["difference"] for row in apart) < 1e-6
    assert {row["difference"] for row in apart if row["sp"] == 1 and row["pair"] == "laga − explicit"} == {0.0}


def test_the_committed_runs_on_text_agree_on_what_was_held_out() -> None:
    explicit, laga = (record.metrics["held_out"] for record in published("convergence", task="text"))
    assert abs(laga - explicit) < 0.01 * explicit
    assert explicit < 3  # of ln 256 = 5.5


def test_charts_name_every_pair_and_show_what_the_paper_reports_of_its_own_run_only() -> None:
    full = published("convergence", **convergence.PAPER_RUN)
    pairs = [f"{a} − {b}" for a, b in convergence.PAIRS]
    assert set(pairs) <= set(drawn(charts.differences(full).to_dict(), sp=2)[1])
    texts = drawn(charts.losses(full).to_dict(), sp=4)[1]
    assert "4 ranks" in texts and texts.count("reported") == 2
    assert "reported" not in drawn(charts.losses(published("convergence", task="text")).to_dict())[1]


def test_text_is_cut_so_that_what_is_held_out_is_never_trained_on() -> None:
    marked = b"".join(bytes([number]) * 2048 for number in range(24)) + b"x"
    text = convergence.Text(marked, batch=8, seq=100, seed=0)
    trained = {int(token) for step in range(50) for token in text(step).unique()}
    held_out = {int(token) for piece in text.held_out_batches() for token in piece.unique()}
    assert held_out == {9, 19}
    assert not trained & held_out
    assert torch.equal(text(3), convergence.Text(marked, batch=8, seq=100, seed=0)(3))
    assert not torch.equal(text(3), text(4))
    with pytest.raises(ValueError, match="at least 10 are needed"):
        convergence.Text(b"short", batch=1, seq=10, seed=0)


def test_the_repositorys_own_text_is_found() -> None:
    assert b"Latent All-Gather Attention" in convergence.repository_text()
