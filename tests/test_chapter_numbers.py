"""The numbers that chapters state in prose are what the code gives: a sentence cannot drift from its source."""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from laga_core import MLAConfig, communication, simulate_memory
from laga_core.costs import memory_cost, substitutions
from laga_core.costs.choice import arithmetic
from laga_core.experiments import convergence, family, memory, routing_noise, throughput
from laga_core.experiments.checks.records import published
from laga_core.forms import STRONG_EXPLICIT
from laga_core.kernels import tiled
from laga_core.results import Record

BOOK = Path(__file__).resolve().parent.parent / "book"
PAPER = MLAConfig.preset("paper-v3")
V3 = MLAConfig.preset("deepseek-v3")


def text(chapter: str) -> str:
    return " ".join((BOOK / f"{chapter}.md").read_text(encoding="utf-8").split())


def states(chapter: str, *quotes: str) -> None:
    missing = [quote for quote in quotes if quote not in text(chapter)]
    assert not missing, f"{chapter}.md no longer says {missing}"


def ratio(sp: int, config: MLAConfig = PAPER, **explicit: str) -> float:
    sent = (
        communication(config, form, 16384, sp, **options) for form, options in (("explicit", explicit), ("laga", {}))
    )
    one, other = (each.total_bytes for each in sent)
    return one / other


def peak_mb(form: str, **options: str) -> float:
    return simulate_memory(PAPER, form, "eager", 16384, 8, **options).peak_bytes / 1e6


def test_communication() -> None:
    wire = [ratio(sp) for sp in (4, 8, 16)]
    once = [ratio(sp, key_rope="headless") for sp in (4, 8, 16)]
    few = ratio(8, replace(PAPER, num_attention_heads=16))
    crossover = 128 * (128 + 64 + 128) / (512 + 64)
    states(
        "communication",
        "is {:.2f} for 4 ranks, {:.2f} for 8 and {:.2f} for 16".format(*wire),
        "down to {:.2f}, {:.2f} and {:.2f}".format(*once),
        f"the wire {few:.2f}",
        f"at about {crossover:.0f} ranks",
    )
    # Keys and values of a token have as many times the elements of what they are built from.
    states("sequence_parallelism", f"about {crossover:.0f} of them", f"have {crossover:.0f} times the elements")
    assert ratio(64) > 1 > ratio(128)


def test_memory() -> None:
    explicit, split, joint = peak_mb("explicit"), peak_mb("absorbed", score="split"), peak_mb("absorbed", score="joint")
    matrix = memory.score_matrix_mb(16384, 8)
    states(
        "memory",
        f"the split form finds {split - explicit:.0f}",
        f"removes {split - joint:.0f} of them",
        f"itself, {matrix:.0f} MB, and {split - joint - matrix:.0f} MB more",
        f"What is left is {joint - explicit:.0f} MB",
        f"both peak at {explicit / 1e3:.1f} GB",
    )
    narrow = replace(PAPER, hidden_size=2048)
    for config in (PAPER, narrow):
        excess = (simulate_memory(config, f, "eager", 8192, 8, **o).peak_bytes / 1e6
                  for f, o in (("absorbed", {"score": "split"}), ("explicit", {})))  # fmt: skip
        assert next(excess) - next(excess) == pytest.approx(2510, abs=1)
    states("memory", "gives 2510 MB for both widths")


def test_saved() -> None:
    saved = {form: simulate_memory(PAPER, form, "fused", 16384, 8).saved_bytes / 1e6 for form in memory.FORMS}
    states(
        "fused",
        "is {explicit:.0f} MB for explicit, {laga:.0f} for Laga and {absorbed:.0f} for absorbed".format(**saved),
        f"a factor of {saved['absorbed'] / saved['explicit']:.1f} in saved activations",
    )
    states("memory", f"keeps about {saved['absorbed'] / saved['explicit']:.1f} times")
    layers = 61 * (saved["absorbed"] - saved["explicit"]) / 1e3
    assert 19.5 < layers < 22  # "some 20 GB on every rank"


