"""ipywidgets explorers for a running notebook: they call the code itself, where the book's charts use closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from ..config import PRESETS, MLAConfig
from ..memory import simulate_memory
from .tables import table

_LABEL = {"description_width": "9em"}


def memory_rows(model: str, seq: int, sp: int, batch: int, kernel: str, score: str) -> list[dict[str, Any]]:
    """Peak, saved and largest role of each form, simulated: what :func:`memory_explorer` shows."""
    rows = []
    for form in ("explicit", "absorbed", "laga"):
        options: dict[str, Any] = {"score": score} if form == "absorbed" else {}
        run = simulate_memory(MLAConfig.preset(model), form=form, kernel=kernel, seq=seq, sp=sp, batch=batch, **options)
        largest = max(run.breakdown, key=run.breakdown.__getitem__)
        rows.append(
            {
                "form": form,
                "peak_mb": run.peak_bytes / 1e6,
                "saved_mb": run.saved_bytes / 1e6,
                "largest at the peak": f"{largest} ({run.breakdown[largest] / 1e6:,.0f} MB)",
            }
        )
    return rows


def memory_explorer() -> widgets.VBox:
    """Controls for model, sequence, ranks, batch, kernel and score; a table of what the simulator says."""
    controls = {
        "model": widgets.Dropdown(options=sorted(PRESETS), value="deepseek-v3", description="model"),
        "seq": widgets.SelectionSlider(
            options=[1024 * 2**power for power in range(11)], value=16384, description="sequence"
        ),
        "sp": widgets.SelectionSlider(options=[2**power for power in range(7)], value=8, description="ranks"),
        "batch": widgets.IntSlider(value=1, min=1, max=16, description="batch"),
        "kernel": widgets.ToggleButtons(options=["eager", "fused"], description="kernel"),
        "score": widgets.ToggleButtons(options=["joint", "split"], description="absorbed's score"),
    }
    return _explorer(controls, lambda **values: table(memory_rows(**values), peak_mb="{:,.0f}", saved_mb="{:,.0f}"))


def _explorer(controls: dict[str, Any], show: Callable[..., Any]) -> widgets.VBox:
    """The controls above what ``show`` makes of their values; what cannot be is said in words."""
    shown = widgets.HTML()

    def update(_: object = None) -> None:
        try:
            shown.value = show(**{name: control.value for name, control in controls.items()})._repr_html_()
        except ValueError as error:
            shown.value = f"<p>{error}</p>"

    for control in controls.values():
        control.style, control.continuous_update = _LABEL, False
        control.observe(update, names="value")
    update()
    return widgets.VBox([*controls.values(), shown])
