"""The cost model against the committed emulated records and the reported tables; the charts."""

import math
import sys
from pathlib import Path

import device_memory
import device_throughput
import nbformat
import pytest
import torch
import yaml
from test_chapter_numbers import states

from laga_core.charts import throughput as charts
from laga_core.charts.tables import table
from laga_core.costs import transfers
from laga_core.experiments import emulated, throughput
from laga_core.kernels import check_kernel
from laga_core.results import Record, Store

ROOT = Path(__file__).resolve().parent.parent


def test_two_measurements_predict_the_ratio_at_every_speed():
    rows = emulated.predicted(emulated.published())
    assert len(rows) == 2 * 2 * len(emulated.RATES)  # degrees, forms, speeds
    for row in rows:
        assert row["predicted"] == pytest.approx(row["emulated"], rel=0.15), row


def test_each_collective_is_charged_its_own_rate():
    def row(rate, form, ms, sent, probe_ms):
        probes = {name: {"ms": one, "bytes": 100} for name, one in probe_ms.items()}
        return {"sp": 2, "mbit_s": rate, "form": form, "ms": ms, "wire_bytes": sent, "probes": probes}

    sent = {"explicit": {"all_to_all": 1000}, "absorbed": {}, "laga": {"all_to_all": 500, "all_gather": 200}}
    fast, slow = {"all_to_all": 2.0, "all_gather": 1.0}, {"all_to_all": 12.0, "all_gather": 6.0}
    rows = [row(100, form, 300.0, sent[form], slow) for form in emulated.FORMS]
    rows += [row(None, form, 50.0, sent[form], fast) for form in emulated.FORMS]
    found = {(row["mbit_s"], row["form"]): row for row in emulated.predicted(rows)}
    assert found[100, "laga"]["emulated"] == found[None, "laga"]["predicted"] == 1.0
    assert found[100, "laga"]["predicted"] == pytest.approx((50 + 100) / (50 + 50 + 10))
    assert found[100, "absorbed"]["predicted"] == pytest.approx((50 + 100) / 50)


def test_interface_counters_agree_with_the_closed_forms():
    rows = emulated.published()
    assert {row["form"] for row in rows} == set(emulated.FORMS)
    for row in rows:
        again = 0 if row["mbit_s"] else 65536  # a segment that TCP sent a second time
        assert 0 < row["sent_bytes"] - row["gloo_bytes"] < 0.01 * row["gloo_bytes"] + again, row


def test_one_link_rate_explains_the_fused_single_node_cells():
    fit = throughput.link_fit("table 4", "fused")
    assert all(abs(cell["residual_ms"]) < 1 for cell in fit["predicted"])


@pytest.mark.parametrize("chart", [charts.emulated, charts.reported, charts.explorer])
def test_charts_are_valid(chart):
    assert chart().to_dict()["usermeta"]["embedOptions"]["renderer"] == "svg"


def test_measured_rates_stand_beside_the_reported_ones(tmp_path):
    store = Store(tmp_path)
    size = {"kernel": "auto", "sp": 8, "seq": 4096, "heads": 128, "hidden": 7168, "layers": 4, "repeats": 3}
    where = {"device": "cuda", "nnodes": 1}
    for form, status, metrics in (
        ("explicit", "ok", {"ms": 80.0}),
        ("absorbed", "oom", {}),
        ("laga", "ok", {"ms": 64.0}),
    ):
        record = {"parameters": {**size, **where, "form": form}, "status": status, "metrics": metrics}
        store.write(Record(experiment="throughput", kind="measured", provenance={"hardware": "a GPU"}, **record))
    *reported, measured = throughput.tokens_per_second(store)
    assert [row["source"] for row in reported].count("table 4") == 6 and {r["kind"] for r in reported} == {"reported"}
    assert next(r for r in reported if r["absorbed"] == "OOM")["laga"] == 20771
    assert (measured["kind"], measured["source"], measured["absorbed"]) == ("measured", "a GPU", "OOM")
    assert (measured["explicit"], measured["laga"], measured["laga / explicit"]) == (51200, 64000, 1.25)
    assert "OOM" in table([measured], absorbed="{:,.0f}")._repr_html_()


CLUSTER = sorted(path for path in (ROOT / "notebooks/profiles").glob("*.yaml") if path.stem != "long")


@pytest.mark.parametrize("profile", CLUSTER, ids=lambda path: path.stem)
def test_a_profile_fits_the_notebook(profile):
    """Every parameter it sets is one of notebook 04's, and of the same type."""
    cells = nbformat.read(ROOT / "notebooks/04_throughput.ipynb", as_version=4).cells
    defaults: dict[str, object] = {}
    exec(next(cell.source for cell in cells if "parameters" in cell.metadata.get("tags", [])), defaults)
    parameters = yaml.safe_load(profile.read_text(encoding="utf-8"))
    assert isinstance(parameters, dict)
    for name, value in parameters.items():
        assert name in defaults and type(value) is type(defaults[name]), name
    for kernel in parameters.get("kernels", []):
        check_kernel(kernel)


