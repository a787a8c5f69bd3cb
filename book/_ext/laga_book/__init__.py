"""The book's own Sphinx extension: charts that compute in the page, formulas from the code, pages that stay offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from . import charts, closed_form, mathml, numbers, offline

STATIC = Path(__file__).parent / "static"


def add_static(app: Sphinx, config: Any) -> None:
    config.html_static_path.append(str(STATIC))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", add_static)
    app.add_css_file("laga-book.css")
    charts.setup(app)
    closed_form.setup(app)
    mathml.setup(app)
    numbers.setup(app)
    offline.setup(app)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
