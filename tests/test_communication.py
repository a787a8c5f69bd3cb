"""Closed forms of communication: the paper's table, the ledger of real ranks, and the three faces of an expression."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch
from cases import VARIANTS, Case
from ranks import on_ranks

from laga_core import MLAAttention, MLAConfig, communication
from laga_core.costs import communication_expression, substitutions, to_latex, to_vega, transfers
from laga_core.costs.symbols import HEADS, KV_LORA, NOPE, ROPE, SP, VALUE
from laga_core.parallel import gather_sequence, record_bytes, sequence_to_heads

PAPER = Path(__file__).parent.parent / "data" / "paper"
V3 = MLAConfig.preset("paper-v3")
TOY = MLAConfig.preset("toy")
NAMES = [f"{form}-{next(iter(options.values()), 'only')}" for form, options in VARIANTS]


def table(name: str) -> list[dict[str, str]]:
    with open(PAPER / name, newline="") as file:
        return list(csv.DictReader(file))


def ratio(config: MLAConfig, seq: int, sp: int, accounting: str, **explicit: str) -> float:
    first = communication(config, "explicit", seq, sp, accounting, **explicit).total_bytes
    return first / communication(config, "laga", seq, sp, accounting).total_bytes


# --- the paper's figures ---


@pytest.mark.parametrize("form", ["explicit", "absorbed", "laga"])
@pytest.mark.parametrize("row", table("table1_communication.csv"), ids=lambda row: f"sp{row['sp']}-{row['seq']}")
def test_table_1_to_the_printed_digit(row: dict[str, str], form: str) -> None:
    sent = communication(V3, form, int(row["seq"]), int(row["sp"]), "paper").total_bytes
    assert f"{sent / 1e6:.1f}" == row[f"{form}_mb"]


@pytest.mark.parametrize("row", table("fig3b_communication_heads.csv"), ids=lambda row: f"{row['n_heads']}-heads")
def test_figure_3b_to_the_printed_digit(row: dict[str, str]) -> None:
    config = replace(V3, num_attention_heads=int(row["n_heads"]))
    assert f"{ratio(config, int(row['seq']), int(row['sp']), 'paper'):.2f}" == row["explicit_over_laga"]


def test_the_table_has_24_cells_and_the_figure_4() -> None:
    assert len(table("table1_communication.csv")) * 3 == 24
    assert len(table("fig3b_communication_heads.csv")) == 4


# --- where the accountings part ---


@pytest.mark.parametrize(
    ("sp", "replicated", "headless"), [(4, "1.89", "1.71"), (8, "1.80", "1.63"), (16, "1.63", "1.49")]
)
def test_wire_ratio_falls_with_the_degree(sp: int, replicated: str, headless: str) -> None:
    assert f"{ratio(V3, 16384, sp, 'wire'):.2f}" == replicated
    assert f"{ratio(V3, 16384, sp, 'wire', key_rope='headless'):.2f}" == headless


def test_sixteen_heads_at_degree_8_are_almost_a_tie_on_the_wire() -> None:
    few = replace(V3, num_attention_heads=16)
    assert f"{ratio(few, 8192, 8, 'paper'):.2f} {ratio(few, 8192, 8, 'wire'):.2f}" == "1.88 1.05"


def test_the_forms_send_alike_at_a_degree_of_71() -> None:
    difference = communication_expression("explicit") - communication_expression("laga")
    crossover = HEADS * (NOPE + ROPE + VALUE) / (KV_LORA + ROPE)
    assert sympy.simplify(difference.subs(SP, crossover)) == 0
    values = substitutions(V3, seq=1, sp=1, batch=1, dtype=torch.bfloat16)
    assert crossover.subs(values) == sympy.Rational(640, 9)
    assert ratio(V3, 8192, 64, "wire") > 1 > ratio(V3, 8192, 128, "wire")


# --- an independent count: tensors, ranks and bytes, without SymPy ---


def counted(case: Case, sp: int, itemsize: int) -> int:
    """Bytes a rank sends in forward, by walking over every (token, element) block that another rank needs."""
    c, heads, tokens = case.config, case.config.num_attention_heads, case.batch * case.seq // sp
    per_head = {"query": c.qk_nope_head_dim + c.qk_rope_head_dim, "output": c.v_head_dim}
    shared = 0
    if case.form == "explicit":
        per_head |= {"key": c.qk_nope_head_dim, "value": c.v_head_dim}
        if case.options.get("key_rope") == "headless":
            shared = c.qk_rope_head_dim
        else:
            per_head["key"] += c.qk_rope_head_dim
    else:
        shared = c.kv_lora_rank + c.qk_rope_head_dim
    sent = 0
    for _other_rank in range(sp - 1):
        sent += tokens * (heads // sp) * sum(per_head.values()) + tokens * shared
    return sent * itemsize


@pytest.mark.parametrize("sp", [1, 2, 4, 8])
@pytest.mark.parametrize(("form", "options"), VARIANTS, ids=NAMES)
def test_wire_bytes_equal_a_count_by_hand(form: str, options: dict[str, str], sp: int) -> None:
    case = Case(TOY, form, options, batch=3, seq=24)
    assert communication(TOY, form, 24, sp, "wire", 3, torch.float32, **options).total_bytes == counted(case, sp, 4)


# --- the ledger of real ranks ---


def ledgers(group, cases: list[Case]) -> list[dict]:
    found = []
    for case in cases:
        sp, local = group.size(), case.seq // group.size()
        module = MLAAttention(case.config, case.form, group=group, dtype=case.dtype, **case.options)
        hidden = torch.randn(case.batch, local, case.config.hidden_size, dtype=case.dtype, requires_grad=True)
        with record_bytes() as outer:
            out = module(hidden)
            with record_bytes() as inner:
                out.sum().backward()
        assert inner.total(direction="forward") == 0, "a backward call was noted as forward"
        found.append(
            {
                (accounting, direction): outer.by_collective(accounting, direction)
                for accounting in ("wire", "paper")
                for direction in ("forward", "backward")
            }
        )
        assert outer.total() == sum(sum(found[-1]["wire", d].values()) for d in ("forward", "backward")), sp
    return found


LEDGER_CASES = [
    Case(replace(TOY, num_attention_heads=heads, causal=causal), form, options, batch=batch, seq=seq, dtype=dtype)
    for form, options in VARIANTS
    for heads, batch, seq, causal, dtype in [(8, 1, 32, True, torch.bfloat16), (12, 3, 20, False, torch.float32)]
]


@pytest.mark.parametrize("sp", [2, 4])
def test_wire_closed_form_equals_the_ledger_of_real_ranks(sp: int) -> None:
    by_rank = on_ranks(ledgers, LEDGER_CASES, sp=sp)
    assert all(values == by_rank[0] for values in by_rank), "the ranks sent different amounts"
    for case, ledger in zip(LEDGER_CASES, by_rank[0], strict=True):
        for accounting in ("wire", "paper"):
            forward = communication(
                case.config, case.form, case.seq, sp, accounting, case.batch, case.dtype, **case.options
            ).by_collective
            assert ledger[accounting, "forward"] == forward, f"{accounting}: {case}"
            # Backward: each all-to-all again the other way, and a reduce-scatter for each all-gather.
            returned = {{"all_gather": "reduce_scatter"}.get(name, name): sent for name, sent in forward.items()}
            assert ledger[accounting, "backward"] == returned, f"{accounting}: {case}"


def collectives_of(group, name: str) -> list[tuple[str, str, int]]:
    x = torch.ones(2, 4, 4, 3, dtype=torch.bfloat16, requires_grad=True)
    with record_bytes() as ledger:
        y = sequence_to_heads(x, group) if name == "all_to_all" else gather_sequence(x.flatten(2), group)
        y.sum().backward()
    return [(entry.collective, entry.direction, entry.wire_bytes) for entry in ledger.entries]


def test_ledger_entries_of_single_collectives() -> None:
    local = 2 * 4 * 4 * 3 * 2  # bytes of this rank's shard
    assert on_ranks(collectives_of, "all_to_all", sp=2)[1] == [
        ("all_to_all", "forward", local // 2),
        ("all_to_all", "backward", local // 2),
    ]
    assert on_ranks(collectives_of, "all_gather", sp=4)[3] == [
        ("all_gather", "forward", 3 * local),
        ("reduce_scatter", "backward", 3 * local),
    ]


def test_one_process_sends_nothing() -> None:
    module = MLAAttention(TOY, "laga")
    with record_bytes() as ledger:
        module(torch.randn(1, 4, 64)).sum().backward()
    assert ledger.entries == []
    assert all(communication(TOY, form, 8, 1, "wire").total_bytes == 0 for form in ("explicit", "absorbed", "laga"))


def test_ledger_stops_when_its_block_ends_even_by_an_error() -> None:
    from laga_core.parallel.ledger import note

    with pytest.raises(RuntimeError, match="inside"), record_bytes() as ledger:
        note("all_to_all", "forward", wire_bytes=3, paper_bytes=6)
        raise RuntimeError("inside")
    note("all_to_all", "forward", wire_bytes=5, paper_bytes=10)
    assert (ledger.total(), ledger.total("paper"), ledger.total(direction="backward")) == (3, 6, 0)


# --- one expression, three faces ---


@pytest.mark.parametrize("accounting", ["wire", "paper"])
@pytest.mark.parametrize(("form", "options"), VARIANTS, ids=NAMES)
def test_function_expression_and_parts_agree(form: str, options: dict[str, str], accounting: str) -> None:
    found = communication(V3, form, 8192, 8, accounting, **options)
    expression = communication_expression(form, accounting, **options)
    assert expression.subs(substitutions(V3, seq=8192, sp=8, batch=1, dtype=torch.bfloat16)) == found.total_bytes
    assert sum(found.by_collective.values()) == sum(found.by_tensor.values()) == found.total_bytes
    assert list(found.by_tensor) == [transfer.tensor for transfer in transfers(form, **options)]


@pytest.mark.parametrize("accounting", ["wire", "paper"])
@pytest.mark.parametrize(("form", "options"), VARIANTS, ids=NAMES)
def test_the_vega_expression_computes_the_same(form: str, options: dict[str, str], accounting: str) -> None:
    text = to_vega(communication_expression(form, accounting, **options), {"num_attention_heads": "heads"})
    names = {**{s.name: v for s, v in substitutions(V3, seq=4096, sp=16, batch=1, dtype=torch.bfloat16).items()}}
    names["heads"] = names.pop("num_attention_heads")
    # Vega's arithmetic is that of Python, once its few functions are there.
    value = eval(text, {"__builtins__": {}, "pow": math.pow}, names)
    assert value == communication(V3, form, 4096, 16, accounting, **options).total_bytes, text


def test_latex_speaks_the_books_notation() -> None:
    latex = to_latex(communication_expression("laga", "wire"))
    assert "n_h" in latex and "d_{kv}" in latex and "num_attention" not in latex
