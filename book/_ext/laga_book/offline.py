"""Pages make no request beyond their own host.

The theme's toolchain always loads sphinx-thebe, whose script comes from a CDN, and the state of ipywidgets, which
nothing in a static page reads. Both go. A browser test opens every page and fails on any other request.
"""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def disconnect_thebe(app: Sphinx, config: Any) -> None:
    for listeners in app.events.listeners.values():
        listeners[:] = [each for each in listeners if not each.handler.__module__.startswith("sphinx_thebe")]


def drop_widget_state(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    context["script_files"] = [
        script
        for script in context.get("script_files", [])
        if getattr(script, "attributes", {}).get("type") != "application/vnd.jupyter.widget-state+json"
    ]


def setup(app: Sphinx) -> None:
    app.connect("config-inited", disconnect_thebe)
    app.connect("html-page-context", drop_widget_state, priority=900)
