"""The cost model against the committed emulated records and the reported tables; the charts."""

import pytest

from laga_core.charts import throughput as charts
from laga_core.experiments import emulated, throughput


def test_two_measurements_predict_the_ratio_at_every_speed():
    """At two ranks, one to a core. Four ranks on two cores are not steady enough to be held to it."""
    rows = [row for row in emulated.predicted(emulated.published()) if row["sp"] == 2]
    assert len(rows) == len(emulated.RATES)
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
    found = emulated.predicted(rows)
    assert found[0] == {"sp": 2, "mbit_s": 100, "emulated": 1.0, "predicted": (50 + 100) / (50 + 50 + 10)}
    assert found[1]["predicted"] == 1.0


def test_interface_counters_agree_with_the_closed_forms():
    rows = emulated.published()
    assert {row["form"] for row in rows} == set(emulated.FORMS)
    for row in rows:
        assert row["sent_bytes"] == pytest.approx(row["gloo_bytes"], rel=0.01), row


def test_one_link_rate_explains_the_fused_single_node_cells():
    fit = throughput.link_fit("table 4", "fused")
    assert all(abs(cell["residual_ms"]) < 1 for cell in fit["predicted"])


@pytest.mark.parametrize("chart", [charts.emulated, charts.reported, charts.explorer])
def test_charts_are_valid(chart):
    assert chart().to_dict()["usermeta"]["embedOptions"]["renderer"] == "svg"
