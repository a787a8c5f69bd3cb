"""Emulated links: counted bytes against the closed forms on a small cluster, and the measured sweep on real ranks."""

import pytest

from laga_core.experiments import emulated, throughput
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
