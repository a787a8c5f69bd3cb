"""The three forms on real ranks against one process, written out from the paper's equations in fp64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from cases import VARIANTS, Case, assembled, expected, run, worst_error
from ranks import on_ranks

from laga_core import MLAConfig

TOY = MLAConfig.preset("toy")
NAMES = [f"{form}-{next(iter(options.values()), 'only')}" for form, options in VARIANTS]


def settings() -> list[tuple[str, MLAConfig]]:
    """Causal or not, q_lora or none, both norms."""
    found = []
    for causal, q_lora, norm in itertools.product((True, False), (24, None), ("rms", "layer")):
        name = f"{'causal' if causal else 'full'}-{'q_lora' if q_lora else 'direct'}-{norm}"
        found.append((name, replace(TOY, causal=causal, q_lora_rank=q_lora, norm=norm)))
    return found


def cases() -> dict[str, Case]:
    table = {}
    for number, ((name, config), (variant, (form, options))) in enumerate(
        itertools.product(settings(), zip(NAMES, VARIANTS, strict=True))
    ):
        table[f"{variant}-{name}"] = Case(config, form, options, batch=1 + 2 * (number % 2), seed=number)
    yarn = {"type": "yarn", "factor": 8, "original_max_position_embeddings": 8, "mscale": 0.7, "mscale_all_dim": 0.7}
    for variant, (form, options) in zip(NAMES, VARIANTS, strict=True):
        for order in ("zigzag", "shuffled", "contiguous"):
            table[f"{variant}-{order}"] = Case(TOY, form, options, batch=2, order=order)
        table[f"{variant}-strided"] = Case(TOY, form, options, batch=2, strided=True)
        table[f"{variant}-no-rotation"] = Case(replace(TOY, rope_theta=None), form, options)
        table[f"{variant}-yarn"] = Case(replace(TOY, rope_scaling=yarn), form, options)
    return table


CASES = cases()


@cache
def results(sp: int) -> dict[str, list[dict[str, torch.Tensor]]]:
    """All cases in one launch: starting ranks costs more than running them."""
    if sp == 1:
        return {name: [run(None, [case])[0]] for name, case in CASES.items()}
    by_rank = on_ranks(run, list(CASES.values()), sp=sp, timeout=200)
    return {name: [values[number] for values in by_rank] for number, name in enumerate(CASES)}


@pytest.mark.parametrize("sp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith("yarn")])
def test_output_and_every_gradient_match_one_process(name: str, sp: int) -> None:
    case = CASES[name]
    error, where = worst_error(assembled(case, results(sp)[name]), expected(case))
    assert error <= 1e-12, f"{where} is off by {error:.1e} at sp={sp}: {case}"


@pytest.mark.parametrize("sp", [2, 4, 8])
@pytest.mark.parametrize("variant", NAMES)
def test_yarn_matches_one_process(variant: str, sp: int) -> None:
    """YaRN itself is compared with transformers in test_huggingface."""
    name = f"{variant}-yarn"
    error, where = worst_error(assembled(CASES[name], results(sp)[name]), results(1)["explicit-replicated-yarn"][0])
    assert error <= 1e-12, f"{where} is off by {error:.1e} at sp={sp}"


def test_yarn_changes_the_output() -> None:
    assert not torch.allclose(results(1)["laga-only-yarn"][0]["out"], expected(CASES["laga-only-yarn"])["out"])


# --- fp32: the paper's own measure, §4.5 ---

PAPER_SIZE = Case(
    MLAConfig(
        hidden_size=512,
        num_attention_heads=16,
        q_lora_rank=None,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        norm="layer",
    ),
    "explicit",
    seq=128,
    dtype=torch.float32,
)


@pytest.mark.parametrize("name", [name for name, _ in settings()])
def test_one_rank_laga_is_bit_identical_to_explicit(name: str) -> None:
    config = dict(settings())[name]
    for case in (Case(config, "explicit", batch=2, dtype=torch.float32), replace(PAPER_SIZE, batch=2)):
        explicit, laga = run(None, [case, replace(case, form="laga")])
        up_projection_of_query = "q_proj.weight" if "q_proj.weight" in explicit else "q_b_proj.weight"
        for part in ("out", up_projection_of_query, "kv_b_proj.weight", "o_proj.weight"):
            assert torch.equal(explicit[part], laga[part]), f"{part} differs: {case}"


@pytest.mark.parametrize("sp", [2, 4, 8])
def test_fp32_stays_within_the_papers_bounds(sp: int) -> None:
    """Every form against explicit on one process: 5.6e-6 on the output, 7.7e-4 on the gradient of kv_b_proj."""
    cases = [replace(PAPER_SIZE, form=form, options=options) for form, options in VARIANTS]
    single = run(None, [PAPER_SIZE])[0]
    by_rank = on_ranks(run, cases, sp=sp, timeout=200)
    for number, case in enumerate(cases):
        whole = assembled(case, [values[number] for values in by_rank])
        assert (whole["out"] - single["out"]).abs().max() <= 5.6e-6, case
        assert (whole["kv_b_proj.weight"] - single["kv_b_proj.weight"]).abs().max() <= 7.7e-4, case
