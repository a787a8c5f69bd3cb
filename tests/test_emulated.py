"""Emulated links: counted bytes against the closed forms on a small cluster, and the measured sweep on real ranks."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

from laga_core import MLAAttention, MLAConfig
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
    assert family.typical_seconds([[1, 10, 1], [2, 20, 2], [4, 40, 4]]) == [1, 2, 4]
    assert family.typical_seconds([[1, 1, 7], [2, 2, 2], [4, 4, 4]]) == [1, 2, 4], "nor what slows one member once"


@pytest.mark.usefixtures("namespaces")
def test_rounds_are_added_until_the_time_is_over():
    members = {name: family.MEMBERS[name] for name in ("Laga", "latent only")}
    rows = family.step_times((None,), (64,), (8,), members, repeats=1, timeout=60, dtype="float32", seconds=4)
    assert [row["member"] for row in rows] == list(members)
    assert rows[0]["rounds"] == rows[1]["rounds"] > 1
    assert all(0 < row["seconds"] < 4 for row in rows) and rows[0]["sent_bytes"] > rows[1]["sent_bytes"] > 0


@pytest.mark.usefixtures("namespaces")
def test_a_link_is_calibrated_as_a_step_finds_it():
    """One rank comes late to every all-to-all of a step, and then gloo sends the two ways in turn."""

    def seconds():
        netns.shape(200)
        return family._exchange_seconds(8_000_000, Quiet(0), 1)

    burst = 80_000  # bytes that a link lets through at once
    each_way = (4_000_000 - burst) * 8 / 200e6
    assert min(netns.run(seconds, timeout=60)) > 1.9 * each_way


def _outputs_and_gradients(group, collective):
    """Of every member of the family, with the collective that ``dist`` has meanwhile."""
    assert dist.all_to_all_single is collective
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
    own = _outputs_and_gradients(group, dist.all_to_all_single)
    others = duplex.both_ways(_outputs_and_gradients, group, duplex._all_to_all_single)
    assert dist.all_to_all_single is not duplex._all_to_all_single, "taken back"
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
