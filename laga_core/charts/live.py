"""ipywidgets explorers for a running notebook: they call the code itself, where the book's charts use closed forms."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from ..config import PRESETS, MLAConfig
from ..costs import Machine, communication, cost, longest_sequence
from ..costs.choice import code
from ..memory import simulate_memory
from .communication import COUNTS, PER_NODE, VARIANTS
from .memory import ROLE_COLOURS
from .memory_explorer import KERNELS, OPTIONS, group
from .planner import START, planned, preset
from .tables import table
from .theme import FORM_LABELS

_LABEL = {"description_width": "11em"}


def memory_rows(
    model: str, seq: int, sp: int, batch: int, layers: int, kernel: str, device: float = 80, **chosen: str
) -> list[dict[str, Any]]:
    """Each form with its ``chosen`` option: peak and saved bytes by role, simulated, and the longest sequence that fits
    into ``device`` GB, derived."""
    config, rows = MLAConfig.preset(model), []
    for form, found in OPTIONS.items():
        options = found[chosen[form]][1] if form in chosen else {}
        size: dict[str, Any] = {"form": form, "kernel": kernel, "sp": sp, "batch": batch, "layers": layers, **options}
        run = simulate_memory(config, seq=seq, **size)
        rows.append(
            {
                "form": form,
                "peak_mb": run.peak_bytes / 1e6,
                "saved_mb": run.saved_bytes / 1e6,
                "longest": longest_sequence(config, memory_bytes=device * 1e9, **size),
                "breakdown": run.breakdown,
            }
        )
    return rows


def memory_explorer() -> widgets.VBox:
    """The book's explorer, live: the simulator itself, for any preset, on up to 64 ranks."""
    controls = (
        _sizes("deepseek-v3", most_ranks=6)
        | {
            "batch": widgets.IntSlider(value=1, min=1, max=16, description="batch"),
            "layers": widgets.IntSlider(value=1, min=1, max=8, description="layers"),
            "kernel": widgets.ToggleButtons(options=[(v, k) for k, v in KERNELS.items()], description="kernel"),
            "device": widgets.IntSlider(value=80, min=16, max=192, step=8, description="device, GB"),
        }
        | {
            form: widgets.Dropdown(options=[(words, name) for name, (words, _) in found.items()], description=form)
            for form, found in OPTIONS.items()
        }
    )
    return _explorer(controls, _memory)


def _memory(device: float, **settings: Any) -> str:
    """Stacked bars by role with the device's memory as a line, and the numbers."""
    rows = memory_rows(device=device, **settings)
    width = max(device * 1e3, *(row["peak_mb"] for row in rows))
    bars, roles = "", dict[str, None]()
    for row in rows:
        pieces: dict[str, float] = {}
        for role, size in row.pop("breakdown").items():
            pieces[group(role)] = pieces.get(group(role), 0) + size / 1e6
        roles |= dict.fromkeys(pieces)
        spans = "".join(_span(role, f"{100 * mb / width:.2f}%", f"{role}: {mb:,.0f} MB") for role, mb in pieces.items())
        bars += f'<div>{FORM_LABELS[row["form"]]}</div><div style="display: flex; height: 1.4em">{spans}</div>'
    line = f"position: absolute; top: 0; bottom: 0; left: {1e5 * device / width:.2f}%; border-left: 2px dashed"
    legend = " ".join(f"{_span(role, '0.9em', role)} {role}" for role in roles)
    shown = table(rows, {"longest": f"longest in {device:g} GB"}, peak_mb="{:,.0f}", saved_mb="{:,.0f}")
    return f'<div style="position: relative">{bars}<div style="{line}"></div></div><p>{legend}</p>{shown._repr_html_()}'


def _span(role: str, width: str, title: str) -> str:
    colour = ROLE_COLOURS[role]
    style = f"display: inline-block; width: {width}; height: 0.9em; min-height: 100%; background: {colour}"
    return f'<span style="{style}" title="{html.escape(title)}"></span>'


def communication_rows(model: str, seq: int, sp: int, batch: int, context: int) -> list[dict[str, Any]]:
    """Bytes of each form and of the query latent, in each way of counting."""
    rows = []
    for name, (form, given) in VARIANTS.items():
        options = {**given, "context": min(context, sp)} if "context" in given else given
        wire, paper = (
            communication(MLAConfig.preset(model), form, seq, sp, a, batch, ranks_per_node=PER_NODE, **options)
            for a in ("wire", "paper")
        )
        megabytes = {"wire": wire.total_bytes, "nodes": wire.inter_node_bytes or 0, "paper": paper.total_bytes}
        rows.append({"form": name} | {count: size / 1e6 for count, size in megabytes.items()})
    return rows


def communication_explorer() -> widgets.VBox:
    """Controls for model, sequence, ranks, batch and groups; a table of what :func:`laga_core.communication` says."""
    controls = _sizes("deepseek-v3") | {
        "batch": widgets.IntSlider(value=1, min=1, max=16, description="batch"),
        "context": _powers("context R", 1, 0, 4),
    }
    names = {count: f"MB {words}" for count, words in COUNTS.items()}
    formats = dict.fromkeys(names, "{:,.1f}")
    return _explorer(controls, lambda **values: table(communication_rows(**values), names, **formats)._repr_html_())


