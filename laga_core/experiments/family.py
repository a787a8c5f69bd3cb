"""The family measured: step times over shaped links, bytes on the link between nodes, and what each member keeps.

Ranks are processes in network namespaces of this machine (:mod:`laga_core.experiments.netns`), so these numbers are
*emulated*; what a layer keeps is *simulated*; closed forms are *derived*.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from .. import results
from ..attention import MLAAttention
from ..config import MLAConfig
from ..costs import Machine, communication, cost
from ..forms import STRONG_EXPLICIT
from ..forms.projections import join_key, keys_and_values
from ..kernels import attention
from ..memory import simulate_memory
from ..results import Record, Store, run_cell
from ..rotary import softmax_scale
from . import duplex, netns
from .quiet import Quiet, timed

EXPERIMENT = "family"
Member = tuple[str, dict[str, Any]]
_LATE = 0.005  # seconds; much longer than it takes two ranks to tell each other that they are there

MEMBERS: dict[str, Member] = {
    "explicit": ("explicit", {}),
    "strong explicit": ("explicit", STRONG_EXPLICIT),
    "Laga": ("laga", {}),
    "Laga, overlap": ("laga", {"overlap": True}),
    "query latent": ("laga", {"query": "latent"}),
    "latent only": ("laga", {"context": 2, "layout": "zigzag"}),
    "latent only, overlap": ("laga", {"context": 2, "layout": "zigzag", "overlap": True}),
}
"""The members compared at sp 2, by the name that charts give them; "latent only" is U = 1, R = 2."""

KEEPING: dict[str, Member] = {
    "explicit": ("explicit", {}),
    "strong explicit": ("explicit", STRONG_EXPLICIT),
    "Laga": ("laga", {}),
    "recompute": ("laga", {"recompute": True}),
    "recompute, query latent": ("laga", {"recompute": True, "query": "latent"}),
    "recompute, query latent, 2 heads at a time": ("laga", {"recompute": True, "query": "latent", "head_chunk": 2}),
}
"""The members whose memory is compared; both explicit forms keep the same."""


def emulated_config(heads: int, hidden: int = 1024, q_lora: int = 512) -> MLAConfig:
    """A layer with DeepSeek-V3's head sizes, small enough for two CPU cores."""
    v3 = MLAConfig.preset("deepseek-v3")
    return replace(v3, hidden_size=hidden, num_attention_heads=heads, q_lora_rank=q_lora, rope_scaling=None)


# --- records ---

GRID = {"links": [None, 1000, 200], "seqs": [512, 1024, 2048], "heads": [8, 32], "repeats": 5}


def run(store: Store, rerun: bool = False, patience: float = 0.0, **grid: Any) -> dict[str, Record]:
    """Every emulated measurement of this module, a record each, taken from the store if it is there.

    ``patience``: as in :func:`step_times`, for each timed measurement. ``grid`` replaces some of :data:`GRID`, or adds
    ``dtype``, the name of the dtype of all that is timed, or ``seconds``, as in :func:`step_times`. Raises
    ``RuntimeError`` where this machine cannot emulate a cluster.
    """
    if "seconds" in grid:
        grid["seconds"] = float(grid["seconds"])  # or 150 and 150.0 would be two records
    timing: dict[str, Any] = {name: grid[name] for name in ("dtype", "seconds") if name in grid}
    cells: dict[str, tuple[dict[str, Any], Callable[..., dict[str, Any]]]] = {
        "step times": ({**GRID, **grid}, partial(_grid_metrics, patience=patience)),
        "recompute": (
            {"seq": 4096, "heads": 32, "repeats": 5, **timing},
            lambda **sizes: {"rows": recompute_cost(**sizes, patience=patience)},
        ),
        "both ways": (
            {"links": [1000, 200], "seqs": [1024], "heads": [32], "repeats": 5, **timing},
            lambda **sizes: {"rows": step_times(**sizes, patience=patience, both_ways=True)},
        ),
        "node bytes": ({"seq": 512}, lambda **sizes: {"rows": node_bytes(**sizes)}),
    }
    found = {}
    for name, (sizes, measure) in cells.items():
        notes = {"device": "cpu", "backend": "gloo", "load_before": round(os.getloadavg()[0], 1)}
        found[name] = run_cell(
            store, EXPERIMENT, {"measure": name, **sizes}, _without_name(measure), kind="emulated", rerun=rerun, **notes
        )
    return found


