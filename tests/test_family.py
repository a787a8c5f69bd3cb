"""The family: every combination of its options on real ranks against one process, what it sends, keeps and refuses."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, expected, worst_error
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import COMPILER, on_ranks, raised
from torch import Tensor

from laga_core import (
    MLAAttention,
    MLAConfig,
    all_reduce_gradients,
    communication,
    shard_sequence,
    simulate_memory,
    unshard_sequence,
)
from laga_core.costs import (
    Machine,
    choose,
    communication_expression,
    cost,
    members,
    substitutions,
    to_latex,
    to_vega,
)
from laga_core.experiments import family as experiment
from laga_core.parallel import degree, record_bytes
from laga_core.sharding import TokenOrder, sequence_positions

TOY = MLAConfig.preset("toy")
CHAPTER = " ".join((Path(__file__).parent.parent / "book" / "family.md").read_text(encoding="utf-8").split())


@dataclass(frozen=True)
class Member(Case):
    """A case of the family: its kernel, and the tokens that each rank holds, given to the layer or left to it."""

    kernel: str = "eager"
    held: list[int] = field(default_factory=list)  # positions of all tokens in rank order
    given: bool = False

    def __str__(self) -> str:
        return f"{self.form} {self.options} {self.kernel} {self.batch}x{self.seq} given={self.given} {self.config}"


def zigzag(seq: int, context: int) -> list[int]:
    """Written out anew: group r has the r-th piece from the front and the r-th from the back."""
    size = seq // (2 * context)
    pieces = [list(range(i * size, (i + 1) * size)) for i in range(2 * context)]
    return [p for r in range(context) for p in pieces[r] + pieces[2 * context - 1 - r]]


def run(group: Any, members: list[Member]) -> list[dict[str, Any]]:
    """Output, gradients and ledger of each member on this rank."""
    return [_run(group, member) for member in members]


def _run(group: Any, member: Member) -> dict[str, Any]:
    weights, hidden, cotangent = member.drawn()
    sp, rank = degree(group), dist.get_rank(group) if group is not None else 0
    mine = torch.tensor(member.held[rank * member.seq // sp : (rank + 1) * member.seq // sp])
    module = MLAAttention(member.config, member.form, member.kernel, group=group, dtype=member.dtype, **member.options)
    module.load_state_dict(weights, strict=True)
    x = hidden[:, mine].requires_grad_()
    with record_bytes() as ledger:
        out = module(x, mine) if member.given else module(x)
        out.backward(cotangent[:, mine])
    found = {"ledger": {d: ledger.by_collective("wire", d) for d in ("forward", "backward")}}
    if group is not None:
        all_reduce_gradients(module, group)
    return {**found, "out": out.detach(), "hidden": x.grad, **{n: p.grad for n, p in module.named_parameters()}}


def check(member: Member, shards: list[dict[str, Any]]) -> None:
    """Equal to the oracle, alike on all ranks, and on the wire what the closed form says."""
    shards = [dict(shard) for shard in shards]
    ledgers = [shard.pop("ledger") for shard in shards]
    order = torch.tensor(member.held).argsort()
    whole: dict[str, Tensor] = dict(shards[0])
    for name in ("out", "hidden"):
        whole[name] = torch.cat([shard[name] for shard in shards], 1)[:, order]
    for shard in shards:
        assert all(torch.equal(shard[n], whole[n]) for n in shard if n not in ("out", "hidden")), str(member)
    error, where = worst_error(whole, expected(member))
    assert error <= 1e-12, f"{where} is off by {error:.1e} at sp={len(shards)}: {member}"
    for direction in ("forward", "backward") if not member.given and len(shards) > 1 else ():
        sent = communication(
            member.config, member.form, member.seq, len(shards), "wire", member.batch, member.dtype, direction,
            member.kernel, **member.options,
        ).by_collective  # fmt: skip
        sent = {name: count for name, count in sent.items() if count}
        assert all(ledger[direction] == sent for ledger in ledgers), f"{direction} {member}: {ledgers} {sent}"


# --- every combination ---


DRAWS = {1: 16, 2: 40, 4: 48, 8: 32, 16: 12}


def drawn(sp: int) -> list[Member]:
    """Members with every option drawn anew, the same for the same sp."""
    source, members = random.Random(sp), []
    heads = TOY.num_attention_heads
    contexts = [r for r in range(1, sp + 1) if sp % r == 0 and heads % (sp // r) == 0]
    for seed in range(DRAWS[sp]):
        pick = source.choice
        q_lora, context = pick([None, 24]), pick(contexts)
        options: dict[str, Any] = {"context": context}
        options["layout"] = pick(["contiguous", "zigzag"])
        options["query"] = pick(["heads", "latent"]) if q_lora else "heads"
        options["recompute"], options["overlap"] = pick([False, True]), pick([False, True])
        options["head_chunk"] = pick([None, 1, heads * context // sp])
        config = replace(TOY, q_lora_rank=q_lora, causal=pick([True, True, False]), norm=pick(["rms", "layer"]))
        seq, given = 2 * sp * pick([1, 2, 3]), pick([False, False, True])
        held = zigzag(seq, context) if options["layout"] == "zigzag" else list(range(seq))
        if given and options["layout"] == "contiguous":
            source.shuffle(held)
        kernel, batch = pick(["eager", "tiled"]), pick([1, 1, 3])
        members.append(Member(config, "laga", options, batch, seq, seed=seed, kernel=kernel, held=held, given=given))
    for key_rope in ("replicated", "headless"):
        if heads % sp == 0:
            options = {"key_rope": key_rope, "packed": True}
            members.append(Member(TOY, "explicit", options, 2, 4 * sp, kernel="tiled", held=list(range(4 * sp))))
    return members


@cache
def by_rank(sp: int) -> list[dict[str, Any]]:
    """All that this module wants of sp ranks, in one launch: most of the time it takes is to start them."""
    members = drawn(sp)
    return [on_rank(None, members)] if sp == 1 else on_ranks(on_rank, members, sp=sp, timeout=110, preload=[COMPILER])


def on_rank(group: Any, members: list[Member]) -> dict[str, Any]:
    found: dict[str, Any] = {"members": run(group, members)}
    if degree(group) == 4:
        found |= {part.__name__: part(group) for part in (delayed, automatic, round_trip, refused)}
    return found


def results(sp: int) -> list[tuple[Member, list[dict[str, Any]]]]:
    return [(member, [found["members"][i] for found in by_rank(sp)]) for i, member in enumerate(drawn(sp))]


@pytest.mark.parametrize("sp", [1, 2, 4, 8, 16])
def test_every_combination_equals_one_process_and_sends_what_the_closed_form_says(sp: int) -> None:
    for member, shards in results(sp):
        check(member, shards)


@pytest.mark.parametrize("sp", [2, 4, 8])
def test_the_draw_has_every_pair_of_options(sp: int) -> None:
    flags = {
        "recompute": True,
        "overlap": True,
        "query": "latent",
        "layout": "zigzag",
        "kernel": "tiled",
        "causal": True,
    }
    seen = [
        {**member.options, "kernel": member.kernel, "causal": member.config.causal}
        for member, _ in results(sp)
        if member.form == "laga"
    ]
    for one, other in itertools.combinations(flags, 2):
        assert any(each[one] == flags[one] and each[other] == flags[other] for each in seen), (one, other)
        assert any(each[one] == flags[one] and each[other] != flags[other] for each in seen), (one, other)


# --- overlap ---


class Late:
    """A collective that takes place when it is waited for, and not before; until then its output is NaN."""

    def __init__(self, name: str, real: Any, output: Tensor, source: Tensor, group: Any, events: list[str]) -> None:
        self.call, self.name, self.events = lambda: real(output, source, group=group), name, events
        output.fill_(torch.nan)
        events.append(f"begin {name}")

    def wait(self) -> None:
        self.call()
        self.events.append(f"end {self.name}")


def delayed(group: Any) -> list[tuple[dict[str, Any], list[str]]]:
    found = []
    for member in OVERLAPPED:
        events: list[str] = []

        def late(name: str, events: list[str] = events) -> Any:
            real = getattr(dist, name)

            def collective(output: Tensor, source: Tensor, group: Any = None, async_op: bool = False) -> Any:
                if async_op:
                    return Late(name, real, output, source, group, events)
                events.append(name)
                return real(output, source, group=group)

            return collective

        names = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
        _run(group, replace(member, options={**member.options, "overlap": False}))  # makes the process groups
        with contextlib.ExitStack() as stack:
            patches = {name: late(name) for name in names}
            for name, patch in patches.items():
                stack.enter_context(mock.patch.object(dist, name, patch))
            found.append((_run(group, member), events))
    return found


OVERLAPPED = [
    Member(
        TOY, "laga", {"context": c, "query": q, "recompute": r, "overlap": True}, 2, 16, kernel=k, held=list(range(16))
    )
    for c, q, r, k in [
        (1, "heads", False, "eager"),
        (2, "heads", True, "tiled"),
        (1, "latent", True, "tiled"),
        (2, "latent", False, "eager"),
        (4, "heads", False, "tiled"),
    ]
]


@pytest.mark.parametrize("number", range(len(OVERLAPPED)))
def test_nothing_is_read_before_its_collective_has_ended(number: int) -> None:
    check(OVERLAPPED[number], [found["delayed"][number][0] for found in by_rank(4)])


def test_the_query_travels_while_the_latent_does_forward_and_backward() -> None:
    _, events = by_rank(4)[0]["delayed"][0]
    events = [event for event in events if event != "all_gather_single"]  # the ranks' agreement
    gather, scatter = "all_gather_single", "reduce_scatter_single"
    assert events[:4] == [f"begin {gather}", "all_to_all_single", f"end {gather}", "all_to_all_single"]
    assert events[4:8] == ["all_to_all_single", f"begin {scatter}", "all_to_all_single", f"end {scatter}"]


# --- what is kept ---


def kept_bytes(member: Member) -> int:
    """Distinct storages that autograd keeps, parameters aside, on one process."""
    weights, hidden, _ = member.drawn()
    module = MLAAttention(member.config, member.form, member.kernel, dtype=member.dtype, **member.options)
    module.load_state_dict(weights)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = module(hidden.requires_grad_())
    del out
    return sum(storages.values())


def test_recomputation_keeps_the_input_the_output_and_one_number_a_row() -> None:
    options = {"recompute": True, "query": "latent"}
    member = Member(TOY, "laga", options, 2, 32, kernel="tiled", held=list(range(32)))
    c, tokens = member.config, member.batch * member.seq
    expected_bytes = 8 * tokens * (c.hidden_size + c.num_attention_heads * (c.v_head_dim + 1))
    assert kept_bytes(member) == expected_bytes
    assert kept_bytes(replace(member, options={})) > 3 * expected_bytes


V3 = MLAConfig.preset("deepseek-v3")


@cache
def simulated(layers: int = 1, form: str = "laga", **options: Any) -> Any:
    return simulate_memory(V3, form=form, kernel="tiled", seq=16384, sp=8, layers=layers, **options)


@pytest.mark.parametrize(
    ("options", "at_most"), [({"recompute": True}, 0.66), ({"recompute": True, "query": "latent"}, 0.37)]
)
def test_kept_at_full_size_against_explicit(options: dict[str, Any], at_most: float) -> None:
    part = simulated(**options).saved_bytes / simulated(form="explicit").saved_bytes
    assert part <= at_most
    assert f"({part:.2f})" in CHAPTER


def test_peak_of_four_layers_at_full_size() -> None:
    def above(run: Any) -> int:
        return run.peak_bytes - run.breakdown["weights"] - run.breakdown["gradients"]

    ours = simulated(4, recompute=True, query="latent", head_chunk=2)
    part = above(ours) / above(simulated(4, form="explicit"))
    assert part <= 0.75
    assert f"falls to {part:.2f} of explicit's" in CHAPTER


# --- what is sent ---


def test_wire_bytes_against_the_papers_explicit_at_full_size() -> None:
    def sent(form: str, **options: Any) -> int:
        return communication(V3, form, 16384, 8, **options).total_bytes

    assert round(sent("laga") / sent("explicit"), 3) == 0.556
    assert sent("laga", query="latent") <= 0.41 * sent("explicit")
    headless = sent("explicit", key_rope="headless")
    assert sent("explicit", packed=True, key_rope="headless") == headless < sent("explicit", packed=True)


def test_bytes_between_two_nodes_of_eight() -> None:
    def outside(form: str, **options: Any) -> int | None:
        return communication(V3, form, 16384, 16, ranks_per_node=8, **options).inter_node_bytes

    tokens = 16384 // 16
    assert outside("explicit") == tokens * 40960 * 2  # half of 128 heads times 640 elements
    assert outside("laga", context=2) == outside("laga", context=2, query="latent") == tokens * 576 * 2
    assert round(outside("explicit") / outside("laga", context=2)) == 71
    assert outside("laga") == tokens * (128 * 320 // 2 + 8 * 576) * 2


def test_one_node_sends_nothing_outside() -> None:
    for context in (1, 2, 8):
        assert communication(V3, "laga", 4096, 8, ranks_per_node=8, context=context).inter_node_bytes == 0


def test_every_expression_has_a_latex_and_a_vega_face() -> None:
    for options in ({"context": 2}, {"context": 2, "query": "latent", "recompute": True}):
        for direction in ("forward", "backward"):
            expression = communication_expression("laga", "wire", direction, **options)
            numbers = substitutions(V3, seq=4096, sp=16, batch=1, dtype=torch.bfloat16, context=2)
            text = to_vega(expression)
            names = {symbol.name: value for symbol, value in numbers.items()}
            value = eval(text, {"__builtins__": {}, "min": min, "max": max, "pow": math.pow}, names)
            assert value == int(expression.subs(numbers)), text
            assert "R" in to_latex(expression)


@pytest.mark.usefixtures("namespaces")
def test_bytes_on_the_link_between_two_emulated_nodes() -> None:
    rows = {row["member"]: row for row in experiment.node_bytes(128, ("explicit", "latent across"))}
    assert rows["latent across"]["part"] <= 1 / 30
    for row in rows.values():  # headers, acknowledgements, and gloo's reduce-scatter sends more than it has to
        assert row["derived_bytes"] <= row["link_bytes"] <= 1.02 * row["derived_bytes"] + 100_000, row


# --- the cost model ---

SLOW = Machine(rate=100e12, node_link=50e9, slow_link=1e9, ranks_per_node=8, attention_rate=60e12)
FAST = replace(SLOW, slow_link=50e9, node_link=400e9)


@pytest.mark.parametrize(("seq", "sp", "query_latent"), [(8192, 4, True), (4096, 2, False)])
def test_the_closed_form_of_what_is_kept_equals_the_simulation(seq: int, sp: int, query_latent: bool) -> None:
    config = V3 if query_latent else replace(V3, q_lora_rank=None)
    for form, options in [("explicit", {}), *members(config, seq, sp, "zigzag")]:
        if not options.get("overlap"):
            found = simulate_memory(config, form=form, kernel="tiled", seq=seq, sp=sp, **options).saved_bytes
            assert abs(cost(config, form, seq, sp, SLOW, **options).saved_bytes / found - 1) <= 0.02, (form, options)


def test_the_slow_link_decides_between_heads_and_context() -> None:
    slow = choose(V3, 16384, 16, SLOW, layout="zigzag")
    assert (slow.form, slow.options["context"]) == ("laga", 2)
    assert "ms a layer" in slow.reason and "explicit" in slow.reason and "quicker" not in slow.reason
    flat = replace(FAST, node_link=10e9, slow_link=None)
    assert choose(V3, 131072, 128, flat, layout="zigzag").form == "explicit"  # many ranks, no slow link to spare


def test_memory_decides_for_recomputation() -> None:
    room = choose(V3, 16384, 8, FAST, layers=60)
    assert not room.options.get("recompute")
    tight = choose(V3, 16384, 8, replace(FAST, memory=60 * 200e6), layers=60)
    assert tight.options["recompute"] and "does not fit" in tight.reason
    none = choose(V3, 16384, 8, replace(FAST, memory=1e6), layers=60)
    assert "nothing fits" in none.reason and none.best.saved_bytes == min(c.saved_bytes for c in none.weighed)


def test_more_ranks_than_heads_leaves_context() -> None:
    few = replace(V3, num_attention_heads=4)
    assert all(options["context"] >= 4 for _, options in members(few, 4096, 16))


def automatic(group: Any) -> tuple[str, dict[str, Any], str, list[float]]:
    torch.manual_seed(0)
    hidden = torch.randn(1, 16, TOY.hidden_size, dtype=torch.float64)
    machine = Machine(rate=1e12, node_link=1e5, ranks_per_node=2)
    module = MLAAttention(TOY, "auto", group=group, dtype=torch.float64, machine=machine)
    out = module(shard_sequence(hidden, group))
    whole = unshard_sequence(out, group)
    plain = MLAAttention(TOY, "explicit", dtype=torch.float64)
    plain.load_state_dict(module.state_dict())
    error = (whole - plain(hidden)).abs().max().item()
    return module.choice.form, module.choice.options, module.choice.reason, [error]


def test_auto_runs_what_it_picks() -> None:
    found = [each["automatic"] for each in by_rank(4)]
    assert all(each[:3] == found[0][:3] for each in found)
    form, options, reason, _ = found[0]
    assert form == "laga" and options.get("context") == 4 and "R = 4" in reason
    assert max(each[3][0] for each in found) <= 1e-12


# --- sharding ---


@given(
    data=st.data(),
    context=st.sampled_from([1, 2, 3, 4]),
    within=st.sampled_from([1, 2, 3]),
    pieces=st.integers(1, 3),
    layout=st.sampled_from(["contiguous", "zigzag"]),
)
@settings(deadline=None, max_examples=60)
def test_an_order_knows_its_runs(data: Any, context: int, within: int, pieces: int, layout: str) -> None:
    seq = 2 * context * within * pieces
    order = TokenOrder.of_layout(seq, layout, context)
    positions = sequence_positions(seq, layout, context).tolist()
    assert positions == (zigzag(seq, context) if layout == "zigzag" else list(range(seq)))
    assert torch.equal(order.positions[order.sorting], torch.arange(seq))
    assert TokenOrder.of_positions(order.positions).pieces == order.pieces
    first = data.draw(st.integers(0, seq - 1))
    last = data.draw(st.integers(first + 1, seq))
    seen = [p for run in order.runs(first, last) for p in range(run.keys - len(range(seq)[run.rows]), run.keys)]
    assert seen == positions[first:last]
    work = [sum(positions[r * seq // context : (r + 1) * seq // context]) for r in range(context)]
    assert layout == "contiguous" or max(work) == min(work), "zigzag does not even out the causal work"


def round_trip(group: Any) -> list[bool]:
    found = []
    for layout, context in (("contiguous", 1), ("zigzag", 2), ("zigzag", 4)):
        for x, dim in ((torch.arange(48).view(2, 24), 1), (torch.randn(24, 3, 2), 0), (torch.randn(24), 0)):
            shard = shard_sequence(x, group, layout=layout, context=context, dim=dim)
            whole = unshard_sequence(shard, group, layout=layout, context=context, dim=dim)
            found.append(shard.shape[dim] == 6 and torch.equal(whole, x))
    return found


def test_shards_come_back_in_order() -> None:
    assert all(all(found["round_trip"]) for found in by_rank(4))
    assert torch.equal(unshard_sequence(shard_sequence(torch.arange(6), None, dim=0), None, dim=0), torch.arange(6))


# --- bad input ---


@pytest.mark.parametrize(
    ("config", "options", "says"),
    [
        (TOY, {"context": 3}, "context=3 does not divide sp=1"),
        (TOY, {"context": 0}, "context must be a whole number of at least 1, got 0"),
        (TOY, {"context": True}, "context must be a whole number"),
        (TOY, {"head_chunk": 9}, "head_chunk=9 is more than the 8 heads"),
        (TOY, {"head_chunk": 0}, "head_chunk must be a whole number of at least 1 or None, got 0"),
        (TOY, {"recompute": 1}, "recompute must be one of"),
        (TOY, {"layout": "striped"}, "layout must be one of"),
        (replace(TOY, q_lora_rank=None), {"query": "latent"}, "q_lora_rank is None; use query='heads'"),
        (TOY, {"ring": True}, "has no option 'ring'; its options: context, layout, query"),
    ],
)
def test_bad_options_say_what_to_do(config: MLAConfig, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        MLAAttention(config, "laga", **options)
    with pytest.raises(ValueError, match=re.escape(says)):
        communication(config, "laga", 24, 1, **options)


def refused(group: Any) -> tuple[list[str], list[str]]:
    """What each mistake raises on this rank, and the collectives that had moved data by then."""

    def layer(heads: int = 8, q_lora_rank: int | None = 24, **options: Any) -> MLAAttention:
        config = replace(TOY, num_attention_heads=heads, q_lora_rank=q_lora_rank)
        return MLAAttention(config, "laga", group=group, **options)

    with record_bytes() as ledger:
        return _refused(group, layer), [entry.collective for entry in ledger.entries]


def _refused(group: Any, layer: Callable[..., MLAAttention]) -> list[str]:
    zig, hidden = {"context": 2, "layout": "zigzag"}, torch.randn(1, 4, TOY.hidden_size)
    rank = dist.get_rank(group)
    return [
        raised(lambda: layer(context=3)),
        raised(lambda: layer(heads=3, context=2)),
        raised(lambda: layer(q_lora_rank=None, query="latent")),
        raised(lambda: layer(head_chunk=3)),
        raised(lambda: layer(context=2, head_chunk=5)),
        raised(lambda: layer(head_chunk=0)),
        raised(lambda: layer(kernel="npu")(hidden)),
        raised(lambda: layer(kernel="npu", **zig, recompute=True)(hidden)),
        raised(lambda: layer(context=4, layout="zigzag")(hidden[:, :1])),
        raised(lambda: layer(**zig)(hidden, torch.arange(4) + 4 * rank)),
        raised(lambda: layer(context=2 if rank else 4)(hidden)),
        raised(lambda: MLAAttention(TOY, "auto", group=group, layers=1 + rank)(hidden)),
        raised(lambda: shard_sequence(torch.zeros(1, 6, 2), group)),
        raised(lambda: shard_sequence(torch.zeros(1, 4, 2), group, layout="zigzag", context=4)),
        raised(lambda: shard_sequence(torch.zeros(1, 8, 2), group, layout="striped")),
    ]


def test_bad_sizes_are_refused_on_every_rank_alike() -> None:
    wanted = [
        "ValueError: context=3 does not divide sp=4; choose context among [1, 2, 4]",
        "3 heads cannot be split evenly over sp/context = 2 ranks (sp=4, context=2); choose context among [4]",
        "query='latent' needs a query latent, but q_lora_rank is None; use query='heads'",
        "head_chunk=3 is more than the 2 heads of a rank; choose 1 to that",
        "head_chunk=5 is more than the 4 heads of a rank",
        "head_chunk must be a whole number of at least 1 or None, got 0",
        "kernel 'npu' cannot do this: the tensors are on cpu, not on an Ascend NPU; use kernel='tiled'",
        "kernel 'npu' cannot do this",
        "2 * context = 8 equal pieces, which seq=4 is not a multiple of",
        "positions are not those of layout='zigzag' with context=2",
        "the ranks do not agree",
        "the ranks do not agree: machine and layers is",
        "seq=6 cannot be split evenly over sp=4 ranks; pad it to 8",
        "2 * context = 8 equal pieces",
        "unknown layout 'striped'; known: contiguous, zigzag",
    ]
    for found, moved in (each["refused"] for each in by_rank(4)):
        for text, part in zip(found, wanted, strict=True):
            assert part in text, f"{text!r} does not say {part!r}"
        assert moved == ["all_gather"], "of the positions given, which only all ranks together can judge; nothing else"