def test_rebuilding() -> None:
    config, everything = MLAConfig.preset("deepseek-v3"), {"query": "latent", "recompute": True}
    one, other = ({n: memory_cost(config, "laga", "fused", 16384, 8, layers=n, **options) for n in (1, 2, 3)}
                  for options in ({}, everything))  # fmt: skip
    states(
        "memory",
        f"from {one[1].peak_bytes / 1e6:.0f} MB to {other[1].peak_bytes / 1e6:.0f}",
        f"keeps {other[1].saved_bytes / 1e6:.0f} MB instead of {one[1].saved_bytes / 1e6:.0f}",
    )
    assert [one[n].peak_bytes > other[n].peak_bytes for n in (1, 2, 3)] == [False, False, True]  # "the third layer"


def test_workspace() -> None:
    peaks = {
        (form, kernel): simulate_memory(PAPER, form, kernel, 16384, 8).peak_bytes / 1e6
        for form in ("explicit", "absorbed")
        for kernel in ("fused", "tiled")
    }
    held = {form: peaks[form, "tiled"] - peaks[form, "fused"] for form in ("explicit", "absorbed")}
    tiles = tiled._TILE_ACCELERATOR * (4 + 4 + 2) / 1e6  # two in float32, one in bf16
    states(
        "fused",
        f"at 16 384 tokens is {peaks['absorbed', 'fused'] - peaks['explicit', 'fused']:.0f} MB",
        f"holds {held['explicit']:.0f} MB for the explicit form on an accelerator: {tiles:.0f} for its tiles",
        f"For absorbed it holds {held['absorbed']:.0f}",
        f"grows to {peaks['absorbed', 'tiled'] - peaks['explicit', 'tiled']:.0f} MB",
    )


def test_quadratic_fits() -> None:
    fits = {row["column"]: row for row in memory.quadratic_fits()}
    for column, label in (
        ("explicit, eager", "explicit, eager"),
        ("laga, eager", "Laga, eager"),
        ("absorbed, eager", "absorbed, eager"),
    ):
        row = fits[column]
        states("memory", f"| {label} | {row['score_matrices']:.2f} | {row['linear_mb_per_4096']:.1f} |")
    a100 = fits["absorbed − explicit, A100"]
    states("memory", f"on the A100 | {a100['score_matrices']:.3f} | {a100['linear_mb_per_4096']:.1f} |")
    fused = fits["absorbed, fused"]
    square = fused["score_matrices"] * memory.score_matrix_mb(4096, 8)
    states("fused", rf"{fused['fixed_mb']:.0f} + {fused['linear_mb_per_4096']:.0f}\, s + {square:.0f}\, s^2")


def test_hardware() -> None:
    matrices = [memory.score_matrix_mb(seq, 8) for seq in (4096, 8192, 16384)]
    a100 = [575 - matrices[0], 2221 - matrices[1], 8734 - matrices[2]]
    joint = [simulate_memory(PAPER, "absorbed", "eager", s, 8).peak_bytes
             - simulate_memory(PAPER, "explicit", "eager", s, 8).peak_bytes for s in (4096, 8192, 16384)]  # fmt: skip
    states(
        "hardware",
        "what remains is {:.0f}, {:.0f} and {:.0f} MB".format(*a100),
        "has {:.0f}, {:.0f} and {:.0f} MB".format(*(each / 1e6 for each in joint)),
    )


def test_exercises() -> None:
    absorbed, accumulator, query, value = (32 * 16384 * width * 2 / 1e6 for width in (512 + 64, 512, 128 + 64, 128))
    states(
        "forms",
        f"absorbed queries, {absorbed:.0f} MB, and the accumulator, {accumulator:.0f} MB",
        f"queries, {query:.0f} MB, keys, {query:.0f} MB, and values, {value:.0f} MB",
        f"has {(absorbed + accumulator) / 1e3:.2f} GB where Laga has {(2 * query + value) / 1e3:.2f}",
    )
    square = (8734 - 2 * 2221) / 2
    states(
        "hardware", f"= {square:.0f}$ and $l = {2221 - square:.0f}$ MB", f"= {memory.score_matrix_mb(8192, 8):.0f}$ MB"
    )