def throughput_rows(model: str, seq: int, sp: int, link: float, latency: float, rate: float) -> list[dict[str, Any]]:
    """Time of a layer's step by :func:`laga_core.costs.cost`, at a link's GB/s and µs and a device's TFLOP/s."""
    config, machine = MLAConfig.preset(model), Machine(rate * 1e12, link * 1e9, latency=latency / 1e6)
    rows = []
    for form in FORM_LABELS:
        found = cost(config, form, seq, sp, machine)
        parts = {"computing_ms": found.compute, "sending_ms": found.transfer, "latency_ms": found.latency}
        parts |= {"step_ms": found.seconds}
        rows.append({"form": form} | {part: 1e3 * seconds for part, seconds in parts.items()})
    return rows


def throughput_explorer() -> widgets.VBox:
    """Controls for model, sequence, ranks, link and device; a table of the cost model's times."""
    controls = _sizes("paper-v3") | {
        "link": widgets.BoundedFloatText(value=10, min=1e-3, max=1e4, description="link, GB/s"),
        "latency": widgets.BoundedFloatText(value=30, min=1e-3, max=1e6, description="latency, µs"),
        "rate": widgets.BoundedFloatText(value=150, min=1e-3, max=1e5, description="device, TFLOP/s"),
    }
    formats: dict[str, Any] = dict.fromkeys(("computing_ms", "sending_ms", "latency_ms", "step_ms"), "{:,.2f}")
    return _explorer(controls, lambda **values: table(throughput_rows(**values), **formats)._repr_html_())


def planner() -> widgets.VBox:
    """The planner of the book, live: :func:`laga_core.costs.choose` for the controls' values, any preset and degree."""

    def count(key: str, description: str) -> widgets.Widget:
        return widgets.BoundedIntText(value=START[key], min=1, max=2**24, description=description)

    def rate(key: str, description: str) -> widgets.Widget:
        return widgets.BoundedFloatText(value=START[key], min=1e-3, max=1e5, description=description)

    controls = {
        "model": _models("deepseek-v3"),
        "seq": count("seq", "tokens"),
        "batch": count("batch", "batch"),
        "layers": count("layers", "layers on a rank"),
        "sp": count("sp", "ranks"),
        "node": count("node", "ranks of a node"),
        "near": rate("near", "in a node, GB/s"),
        "far": rate("far", "between, GB/s"),
        "tflops": rate("tflops", "projections, TFLOP/s"),
        "attention": rate("attention", "attention, TFLOP/s"),
        "memory": rate("memory", "memory, GB"),
    }
    return _explorer(controls, _plan)


def _plan(model: str, **settings: Any) -> str:
    found = planned(MLAConfig.preset(model), **settings)
    rows = [
        {
            "member": str(each),
            "layer_ms": 1e3 * each.seconds,
            "sent_mb": each.sent_bytes / 1e6,
            "between_nodes_mb": each.inter_node_bytes / 1e6,
            "kept_gb": settings["layers"] * each.saved_bytes / 1e9,
            "fits": "yes" if each in found.fitting else "no",
        }
        for each in found.contenders
    ]
    formats: dict[str, Any] = {
        "layer_ms": "{:,.2f}",
        "sent_mb": "{:,.1f}",
        "between_nodes_mb": "{:,.1f}",
        "kept_gb": "{:,.2f}",
    }
    written = code(found.form, found.options, preset(model))
    told = "".join(f"<{tag}>{html.escape(text)}</{tag}>" for tag, text in (("p", found.reason), ("pre", written)))
    return told + table(rows, **formats)._repr_html_()


def _models(value: str) -> widgets.Dropdown:
    return widgets.Dropdown(options=sorted(PRESETS), value=value, description="model")


def _sizes(model: str, most_ranks: int = 7) -> dict[str, widgets.Widget]:
    """What explorers start with: a model, the tokens of a sequence, and up to 2 to the power ``most_ranks`` ranks."""
    return {
        "model": _models(model),
        "seq": _powers("sequence", 16384, 10, 20),
        "sp": _powers("ranks", 8, 0, most_ranks),
    }


def _powers(description: str, value: int, least: int, most: int) -> widgets.SelectionSlider:
    """A slider over the powers of two."""
    options = [2**power for power in range(least, most + 1)]
    return widgets.SelectionSlider(options=options, value=value, description=description)


def _explorer(controls: dict[str, Any], show: Callable[..., str]) -> widgets.VBox:
    """The controls above the HTML that ``show`` makes of their values; what cannot be is said in words."""
    shown = widgets.HTML()

    def update(_: object = None) -> None:
        try:
            shown.value = show(**{name: control.value for name, control in controls.items()})
        except ValueError as error:
            shown.value = f"<p>{html.escape(str(error))}</p>"

    for control in controls.values():
        control.style, control.continuous_update = _LABEL, False
        control.observe(update, names="value")
    update()
    return widgets.VBox([*controls.values(), shown])
