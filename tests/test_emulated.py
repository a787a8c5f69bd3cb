"""Emulated links: counted bytes against the closed forms on a small cluster, and the measured sweep on real ranks."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from laga_core import MLAAttention, MLAConfig
from laga_core.costs import Machine
from laga_core.experiments import duplex, emulated, family, netns, throughput
from laga_core.experiments.quiet import Quiet
from laga_core.results import Store


@pytest.mark.usefixtures("namespaces")
def test_a_small_cluster_counts_what_the_forms_send_and_is_not_run_twice(tmp_path):
    sizes = {"heads": 4, "hidden": 128, "seq": 256, "repeats": 1}
    rates, burst = (10, None), 80_000  # bytes that a link lets through at once
    rows = emulated.sweep(Store(tmp_path), (2,), rates, **sizes)
    for row in rows:
        assert row["sent_bytes"] == pytest.approx(row["gloo_bytes"], rel=0.03), row
        assert row["gloo_bytes"] > sum(row["wire_bytes"].values()) or row["form"] == "explicit"
        assert row["wire_bytes"].keys() <= row["probes"].keys() and 0 <= row["quiet"] <= 1
    for probe in next(row["probes"] for row in rows if row["mbit_s"] == 10).values():
        assert probe["bytes"] > burst and probe["ms"] > 1e3 * (probe["bytes"] - burst) * 8 / 10e6
    free = [row for row in emulated.predicted(rows) if row["mbit_s"] is None]
    assert [row["form"] for row in free] == ["absorbed", "laga"]
    assert all(row["predicted"] == row["emulated"] for row in free)
    assert emulated.sweep(Store(tmp_path), (2,), rates, **sizes) == rows


def test_what_slows_a_whole_round_falls_on_no_member():
    times = [[1.5, 10, 1], [2, 20, 2], [4, 40, 4]]  # whose own medians are 1.5, 2, 4
    assert family.typical_seconds(times) == [1, 2, 4]
    assert family.typical_seconds([[1, 1, 7], [2, 2, 2], [4, 4, 4]]) == [1, 2, 4], "nor what slows one member once"


def test_steps_with_other_collectives_are_not_mixed_with_gloos():
    rows = [
        {"link": 200, "seq": 512, "heads": 8, "member": member, "both_ways": both_ways, "seconds": seconds}
        for member, *each in (("explicit", 8.0, 4.0), ("Laga", 4.0, 3.0))
        for both_ways, seconds in zip((False, True), each, strict=True)
    ]
    assert [round(row["ratio"], 2) for row in family.speedups(rows)] == [1, 1, 2, 1.33]
    (pick,) = family.picks(rows, {200: Machine(1e11, 1e7)}, dtype="float32")
    assert pick["measured"] == {"explicit": 8.0, "Laga": 4.0}


def test_a_time_in_whole_seconds_is_the_same_record(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(family, "run_cell", lambda store, name, parameters, *_, **__: asked.append(repr(parameters)))
    for seconds in (150, 150.0):
        family.run(Store(tmp_path), seconds=seconds)
    half = len(asked) // 2
    assert asked[:half] == asked[half:] and "'seconds': 150.0" in asked[0]


@pytest.mark.usefixtures("namespaces")
def test_rounds_are_added_until_the_time_is_over():
    members = {name: family.MEMBERS[name] for name in ("Laga", "latent only")}
    rows = family.step_times((None,), (64,), (8,), members, repeats=1, timeout=60, dtype="float32", seconds=4)
    assert [row["member"] for row in rows] == list(members)
    assert rows[0]["rounds"] == rows[1]["rounds"] > 1
    assert all(0 < row["seconds"] < 4 for row in rows) and rows[0]["sent_bytes"] > rows[1]["sent_bytes"] > 0


@pytest.mark.usefixtures("namespaces")
def test_a_link_is_calibrated_as_a_step_finds_it():
    """One rank comes late to every all-to-all of a step, and then gloo sends the two ways in turn; duplex does not."""

    def seconds():
        netns.shape(200)
        sizes = (8_000_000, Quiet(0), 5)
        return family._exchange_seconds(*sizes), duplex.both_ways(family._exchange_seconds, *sizes)

    burst = 80_000  # bytes that a link lets through at once
    each_way = (4_000_000 - burst) * 8 / 200e6
    for in_turn, at_once in netns.run(seconds, timeout=120):
        assert in_turn > 1.9 * each_way and at_once > 0.95 * each_way
        assert at_once < 0.7 * in_turn


def _outputs_and_gradients(group):
    """Of every member of the family."""
    config = MLAConfig.preset("toy")
    found = []
    for form, options in family.MEMBERS.values():
        torch.manual_seed(dist.get_rank(group))
        hidden = torch.randn(2, 8, config.hidden_size, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(0)
        layer = MLAAttention(config, form, "tiled", group, dtype=torch.float64, **options)
        out = layer(hidden)
        out.square().sum().backward()
        found += [out.detach(), hidden.grad, *(weight.grad for weight in layer.parameters())]
    return found


def _farthest(group):
    names = ("all_to_all_single", "all_gather_single", "reduce_scatter_single")
    gloos = [getattr(dist, name) for name in names]

    def replaced():
        assert not any(getattr(dist, name) is gloo for name, gloo in zip(names, gloos, strict=True))
        return _outputs_and_gradients(group)

    own, others = _outputs_and_gradients(group), duplex.both_ways(replaced)
    assert [getattr(dist, name) for name in names] == gloos, "taken back"
    return len(own), max(float((a - b).abs().max()) for a, b in zip(own, others, strict=True))


@pytest.mark.parametrize("sp", [2, 4])
def test_collectives_that_use_both_ways_give_what_gloos_give(sp):
    for many, deviation in on_ranks(_farthest, sp=sp):
        assert many > 30 and deviation < 1e-12


def test_a_cell_out_of_memory_does_not_end_the_sweep(tmp_path, monkeypatch):
    real = throughput.launch

    def launch(fn, cell, **options):
        if cell["form"] == "absorbed":
            raise MemoryError("no more")
        return real(fn, cell, **options)

    monkeypatch.setattr(throughput, "launch", launch)
    sizes = {"seqs": (64,), "heads": 4, "hidden": 32, "layers": 1, "repeats": 1}
    rows = throughput.sweep(Store(tmp_path), device="cpu", threads_per_rank=1, timeout=100, **sizes)
    assert [(row["form"], row["status"]) for row in rows] == [("explicit", "ok"), ("absorbed", "oom"), ("laga", "ok")]
    assert all((row["tok_s"] or 0) > 0 or row["status"] == "oom" for row in rows)