def test_throughput_fits() -> None:
    assert throughput.link_fit("table 4", "fused")["gb_s"] == pytest.approx(58.7, abs=0.05)
    at_16k = throughput.across_nodes_fit()["predicted"][-1]
    assert (round(at_16k["reported"], 2), round(at_16k["bytes_only"], 2)) == (1.24, 1.17)


def test_family_sends() -> None:
    def parts(form: str, **options: Any) -> list[float]:
        counts = [
            (communication(V3, form, 16384, sp, **options), communication(V3, "explicit", 16384, sp))
            for sp in (4, 8, 16)
        ]
        return [one.total_bytes / explicit.total_bytes for one, explicit in counts]

    def outside(form: str, **options: Any) -> float:
        sent = communication(V3, form, 16384, 16, ranks_per_node=8, **options).inter_node_bytes
        assert sent is not None
        return sent / 1e6

    rows = {
        "strong explicit": parts("explicit", **STRONG_EXPLICIT),
        "Laga": parts("laga"),
        "query latent": parts("laga", query="latent"),
    }
    explicit, latent = outside("explicit"), outside("laga", context=2)
    counted = {row["member"]: row for row in family.published("node bytes")[0].metrics["rows"]}
    strong = V3.num_attention_heads * (V3.qk_nope_head_dim + V3.v_head_dim) / V3.kv_lora_rank
    states(
        "family",
        *("| {} | {:.2f} | {:.2f} | {:.2f} |".format(name, *values) for name, values in rows.items()),
        f"elements a token on the slow link: {explicit * 1e6 / 2 / 1024:,.0f}".replace(",", " "),
        f"it is one latent, {latent * 1e6 / 2 / 1024:.0f} elements",
        f"**one part in {explicit / latent:.0f}**",
        f"{latent:.2f} MB a rank and forward where explicit sends {explicit:.1f} and Laga {outside('laga'):.1f}",
        f"it is one part in {1 / counted['latent across']['part']:.0f}, because",
        f"Laga and the strong one at {strong:.0f}",
    )
    assert (
        strong == 64
        and communication(V3, "explicit", 8192, 64, **STRONG_EXPLICIT).total_bytes
        == communication(V3, "laga", 8192, 64).total_bytes
    )
    assert rows["Laga"][2] == rows["query latent"][2], "the tie is exact"


def test_family_price() -> None:
    def unfolding(context: int, seq: int) -> float:
        sizes = substitutions(V3, seq=seq, sp=16, batch=1, dtype=torch.bfloat16, context=context)
        without, attention = arithmetic("laga", True, True)
        work = arithmetic("laga", True, True, context=context, layout="zigzag")[0]
        return float(((work - without) / (context - 1) * context / attention).subs(sizes))

    states(
        "family",
        f"{unfolding(2, 16384) * 16384 / 2:.0f}\\, R",
        f"{unfolding(16, 8192):.1f} times attention for 16 groups",
    )
    assert round(unfolding(2, 16384), 2) == 0.1
    lite = MLAConfig.preset("deepseek-v2-lite")
    can = []
    for context in (1, 2, 4, 8, 16, 32, 64):
        with contextlib.suppress(ValueError):
            sent = communication(lite, "laga", 16384, 64, ranks_per_node=8, context=context).inter_node_bytes
            can.append((context, sent))
    assert [context for context, _ in can] == [4, 8, 16, 32, 64]
    states(
        "family",
        f"= {(dict(can)[8] or 0) // 2 // 256}$ elements",
        f"= {unfolding(8, 16384):.2f}$ of attention's forward work",
    )