# --- the scripts for one device


@pytest.mark.parametrize("script", [device_memory, device_throughput])
@pytest.mark.parametrize("arguments, words", [(["--device", "cuda"], "no usable cuda"), ([], "no GPU or NPU here")])
def test_without_a_device_a_script_says_so(script, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    with pytest.raises(SystemExit) as left:
        script.main()
    assert left.value.code == 2 and words in capsys.readouterr().err


def test_a_toy_run_of_the_throughput_script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["script", "--toy", "--device", "cpu", "--store", str(tmp_path)])
    device_throughput.main()
    store = Store(tmp_path)
    parity = store.load("kernel_parity")
    assert {record.parameters["kernel"] for record in parity} == {"eager", "tiled"}
    assert all(error < 0.02 for record in parity for error in record.metrics.values())
    cells = {(r.parameters["kernel"], r.parameters["form"]) for r in store.load("rank_compute", status="ok")}
    assert cells == {(kernel, form) for kernel in ("eager", "tiled") for form in throughput.FORMS}


# --- what the chapter says


def test_the_chapter_on_emulated_links():
    """After new records: put into the chapter what this says is missing, and read the sentences around it again."""
    rows = {(row["sp"], row["form"], row["mbit_s"]): row for row in emulated.predicted(emulated.published())}
    off = {key: 100 * abs(row["predicted"] / row["emulated"] - 1) for key, row in rows.items()}
    laga, absorbed = (
        {rate: rows[2, form, rate]["emulated"] for rate in emulated.RATES} for form in ("laga", "absorbed")
    )
    wire = emulated.wire_bytes(emulated.config(), "laga", 512, 2)
    states(
        "throughput",
        f"wins by {laga[100]:.2f} at 100 Mbit/s and by {laga[500]:.2f} at 500",
        f"from 2 Gbit/s on ({laga[2000]:.2f}) a link is hardly felt",
        f"within {math.ceil(max(off[2, 'laga', rate] for rate in emulated.RATES))} % at every speed",
        f"on slow links, by {absorbed[100]:.2f} on the slowest",
        f"where nothing limits them ({absorbed[None]:.2f})",
        f"Laga wins by {rows[4, 'laga', 100]['emulated']:.2f} at 100 Mbit/s",
        f"All of these predictions are within {math.ceil(max(off.values()))} %",
        f"send {100 * (emulated.gloo_bytes(wire) / sum(wire.values()) - 1):.0f} % more at two ranks",
        f"Laga gains up to {laga[100]:.1f}, and little",
    )
    calls = {form: sum(len(transfers(form, side)) for side in ("forward", "backward")) for form in emulated.FORMS}
    assert calls == {"explicit": 8, "absorbed": 6, "laga": 6}


def test_the_chapter_on_reported_tables():
    saved = [row for row in throughput.savings() if row["source"] == "table 4" and row["kernel"] == "fused"]
    fit, across = throughput.link_fit("table 4", "fused"), throughput.across_nodes_fit()
    at = {row["seq"]: row for row in across["predicted"]}
    states(
        "throughput",
        "saves {:.1f}, {:.1f} and {:.1f} ms".format(*(row["saved_ms"] for row in saved)),
        "{:.0f}, {:.0f} and {:.0f} MB on the wire".format(*(row["saved_mb"] for row in saved)),
        f"One rate, {fit['gb_s']:.1f} GB/s",
        f"predicts {at[16384]['bytes_only']:.2f} of the reported {at[16384]['reported']:.2f}",
        f"At 4096 it predicts {at[4096]['bytes_only']:.2f}, and {at[4096]['reported']:.2f} is reported",
        f"gives {across['fixed_ms']:.0f} ms a step at {across['gb_s']:.1f} GB/s",
        "then {:.2f}, {:.2f} and {:.2f} where".format(*(row["fit"] for row in across["predicted"])),
        "where {:.2f}, {:.2f} and {:.2f} are reported".format(*(row["reported"] for row in across["predicted"])),
    )
    slower = [row for row in throughput.savings() if row["saved_ms"] < 0]
    cells = {(row["source"], row["sp"], row["seq"]): -row["saved_ms"] for row in slower}
    assert list(cells) == [("table 3", 4, 4096), ("table 3", 8, 4096), ("table 3", 8, 8192), ("table 5", 16, 4096)]
    first, second, third, last = cells.values()
    states(
        "throughput",
        f"by {first:.1f} ms (sp 4, 4096 tokens), and by {second:.0f} and {third:.0f} ms",
        f"eager row of 4096 tokens, by {last:.0f} ms",
    )
