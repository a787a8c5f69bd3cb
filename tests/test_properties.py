"""Drawn cases: any shape that fits must agree with the oracle on real ranks, and never hang.

Hypothesis draws here, in the parent; one launch a degree runs all cases, since starting ranks costs more than they do.
"""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from cases import VARIANTS, Case, assembled, expected, run, worst_error
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import on_ranks

from laga_core import MLAConfig, communication
from laga_core.parallel import gather_sequence, heads_to_sequence, record_bytes, sequence_to_heads

LIMITS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0.1}  # relative to the largest element


@st.composite
def drawn_case(draw: st.DrawFn, sp: int) -> Case:
    size = st.integers(1, 9)
    config = MLAConfig(
        hidden_size=draw(st.integers(8, 40)),
        num_attention_heads=sp * draw(st.sampled_from([1, 1, 2, 3])),  # often one head a rank
        q_lora_rank=draw(st.none() | st.integers(4, 20)),
        kv_lora_rank=draw(st.integers(4, 20)),
        qk_nope_head_dim=draw(size),
        qk_rope_head_dim=2 * draw(st.integers(1, 4)),
        v_head_dim=draw(size),
        rope_theta=draw(st.sampled_from([None, 10.0, 10000.0])),
        norm=draw(st.sampled_from(["rms", "layer"])),
        norm_eps=0.1,  # a small latent is not blown up, and its rounding errors with it
        causal=draw(st.booleans()),
    )
    form, options = draw(st.sampled_from(VARIANTS))
    return Case(
        config,
        form,
        options,
        batch=draw(st.sampled_from([1, 2, 3, 5])),
        seq=sp * draw(st.sampled_from([1, 1, 2, 3, 7])),  # often one token a rank
        dtype=draw(st.sampled_from(list(LIMITS))),
        seed=draw(st.integers(0, 2**31)),
        order=draw(st.sampled_from(["default", "contiguous", "zigzag", "shuffled"])),
        strided=draw(st.booleans()),
    )


def draw_many(strategy: st.SearchStrategy, count: int) -> list:
    """``count`` draws, simplest first, so that the first that fails is a simple one."""
    found: list = []

    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def keep(example: object) -> None:
        found.append(example)

    keep()
    return found


def work(case: Case) -> int:
    return case.batch * case.seq * sum(v for v in asdict(case.config).values() if type(v) is int)


@pytest.mark.parametrize(("sp", "count"), [(1, 60), (2, 60), (3, 30), (4, 40), (8, 15)])
def test_drawn_cases_agree_with_the_oracle(sp: int, count: int) -> None:
    cases = sorted(draw_many(drawn_case(sp), count), key=work)
    by_rank = [run(None, cases)] if sp == 1 else on_ranks(run, cases, sp=sp, timeout=200)
    for number, case in enumerate(cases):
        error, where = worst_error(assembled(case, [values[number] for values in by_rank]), expected(case), floor=0.1)
        assert error <= LIMITS[case.dtype], f"{where} is off by {error:.1e} at sp={sp}: {case!r}"


# --- collectives alone ---

Shape = tuple[str, int, int, int, int, torch.dtype, int]
FUNCTIONS = {"sequence_to_heads": (1, 2), "heads_to_sequence": (2, 1), "gather_sequence": (1, None)}


def drawn_shape(sp: int) -> st.SearchStrategy[Shape]:
    few = st.integers(1, 4)
    dtypes = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    return st.tuples(st.sampled_from(list(FUNCTIONS)), few, few, few, few, dtypes, st.integers(0, 5))


def move(group, shapes: list[Shape]) -> list[str]:
    """Forward and backward of each collective against slicing the whole tensor, which every rank can make itself."""
    sp, rank, wrong = group.size(), group.rank(), []
    functions = {f.__name__: f for f in (sequence_to_heads, heads_to_sequence, gather_sequence)}
    for name, batch, seq, heads, dim, dtype, layout in shapes:
        split, joined = FUNCTIONS[name]
        full = torch.arange(batch * seq * sp * heads * sp * dim).remainder(251).to(dtype)  # exact in every dtype
        full = full.view(batch, seq * sp, heads * sp, dim)
        if name == "gather_sequence":
            full = full.flatten(2)
        order = torch.randperm(full.dim(), generator=torch.Generator().manual_seed(layout)).tolist()

        def part(x: torch.Tensor, axis: int | None, order: list[int] = order) -> torch.Tensor:
            """This rank's part, in a memory layout of its own."""
            x = x if axis is None else x.chunk(sp, axis)[rank]
            return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])

        x = part(full, split).requires_grad_()
        with record_bytes() as ledger:
            y = functions[name](x, group)
            y.backward(part(full, joined))
        gradient = part(full, split) * (sp if name == "gather_sequence" else 1)  # a gather's gradient sums over ranks
        if not torch.equal(y, part(full, joined)) or not torch.equal(x.grad, gradient.to(dtype)):
            wrong.append(f"{name} {batch=} {seq=} {heads=} {dim=} {dtype} {layout=} {sp=}")
        sent = {"gather_sequence": (sp - 1) * x.nbytes}.get(name, x.nbytes // sp * (sp - 1))
        if [ledger.total(direction=d) for d in ("forward", "backward")] != [sent, sent]:
            wrong.append(f"ledger of {name} {batch=} {seq=} {heads=} {dim=} {dtype} {sp=}")
    dist.barrier(group)
    return wrong


@pytest.mark.parametrize(("sp", "count"), [(2, 80), (3, 40), (4, 40)])
def test_drawn_tensors_land_where_they_belong(sp: int, count: int) -> None:
    shapes = draw_many(drawn_shape(sp), count)
    assert [wrong for values in on_ranks(move, shapes, sp=sp) for wrong in values] == []


# --- the closed form, without ranks ---


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4, 8, 16]))
def test_laga_sends_less_exactly_below_the_crossover(data: st.DataObject, sp: int) -> None:
    case = data.draw(drawn_case(sp))
    c, sent = case.config, {}
    for form in ("explicit", "absorbed", "laga"):
        sent[form] = communication(c, form, case.seq, sp, "wire", case.batch, case.dtype).total_bytes
    crossover = c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim) / c.latent_dim
    assert sent["laga"] == sent["absorbed"]
    assert (sent["laga"] < sent["explicit"]) == (1 < sp < crossover)