def test_family_is_as_quick_as_the_record_says() -> None:
    record = family.published("step times")[0].metrics
    rows = {(r["link"], r["member"]): r["seconds"] for r in record["rows"] if (r["seq"], r["heads"]) == (1024, 32)}

    def times(member: str, link: int | None) -> list[float]:
        return [rows[link, against] / rows[link, member] for against in ("explicit", "strong explicit")]

    only = "latent only, overlap"
    assert min(rows[None, member] for _, member in rows) == rows[None, "query latent"]
    again = {row["member"]: row["ratio"] for row in family.published("recompute")[0].metrics["rows"]}
    states(
        "family",
        "is {:.1f} times as quick as the paper's explicit and {:.1f} times as the strong one".format(*times(only, 200)),
        "Laga {:.1f} and {:.1f} times".format(*times("Laga", 200)),
        "latent only is {:.1f} and {:.1f} times as quick".format(*times(only, 1000)),
        "pays its price: {:.2f} and {:.2f}".format(*times(only, None)),
        "is the query latent, by {:.2f} and {:.2f}".format(*times("query latent", None)),
        f"takes {again['heads, recompute']:.2f} times as long, and {again['latent, recompute']:.2f} with",
    )


def in_bf16() -> list[Record]:
    return [record for record in family.published("step times") if "dtype" not in record.parameters]


def test_family_picks() -> None:
    picks, others_picks = (record.metrics["picks"] for record in in_bf16())
    (miss,) = (pick for pick in picks if not pick["right"])
    there = {(row["seq"], row["heads"]): row for row in family.overlap_gains(picks)}
    overlap = there.pop((miss["seq"], miss["heads"]))
    others = [100 * row["part"] for row in there.values()]
    assert (miss["link"], miss["pick"], miss["best"]) == (None, "query latent", "Laga, overlap")
    states(
        "family",
        f"in {len(picks) - 1} of {len(picks)} settings",
        f"The one miss has {miss['part']:.2f} of the best's speed: {miss['seq']} tokens and {miss['heads']} heads",
        f"overlap gained {1e3 * overlap['gained']:.0f} ms there",
        f"a transfer of {1e3 * overlap['can']:.1f} ms",
        f"in the other {['no', 'one', 'two', 'three', 'four', 'five'][len(others)]} unshaped settings",
        f"by −{-min(others):.0f} % to +{max(others):.0f} %",
    )
    assert all(pick["right"] for pick in others_picks)
    states("family", f"the slowest pick at {min(pick['part'] for pick in others_picks):.2f} of the best's speed")


def test_family_on_a_slower_machine() -> None:
    first, second = in_bf16()
    rates = [
        (each.metrics["machines"][0]["rate"], each.metrics["machines"][0]["attention_rate"]) for each in (first, second)
    ]
    assert [round(a / b) for a, b in zip(*rates, strict=True)] == [7, 4] and second.parameters["repeats"] == 7
    rows = {
        (r["link"], r["member"]): r["seconds"] for r in second.metrics["rows"] if (r["seq"], r["heads"]) == (1024, 32)
    }
    for link, member, words in (
        (200, "latent only, overlap", "latent only is {} times as quick as either"),
        (1000, "query latent", "the query latent is ahead, by {}"),
    ):
        assert rows[link, member] == min(seconds for (each, _), seconds in rows.items() if each == link)
        (times,) = {f"{rows[link, form] / rows[link, member]:.1f}" for form in ("explicit", "strong explicit")}
        states("family", words.format(times))


