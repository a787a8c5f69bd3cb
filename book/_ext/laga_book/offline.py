"""Pages make no request beyond their own host, and carry nothing that they do not use.

The theme's toolchain always loads sphinx-thebe, whose script comes from a CDN; the state of ipywidgets, which nothing
in a static page reads; and 1.5 MB of icons as a script, although every icon is in the icon font too. All three go.
A browser test opens every page, and fails on a request elsewhere and on a page that is too heavy.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

ICON_SCRIPT = re.compile(r'\s*<script src="[^"]*_static/scripts/fontawesome\.js[^"]*"></script>')
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"

# The theme settles light or dark only after the first paint: code would be drawn without its style, and then move.
CHOOSE_THEME = """
if (!["light", "dark"].includes(document.documentElement.dataset.theme))
  document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
{
  let theme; // paper is white
  addEventListener("beforeprint", () => {
    theme = document.documentElement.dataset.theme;
    document.documentElement.dataset.theme = "light";
  });
  addEventListener("afterprint", () => { document.documentElement.dataset.theme = theme; });
}
"""


def disconnect_thebe(app: Sphinx, config: Any) -> None:
    for listeners in app.events.listeners.values():
        listeners[:] = [each for each in listeners if not each.handler.__module__.startswith("sphinx_thebe")]
    app.registry.css_files[:] = [(name, options) for name, options in app.registry.css_files if "thebe" not in name]


def drop_widget_state(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    scripts = context.get("script_files", [])
    context["script_files"] = [
        script for script in scripts if getattr(script, "attributes", {}).get("type") != WIDGET_STATE
    ]


def drop_icon_script(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    for page in Path(app.outdir).rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        lighter = ICON_SCRIPT.sub("", text)
        if lighter != text:
            page.write_text(lighter, encoding="utf-8")
    for script in (Path(app.outdir) / "_static" / "scripts").glob("fontawesome.js*"):
        script.unlink()


def setup(app: Sphinx) -> None:
    app.add_js_file(None, body=CHOOSE_THEME)
    app.connect("config-inited", disconnect_thebe)
    app.connect("html-page-context", drop_widget_state, priority=900)
    app.connect("build-finished", drop_icon_script)
