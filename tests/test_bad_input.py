"""Bad input: a clear error on every rank before any data moves, within seconds, never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, raised

from laga_core import MLAAttention, MLAConfig, all_reduce_gradients, communication
from laga_core.costs import Machine
from laga_core.forms import FORMS
from laga_core.kernels import KERNELS
from laga_core.parallel import record_bytes
from laga_core.sharding import unshard_sequence

TOY = MLAConfig.preset("toy")
SP = 4

Act = Callable[[Any, MLAAttention], Any]


def shard(length: int = 4, batch: int = 2, hidden: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, length, hidden, dtype=dtype)


def on_one(group, rank: int, odd: Any, usual: Any) -> Any:
    return odd if group.rank() == rank else usual


def precision_of(group) -> torch.dtype:
    return on_one(group, 1, torch.float64, torch.float32)


def split_unevenly(group) -> torch.Tensor:
    """A sequence of 10 over 4 ranks, as ``tensor_split`` deals it: 3, 3, 2, 2."""
    return torch.randn(1, 10, 64).tensor_split(group.size(), dim=1)[group.rank()]


FORWARD: dict[str, tuple[Act, tuple[str, ...]]] = {
    "sequence not divisible": (
        lambda group, mla: mla(split_unevenly(group)),
        (
            "local sequence length is 3 on rank 0, 3 on rank 1, 2 on rank 2, 2 on rank 3",
            "every rank must pass the same",
        ),
    ),
    "one shard longer": (
        lambda group, mla: mla(shard(on_one(group, 3, 5, 4))),
        ("local sequence length", "5 on rank 3"),
    ),
    "one batch larger": (lambda group, mla: mla(shard(batch=on_one(group, 1, 3, 2))), ("batch", "3 on rank 1")),
    "hidden size wrong on one rank": (
        lambda group, mla: mla(shard(hidden=on_one(group, 2, 63, 64))),
        ("rank 2: hidden must be [batch, seq/sp, 64], got [2, 4, 63]",),
    ),
    "hidden size wrong everywhere": (
        lambda group, mla: mla(shard(hidden=32)),
        ("hidden must be [batch, seq/sp, 64], got [2, 4, 32]",),
    ),
    "two dimensions on one rank": (
        lambda group, mla: mla(on_one(group, 0, torch.randn(4, 64), shard())),
        ("rank 0: hidden must be [batch, seq/sp, 64], got [4, 64]",),
    ),
    "no tokens on one rank": (lambda group, mla: mla(shard(on_one(group, 1, 0, 4))), ("rank 1: hidden is empty",)),
    "no tensor on one rank": (
        lambda group, mla: mla(on_one(group, 1, [[1.0]], shard())),
        ("rank 1: hidden must be a tensor, got list",),
    ),
    "dtype on one rank": (
        lambda group, mla: mla(shard(dtype=on_one(group, 2, torch.bfloat16, torch.float32))),
        ("rank 2: hidden is torch.bfloat16 but the parameters are torch.float32",),
    ),
    "dtype of the module on one rank": (
        lambda group, mla: MLAAttention(TOY, "laga", group=group, dtype=precision_of(group))(
            shard(dtype=precision_of(group))
        ),
        ("dtype is", "torch.float64 on rank 1"),
    ),
    "another form on one rank": (
        lambda group, mla: MLAAttention(TOY, on_one(group, 3, "explicit", "laga"), group=group)(shard()),
        ("form is laga", "explicit {'key_rope': 'replicated'", "on rank 3"),
    ),
    "another option on one rank": (
        lambda group, mla: MLAAttention(
            TOY, "explicit", group=group, key_rope=on_one(group, 0, "headless", "replicated")
        )(shard()),
        ("form is", "headless", "on rank 0"),
    ),
    "another configuration on one rank": (
        lambda group, mla: MLAAttention(replace(TOY, kv_lora_rank=on_one(group, 2, 18, 16)), "laga", group=group)(
            shard()
        ),
        ("configuration is", "kv_lora_rank=18", "on rank 2"),
    ),
    "positions on one rank only": (
        lambda group, mla: mla(shard(), on_one(group, 0, torch.arange(4), None)),
        ("positions given is 1 on rank 0",),
    ),
    "positions too short on one rank": (
        lambda group, mla: mla(shard(), torch.arange(4)[: on_one(group, 1, 3, 4)]),
        ("rank 1: positions must be [seq/sp] = [4], got [3]",),
    ),
    "positions that are no whole numbers": (
        lambda group, mla: mla(shard(), torch.rand(4)),
        ("positions must be a tensor of whole numbers",),
    ),
    "a part to gather longer on one rank": (
        lambda group, mla: unshard_sequence(shard(on_one(group, 2, 5, 4)), group),
        ("part is torch.float32 [2, 4, 64] on rank 0", "torch.float32 [2, 5, 64] on rank 2"),
    ),
    "a part to gather in another dtype": (
        lambda group, mla: unshard_sequence(shard(dtype=precision_of(group)), group),
        ("part is", "torch.float64 [2, 4, 64] on rank 1"),
    ),
    "no part to gather on one rank": (
        lambda group, mla: unshard_sequence(on_one(group, 1, None, shard()), group),
        ("rank 1: cannot gather along dim=1 of NoneType",),
    ),
    "a dimension to gather that is not there": (
        lambda group, mla: unshard_sequence(shard(), group, dim=on_one(group, 3, 7, 1)),
        ("rank 3: cannot gather along dim=7 of torch.float32 [2, 4, 64]",),
    ),
    "a context to gather that is no number": (
        lambda group, mla: unshard_sequence(shard(), group, layout="zigzag", context=on_one(group, 0, "a", 2)),
        ("rank 0: cannot gather",),
    ),
    "a layout to gather that does not fit": (
        lambda group, mla: unshard_sequence(shard(3), group, layout="zigzag", context=4),
        ("rank 0: cannot gather along dim=1", "layout='zigzag' cuts the sequence"),
    ),
    "local positions on every rank": (lambda group, mla: mla(shard(), torch.arange(4)), ("positions repeat",)),
}


def attempts(group) -> dict[str, tuple[str, float, list[str]]]:
    """What each mistake raises on this rank, after how long, and which collectives had moved data by then."""
    found = {}
    for name, (act, _) in FORWARD.items():
        mla = MLAAttention(TOY, "laga", group=group)
        with record_bytes() as ledger:
            started = time.monotonic()
            text = raised(lambda act=act, mla=mla: act(group, mla))
            seconds = time.monotonic() - started
        found[name] = (text, seconds, [entry.collective for entry in ledger.entries])
        assert torch.isfinite(MLAAttention(TOY, "laga", group=group)(shard())).all()  # the group still works
    return found


@pytest.fixture(scope="module")
def answers() -> list[dict[str, tuple[str, float, list[str]]]]:
    return on_ranks(attempts, sp=SP, timeout=60)


@pytest.mark.parametrize("name", FORWARD)
def test_every_rank_says_what_is_wrong(name: str, answers) -> None:
    for rank, answer in enumerate(answers):
        text, seconds, moved = answer[name]
        assert text.startswith("ValueError: "), f"rank {rank}: {text}"
        assert all(part in text for part in FORWARD[name][1]), f"rank {rank}: {text}"
        assert text == answers[0][name][0]
        assert seconds < 5
        # Positions are compared once they have been gathered; nothing else moves before an error.
        assert moved == (["all_gather"] if name == "local positions on every rank" else []), f"rank {rank}"


# --- building the layer ---


def build_mistakes(group) -> list[str]:
    started = time.monotonic()
    texts = [
        raised(lambda: MLAAttention(replace(TOY, num_attention_heads=6), "laga", group=group)),
        raised(lambda: MLAAttention(TOY, "lagga", group=group)),
        raised(lambda: MLAAttention(TOY, "explicit", "flash9", group=group)),
        raised(lambda: MLAAttention(TOY, "absorbed", group=group, score="both")),
        raised(lambda: MLAAttention(TOY, "laga", group=group, score="joint")),
    ]
    assert time.monotonic() - started < 5
    return texts


def test_building_on_ranks_fails_on_every_rank() -> None:
    for heads, form, kernel, value, option in on_ranks(build_mistakes, sp=SP):
        assert "6 heads cannot be split evenly over sp=4 ranks; choose sp among [1, 2, 3, 6]" in heads
        assert "unknown form 'lagga'" in form and all(name in form for name in FORMS)
        assert "unknown kernel 'flash9'" in kernel and all(name in kernel for name in KERNELS)
        assert "score must be one of ['joint', 'split'], got 'both'" in value
        assert "form 'laga' has no option 'score'" in option


@pytest.mark.parametrize("form", FORMS)
def test_unknown_options_list_the_known_ones(form: str) -> None:
    with pytest.raises(ValueError, match=f"form '{form}' has no option 'colour'") as caught:
        MLAAttention(TOY, form, colour="blue")
    assert all(option in str(caught.value) for option in FORMS[form].options)


def test_a_group_must_be_a_group() -> None:
    for group in (4, "world", object()):
        with pytest.raises(TypeError, match="process group"):
            MLAAttention(TOY, "laga", group=group)
    with pytest.raises(TypeError, match="MLAConfig"):
        MLAAttention({"hidden_size": 64}, "laga")


def outside_of_its_group(group) -> str:
    pair = dist.new_group([0, 1])
    if group.rank() < 2:
        return raised(lambda: MLAAttention(TOY, "laga", group=pair)(shard()))
    return raised(lambda: MLAAttention(TOY, "laga", group=pair))


def test_a_rank_outside_of_the_group_is_told() -> None:
    inside, also, outside = on_ranks(outside_of_its_group, sp=3)
    assert (inside, also) == ("nothing", "nothing")
    assert outside.startswith("TypeError") and "this rank belongs to" in outside


def test_reducing_gradients_without_a_group_is_told() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="needs the process group") as caught:
        all_reduce_gradients(MLAAttention(TOY, "laga"), None)
    assert "laga_core.launch" in str(caught.value)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (torch.randn(2, 4, 65), r"\[batch, seq/sp, 64\], got \[2, 4, 65\]"),
        (torch.randn(4, 64), r"\[batch, seq/sp, 64\]"),
        (torch.randn(2, 0, 64), "empty"),
        (torch.randn(0, 2, 64), "empty"),
        (torch.randn(2, 4, 64).double(), "torch.float64 but the parameters are torch.float32"),
        (torch.randn(2, 4, 64, device="meta"), "meta"),
        (None, "must be a tensor"),
    ],
)
def test_one_process_checks_its_input_too(hidden: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLAAttention(TOY, "laga")(hidden)


def test_names_may_be_of_any_type() -> None:
    with pytest.raises(ValueError, match="unknown kernel"):
        MLAAttention(TOY, "laga", [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no typical machine"):
        Machine.typical([])  # type: ignore[arg-type]


# --- closed forms ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": "explizit"}, "unknown form 'explizit'; known: explicit, absorbed, laga"),
        ({"accounting": "wires"}, "unknown accounting 'wires'; known: wire, paper"),
        ({"seq": 10}, "seq=10 cannot be split evenly over sp=4 ranks; pad it to 12"),
        ({"sp": 3, "seq": 9}, "8 heads cannot be split evenly over sp=3"),
        ({"sp": 0}, "sp must be a whole number"),
        ({"seq": 0}, "seq must be a whole number"),
        ({"batch": -1}, "batch must be a whole number"),
        ({"batch": 1.5}, "batch must be a whole number"),
        ({"form": "explicit", "key_rope": "none"}, "key_rope must be one of"),
        ({"score": "joint"}, "form 'laga' has no option 'score'"),
        ({"dtype": "bf16"}, "dtype must be a floating torch dtype"),
        ({"dtype": torch.int8}, "dtype must be a floating torch dtype"),
        ({"form": []}, "unknown form []"),
        ({"accounting": {}}, "unknown accounting {}"),
        ({"seq": 10**40}, "seq must be at most 2^53"),
        ({"config": "deepseek-v3"}, "MLAConfig.preset"),
    ],
)
def test_communication_says_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    usual = {"config": TOY, "form": "laga", "seq": 16, "sp": 4}
    with pytest.raises((ValueError, TypeError)) as caught:
        communication(**{**usual, **arguments})
    assert message in str(caught.value)