def test_family_in_float32() -> None:
    (record,) = family.published("step times", dtype="float32")
    assert record.provenance["hardware"] == in_bf16()[1].provenance["hardware"]
    rows, picks = record.metrics["rows"], record.metrics["picks"]
    seconds = {(r["link"], r["member"]): r["seconds"] for r in rows if (r["seq"], r["heads"]) == (1024, 32)}

    def times(link: int, member: str) -> list[float]:
        assert seconds[link, member] == min(value for (each, _), value in seconds.items() if each == link)
        return [seconds[link, form] / seconds[link, member] for form in ("explicit", "strong explicit")]

    def parts(slowed: bool) -> tuple[float, float]:
        found = [
            pick["measured"][member] / predicted
            for pick in picks
            if (pick["link"] is not None) == slowed
            for member, predicted in pick["predicted"].items()
        ]
        return min(found), max(found)

    again = {row["member"]: row["ratio"] for row in family.published("recompute", dtype="float32")[0].metrics["rows"]}
    assert all(pick["right"] for pick in picks) and all(row["quiet"] == 1 for row in rows)
    states(
        "family",
        "{:.1f} against the paper's explicit and {:.1f} against the strong".format(*times(200, "latent only, overlap")),
        "the query latent by {:.1f} and {:.1f} at 1 Gbit/s".format(*times(1000, "query latent")),
        f"no pick misses: {len(picks)} of {len(picks)}, the slowest at {min(pick['part'] for pick in picks):.2f}",
        "take {:.2f} to {:.2f} of the predicted time over slowed links".format(*parts(slowed=True)),
        "links, and {:.2f} to {:.2f} without a limit".format(*parts(slowed=False)),
        f"each setting had {min(row['rounds'] for row in rows)} to {max(row['rounds'] for row in rows)} rounds",
        "takes {:.2f} times as long there, and {:.2f} with".format(
            *(again[f"{query}, recompute"] for query in ("heads", "latent"))
        ),
    )


def test_family_both_ways() -> None:
    (record,) = family.published("both ways")
    assert record.parameters["dtype"] == "float32"
    rows = {
        (against, r["link"], r["member"], r["both_ways"]): r["ratio"]
        for against in ("explicit", "strong explicit")
        for r in family.speedups(record.metrics["rows"], against)
    }

    def ratios(link: int, member: str, both_ways: bool) -> list[float]:
        return [rows[against, link, member, both_ways] for against in ("explicit", "strong explicit")]

    states(
        "family",
        "is {:.1f} times as quick as the paper's explicit, and {:.1f} times as the strong one; with".format(
            *ratios(200, "latent only, overlap", True)
        ),
        "with gloo it is {:.1f} and {:.1f} times there".format(*ratios(200, "latent only, overlap", False)),
        "leads by {:.1f} and {:.1f}, and by {} with gloo".format(
            *ratios(1000, "query latent", True),
            *{f"{ratio:.1f}" for ratio in ratios(1000, "query latent", False)},
        ),
    )
    for link, leader in ((200, "latent only, overlap"), (1000, "query latent")):
        for both_ways in (False, True):
            own = [
                ratio
                for (form, *key, both), ratio in rows.items()
                if (form, key[0], both) == ("explicit", link, both_ways)
            ]
            assert max(own) == rows["explicit", link, leader, both_ways]


def test_correctness_over_a_whole_run() -> None:
    runs = published("convergence", **convergence.PAPER_RUN)
    ends = convergence.ends(runs)
    worst = {
        pair: max(row["difference"] for row in convergence.differences(runs) if row["pair"] == pair)
        for pair in ("laga − explicit", "laga − absorbed")
    }
    explicit, laga = (published("convergence", task="text", form=form)[0].metrics for form in ("explicit", "laga"))
    unstable = {
        row["form"]: row
        for row in convergence.ends(published("convergence", task="random tokens", hidden=512, lr=1e-2))
    }
    states(
        "correctness",
        f"| loss at the start, nats a token | 7.711 | {max(row['start'] for row in ends):.3f} |",
        f"| loss at the end | about 0.004 | {max(row['end'] for row in ends):.3f} |",
        f"| Laga − explicit, at most | about 1.5 | {worst['laga − explicit']:.0e}, and 0 on one rank |",
        f"| Laga − absorbed, at most | 0 | {worst['laga − absorbed']:.0e} |",
        f"ends {unstable['laga']['end'] - unstable['absorbed']['end']:.1f} nats from the other two",
        f"after {len(laga['loss'])} steps",
        f"to within {100 * abs(laga['held_out'] / explicit['held_out'] - 1):.3f} %",
    )
    assert unstable["laga"]["weights"] == unstable["explicit"]["weights"]
    assert [row["difference"] for row in convergence.differences(runs) if row["sp"] == 1 and "explicit" in row["pair"]
            and "laga" in row["pair"]] == [0.0] * 60  # fmt: skip