def published(measure: str, **parameters: Any) -> list[Record]:
    """Committed records of one measurement, of any machine; those with these parameters."""
    return results.published(EXPERIMENT, measure=measure, **parameters)


def _without_name(measure: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def call(**parameters: Any) -> dict[str, Any]:
        del parameters["measure"]
        return measure(**parameters)

    return call


def _grid_metrics(
    links: list[float | None],
    seqs: list[int],
    heads: list[int],
    repeats: int,
    patience: float,
    dtype: str = "bfloat16",
    seconds: float = 0.0,
) -> dict[str, Any]:
    machines = calibrate(links, patience, dtype=dtype)
    rows = step_times(links, seqs, heads, None, repeats, 3600, patience, dtype, seconds)
    return {
        "rows": rows,
        "machines": [{"link": link, **asdict(machine)} for link, machine in machines.items()],
        "picks": picks(rows, machines, dtype=dtype),
    }


# --- step times over shaped links ---


def step_times(
    links: Sequence[float | None] = (None, 1000, 200),
    seqs: Sequence[int] = (1024,),
    heads: Sequence[int] = (32,),
    members: Mapping[str, Member] | None = None,
    repeats: int = 5,
    timeout: float = 900.0,
    patience: float = 0.0,
    dtype: str = "bfloat16",
    seconds: float = 0.0,
    both_ways: bool = False,
) -> list[dict[str, Any]]:
    """Seconds of forward and backward at sp 2, each rank on a node of its own, for each link in Mbit/s.

    One run: the members take turns, for ``repeats`` rounds at each setting, and for more until ``seconds`` have passed
    there. Rows with ``link``, ``seq``, ``heads``, ``member``, ``seconds`` (:func:`typical_seconds` of the slower
    rank's), ``rounds``, and ``sent_bytes``, counted on the interface. On a busy machine up to ``patience`` seconds in
    all are spent waiting for moments when nobody else computes (:class:`.quiet.Quiet`); ``quiet`` is the part of a
    member's steps that had one. ``both_ways``: each member also takes a turn with the collectives of :mod:`.duplex`
    instead of gloo's, and rows say which they are by ``both_ways``.
    """
    members = dict(members or MEMBERS)
    limit = timeout + patience + seconds * len(links) * len(seqs) * len(heads)
    settings = (list(links), list(seqs), list(heads), members, repeats, patience, dtype, seconds, both_ways)
    per_rank = netns.run(_step_times, *settings, timeout=limit)
    rows = []
    for both in zip(*per_rank, strict=True):
        slower = [max(times) for times in zip(*(each["seconds"] for each in both), strict=True)]
        sent = max(each["sent_bytes"] for each in both)
        rows.append({**both[0], "seconds": slower, "rounds": len(slower), "sent_bytes": sent})
    for _, each in itertools.groupby(rows, itemgetter("link", "seq", "heads")):
        setting = list(each)
        for row, typical in zip(setting, typical_seconds([row["seconds"] for row in setting]), strict=True):
            row["seconds"] = typical
    return rows


def typical_seconds(times: Sequence[Sequence[float]]) -> list[float]:
    """Each member's typical time, from its ``times`` in rounds in which all members took turns.

    The median, over the rounds, of its time divided by the round's median time; in seconds of the median round. What
    slows a whole round, as others on a shared machine do, so falls on none of its members.
    """
    rounds = [statistics.median(each) for each in zip(*times, strict=True)]
    usual = statistics.median(rounds)
    return [usual * statistics.median(t / r for t, r in zip(each, rounds, strict=True)) for each in times]


def _step_times(
    links: list[float | None],
    seqs: list[int],
    heads: list[int],
    members: dict[str, Member],
    repeats: int,
    patience: float,
    dtype: str,
    seconds: float,
    both_ways: bool,
) -> list[dict[str, Any]]:
    """On a rank: each setting's members in turn."""
    rows, quiet = [], Quiet(patience)
    for count in heads:
        config = emulated_config(count)
        for seq in seqs:
            plain = {name: _step(config, seq, form, options, dtype) for name, (form, options) in members.items()}
            steps = {(name, False): step for name, step in plain.items()}
            if both_ways:
                steps |= {(name, True): partial(duplex.both_ways, step) for name, step in plain.items()}
            for link in links:
                dist.barrier()
                netns.shape(link)
                times = {name: timed(step) for name, step in steps.items()}  # what is made once is made here
                sent = {name: time_[1] for name, time_ in times.items()}
                took: dict[tuple[str, bool], list[tuple[float, bool]]] = {name: [] for name in steps}
                names = list(steps)
                for turn in _rounds(repeats, seconds):
                    for name in names[turn % len(names) :] + names[: turn % len(names)]:
                        took[name].append(quiet.timed(steps[name]))
                rows += [
                    {
                        "link": link,
                        "seq": seq,
                        "heads": count,
                        "member": name[0],
                        "both_ways": name[1],
                        "seconds": [each for each, _ in took[name]],
                        "sent_bytes": sent[name],
                        "quiet": statistics.mean(alone for _, alone in took[name]),
                    }
                    for name in names
                ]
    netns.shape(None)
    return rows


def _rounds(repeats: int, seconds: float) -> Iterator[int]:
    """Numbers of ``repeats`` rounds, and of more until ``seconds`` have passed on rank 0; the same on all ranks."""
    end = time.monotonic() + seconds
    for turn in itertools.count():
        more = torch.tensor(turn < repeats or time.monotonic() < end)
        dist.broadcast(more, 0)
        if not more:
            return
        yield turn


def _step(
    config: MLAConfig, seq: int, form: str, options: Mapping[str, Any], dtype: str = "bfloat16"
) -> Callable[[], None]:
    """Forward and backward of one layer on this rank."""
    torch.manual_seed(0)
    sp = dist.get_world_size()
    precision = getattr(torch, dtype)
    layer = MLAAttention(config, form, "tiled", group=dist.group.WORLD, dtype=precision, **options)
    hidden = torch.randn(1, seq // sp, config.hidden_size, dtype=precision, requires_grad=True)

    def step() -> None:
        layer(hidden).sum().backward()

    return step


def with_gloo(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of :func:`step_times` that were timed with gloo's own collectives."""
    return [row for row in rows if not row.get("both_ways")]


def speedups(rows: Iterable[Mapping[str, Any]], against: str = "explicit") -> list[dict[str, Any]]:
    """Each row with ``ratio``: how many times as long the member ``against`` takes at its setting."""
    rows = list(rows)

    def setting(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return row["link"], row["seq"], row["heads"], row.get("both_ways", False)

    base = {setting(row): row["seconds"] for row in rows if row["member"] == against}
    return [{**row, "against": against, "ratio": base[setting(row)] / row["seconds"]} for row in rows]


def recompute_cost(
    seq: int = 4096,
    heads: int = 32,
    repeats: int = 5,
    patience: float = 0.0,
    dtype: str = "bfloat16",
    seconds: float = 0.0,
) -> list[dict[str, Any]]:
    """Step times with and without recomputation on an unshaped link, as :func:`step_times`; ``ratio`` is its price."""
    members: dict[str, Member] = {}
    for query in ("heads", "latent"):
        members[f"{query}, keep"] = ("laga", {"query": query})
        members[f"{query}, recompute"] = ("laga", {"query": query, "recompute": True})
        members[f"{query}, recompute by 2 heads"] = ("laga", {"query": query, "recompute": True, "head_chunk": 2})
    rows = step_times((None,), (seq,), (heads,), members, repeats, 900, patience, dtype, seconds)
    kept = {r["member"].split(",")[0]: r["seconds"] for r in rows if r["member"].endswith("keep")}
    return [{**r, "ratio": r["seconds"] / kept[r["member"].split(",")[0]]} for r in rows]


# --- the link between nodes ---


def node_bytes(seq: int = 512, names: Sequence[str] | None = None, store: Store | None = None) -> list[dict[str, Any]]:
    """Bytes on the link between two nodes of two ranks, forward and backward of one layer, V3's head proportions.

    ``link_bytes``: counted on the interfaces, per rank. ``derived_bytes``: by the closed form. ``part``: of the first
    member's, which is the paper's explicit. ``names``: only these members.
    """
    members: dict[str, Member] = {
        "explicit": ("explicit", {}),
        "strong explicit": ("explicit", STRONG_EXPLICIT),
        "Laga": ("laga", {}),
        "query latent": ("laga", {"query": "latent"}),
        "latent across": ("laga", {"context": 2, "layout": "zigzag"}),
        "latent across, query latent": ("laga", {"context": 2, "layout": "zigzag", "query": "latent"}),
    }
    members = {name: members[name] for name in names or members}
    config = emulated_config(heads=128, hidden=256)
    per_rank = netns.run(_node_bytes, config, seq, members, nodes=2, ranks_per_node=2)
    rows = []
    for name, (form, options) in members.items():
        counted = statistics.mean(per_rank[rank][name] for rank in (0, 2)) / 2  # a node's counter has both its ranks
        sides = [
            communication(config, form, seq, 4, direction=d, ranks_per_node=2, **options).inter_node_bytes
            for d in ("forward", "backward")
        ]
        rows.append({"member": name, "link_bytes": counted, "derived_bytes": sum(side or 0 for side in sides)})
    return [{**row, "part": row["link_bytes"] / rows[0]["link_bytes"]} for row in rows]


def _node_bytes(config: MLAConfig, seq: int, members: Mapping[str, Member]) -> dict[str, int]:
    found = {}
    for name, (form, options) in members.items():
        step = _step(config, seq, form, options)
        step()  # process groups are made, connections opened
        found[name] = timed(step)[1]
    return found


# --- what is kept ---


def kept(
    preset: str = "deepseek-v3", seq: int = 16384, sp: int = 8, names: Sequence[str] = tuple(KEEPING)
) -> list[dict[str, Any]]:
    """Simulated bytes that one layer keeps between forward and backward, and their part of the first member's."""
    config = MLAConfig.preset(preset)
    rows: list[dict[str, Any]] = []
    for name in names:
        form, options = KEEPING[name]
        run = simulate_memory(config, form=form, kernel="tiled", seq=seq, sp=sp, **options)
        rows.append({"member": name, "saved_bytes": run.saved_bytes})
    return [{**row, "saved_part": row["saved_bytes"] / rows[0]["saved_bytes"]} for row in rows]


def saved(preset: str = "deepseek-v3", seq: int = 16384, sp: int = 8, layers: int = 4) -> list[dict[str, Any]]:
    """:func:`kept`, and the simulated peak above weights and gradients of ``layers`` layers, against explicit's."""
    config, rows = MLAConfig.preset(preset), kept(preset, seq, sp)
    for row in rows:
        form, options = KEEPING[row["member"]]
        stack = simulate_memory(config, form=form, kernel="tiled", seq=seq, sp=sp, layers=layers, **options)
        row["peak_above_bytes"] = stack.peak_bytes - stack.breakdown["weights"] - stack.breakdown["gradients"]
    return [{**row, "peak_part": row["peak_above_bytes"] / rows[0]["peak_above_bytes"]} for row in rows]


# --- the cost model against what was measured ---


def calibrate(
    links: Sequence[float | None], patience: float = 0.0, timeout: float = 300.0, dtype: str = "bfloat16"
) -> dict[float | None, Machine]:
    """This machine as the cost model sees it, for each link: rates at one size, the link by one all-to-all.

    The projections' rate is that of unfolding a latent to keys and values: there alone members differ in arithmetic.

    One rank comes late to that all-to-all, as in a step one always does. Then gloo sends the two ways in turn, since
    what asks for the late rank's share waits behind the other's: half of the rate of ranks that come together.
    """
    found = netns.run(_calibrate, list(links), patience, dtype, timeout=timeout + patience)[0]
    return {
        link: Machine(found["rate"], bandwidth, bandwidth, 1, found["attention_rate"], latency)
        for link, (bandwidth, latency) in found["links"].items()
    }


def _calibrate(links: list[float | None], patience: float, dtype: str) -> dict[str, Any]:
    quiet = Quiet(patience)
    precision = getattr(torch, dtype)
    seq, heads = 1024, 16
    config = emulated_config(heads)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=precision, requires_grad=True)

    latent, band = tensor(1, seq, config.kv_lora_rank), tensor(1, seq, config.qk_rope_head_dim)
    up = tensor(heads, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
    q, k, v = (tensor(1, seq, heads, dim) for dim in (config.qk_head_dim, config.qk_head_dim, config.v_head_dim))

    def unfold() -> None:
        k_nope, values = keys_and_values(config, latent, up)
        made = join_key(k_nope, band), values.contiguous()
        torch.autograd.backward(made, (k.detach(), v.detach()))

    def attend() -> None:
        attention(q, k, v, scale=softmax_scale(config), causal=True, kernel="tiled").sum().backward()

    rate = 6 * latent.numel() * up[..., 0].numel() / _median(unfold, quiet)
    attention_rate = 3.5 * 2 * seq**2 / 2 * heads * (config.qk_head_dim + config.v_head_dim) / _median(attend, quiet)
    speeds: dict[float | None, tuple[float, float]] = {}
    for link in links:
        dist.barrier()
        netns.shape(link)
        small, large = (_exchange_seconds(size, quiet, repeats) for size, repeats in ((2048, 21), (8_000_000, 7)))
        speeds[link] = (4_000_000 / max(large - small, 1e-6), small)
    netns.shape(None)
    return {"rate": rate, "attention_rate": attention_rate, "links": speeds}


def _exchange_seconds(size: int, quiet: Quiet, repeats: int) -> float:
    """What the second of two ranks that come to an all-to-all spends in it; it has the last of the data."""
    received, sent = torch.empty(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    took: list[float] = []

    def exchange() -> None:
        time.sleep(_LATE * dist.get_rank())
        start = time.perf_counter()
        dist.all_to_all_single(received, sent)
        took.append(time.perf_counter() - start)

    exchange()
    times = []
    for _ in range(repeats):
        quiet.timed(exchange)
        times.append(took[-1])
    late = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.broadcast(late, 1)
    return late.item()


def _median(run: Callable[[], Any], quiet: Quiet, repeats: int = 15) -> float:
    """Of the slowest rank."""
    run()
    times = torch.tensor([quiet.timed(run)[0] for _ in range(repeats)], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return statistics.median(times.tolist())


def picks(
    rows: Iterable[Mapping[str, Any]],
    machines: Mapping[float | None, Machine],
    close: float = 0.95,
    dtype: str = "bfloat16",
) -> list[dict[str, Any]]:
    """The cost model's pick at each measured setting against the best measured.

    ``part``: the pick's speed in units of the best's. ``right``: the pick is the best, or as quick within ``close``.
    """
    settings: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in with_gloo(rows):
        settings.setdefault((row["link"], row["seq"], row["heads"]), {})[row["member"]] = row["seconds"]
    found = []
    for (link, seq, heads), seconds in settings.items():
        costs = {
            name: cost(
                emulated_config(heads), form, seq, 2, machines[link], dtype=getattr(torch, dtype), **options
            ).seconds
            for name, (form, options) in MEMBERS.items()
            if name in seconds
        }
        pick, best = min(costs, key=costs.__getitem__), min(seconds, key=seconds.__getitem__)
        part = seconds[best] / seconds[pick]
        found.append(
            {"link": link, "seq": seq, "heads": heads, "pick": pick, "best": best, "part": part, "right": part >= close,
             "predicted": costs, "measured": seconds}
        )  # fmt: skip
    return found


def overlap_gains(picks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What overlap gained on the unshaped link, by :func:`picks`, and ``can``, the most that it can hide there.

    What is gained beyond that, or lost, is the scatter of the medians.
    """
    rows = []
    for pick in picks:
        gained, can = (pick[which]["Laga"] - pick[which]["Laga, overlap"] for which in ("measured", "predicted"))
        if pick["link"] is None:
            part = gained / pick["measured"]["Laga, overlap"]
            rows.append({**{key: pick[key] for key in ("seq", "heads")}, "gained": gained, "part": part, "can": can})
    return rows