def test_experts() -> None:
    composed = published("experts", sp=4)
    (pairs,) = published("experts", sp=4, ep=2)
    error = max(max(record.metrics["loss_error"], record.metrics["gradient_error"]) for record in composed)
    assert {record.metrics["interleaved"] for record in composed} == {0}
    assert {record.parameters["ep"] for record in composed} == {1, 2, 4}
    states("experts", f"of {len(pairs.metrics['schedule'])} calls, none is out of place", f"to {error:.0e} in double")


def test_routing_noise() -> None:
    noisy = published("routing_noise", noise=True)
    ratio, jump = routing_noise.beside_the_paper(routing_noise.factors(noisy))
    later, after = [], []
    for record in (record for record in noisy if record.parameters["model"] == "experts"):
        flips, difference, first = (record.metrics[name] for name in ("flipped", "difference", "first_flip"))
        assert flips[first] == 1  # "one token of 256"
        after.append(statistics.fmean(flips[-50:]))
        grown = [routing_noise.growth(difference, step) or 0.0 for step in range(len(flips))]
        later.append(grown.index(max(grown)) - first)
    assert sorted(later)[1:5] == [0] * 4 and sorted(later)[0] < 0  # one seed's largest jump is at the very start
    states(
        "experts",
        *(
            f"| {name} | about {row['reported']} | {row['median']:.0f} | {row['least']:.0f} | {row['most']:.0f} |"
            for name, row in (("divergence, experts / dense", ratio), ("jump at the first flip", jump))
        ),
        f"between {min(after):.0f} and {max(after):.0f} of them",
        f"In four of the {'eight' if len(later) == 8 else len(later)} seeds the largest jump",
        f"in three it follows one to {'four' if max(later) == 4 else max(later)} steps later",
        f"all {len(published('routing_noise', noise=False))} pairs of runs are equal",
        f"by {ratio['least']:.0f} to {ratio['most']:.0f} times over eight seeds",
    )
    assert len([steps for steps in later if steps > 0]) == 3
    dense = [statistics.fmean(r.metrics["difference"]) for r in noisy if r.parameters["model"] == "dense"]
    assert 1e-7 < min(dense) < statistics.median(dense) < 1e-5 < max(dense) < 2e-5  # "10^-6 to 10^-5 nats"


def test_near_ties() -> None:
    *seeds, total = routing_noise.foreseen(published("near_ties"))
    density, moved = round(total["density"]), round(total["moved"], 7)
    choices = published("near_ties")[0].metrics["decisions"]
    expected = choices * density * moved / 2
    layers = 61 - 3  # DeepSeek-V3's, but for the first three
    states(
        "experts",
        f"= {choices}$ choices a step",
        f"lie about {density} to the unit",
        rf"{choices} \times {density} \times {1e6 * moved:.1f}\cdot10^{{-6}} / 2 = {expected:.3f}$: one in some "
        f"{round(1 / expected, -1):.0f} steps",
        f"it expects {total['expected']:.1f} first flips, and there were {total['flips']}",
        rf"{layers} \times 4096 = {layers * 4096:,}".replace(",", r"\,"),
        f"that is {layers * 4096 * density * moved / 2:.1f} flips in every step",
    )
    assert len(seeds) == 8
