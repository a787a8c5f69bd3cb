"""Charts in the book: Vega-Lite, drawn and computed in the page by scripts the book itself serves.

In a chapter:

    ```{chart} communication.explorer
    :alt: What the chart shows, for those who cannot see it.
    :caption: One line under the chart.
    ```

calls `laga_core.charts.communication.explorer()` while the book is built. In a notebook, a cell that ends in an
Altair chart is enough; its `description` is the alternative text.

Each chart comes with a still picture of its first state, which holds its place until the script has drawn the live one
(and stays where scripts are off, or on paper), its data as a table and as CSV, and its settings in the page's address.
A chart with an `answer` in its usermeta has it told above: the `why` and the `code` of the row that is `recommended`.
"""

from __future__ import annotations

import copy
import html
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vl_convert
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.writers.html5 import HTML5Translator

from laga_core.charts.theme import CONFIG

logger = logging.getLogger(__name__)

Spec = dict[str, Any]

FONT_SIZES: Spec = {
    "axis": {"labelFontSize": 12, "titleFontSize": 12},
    "legend": {"labelFontSize": 12, "titleFontSize": 12, "symbolStrokeWidth": 2},
    "header": {"labelFontSize": 12, "titleFontSize": 12},
    "title": {"fontSize": 14, "subtitleFontSize": 12},
    "text": {"fontSize": 12},
}
PHONE_WIDTH = 280  # plot width at which the place for a narrow chart is reckoned
STILL_LIMIT = 150_000  # bytes: a still picture larger than this costs more than it gives


class chart(nodes.General, nodes.Element):
    """A chart; carries its Vega-Lite spec, its name on the page, and the height to keep free."""


def merged(below: Spec, above: Spec) -> Spec:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def prepared(spec: Spec, alt: str) -> Spec:
    """The spec in the book's dress; whatever the chart sets itself stays."""
    spec = copy.deepcopy(spec)
    spec.pop("$schema", None)
    spec["config"] = merged(merged(CONFIG, FONT_SIZES), spec.get("config", {}))
    spec["description"] = alt
    if spec.get("width") != "container":
        spec.setdefault("autosize", {"type": "pad", "resize": True})
    return spec


def narrowed(spec: Spec) -> Spec:
    """What laga-charts.js makes of the spec on a phone: columns become rows, widths shrink."""
    spec = one_column_legends(spec)
    if "hconcat" in spec:
        spec["vconcat"] = spec.pop("hconcat")
    for part in spec.get("vconcat", [spec.get("spec", spec)]):  # a facet's width is its inner spec's
        if isinstance(part.get("width"), int | float):
            part["width"] = min(part["width"], PHONE_WIDTH)
    return spec


def one_column_legends(part: Any) -> Any:
    """A copy in which a legend of several columns has one."""
    if isinstance(part, list):
        return [one_column_legends(each) for each in part]
    if not isinstance(part, dict):
        return part
    part = {key: one_column_legends(value) for key, value in part.items()}
    if isinstance(part.get("legend"), dict) and part["legend"].get("columns"):
        part["legend"]["columns"] = 1
    return part


def still_picture(spec: Spec) -> tuple[str, float, float]:
    """SVG of the first state, its width and its height in pixels."""
    svg = vl_convert.vegalite_to_svg(json.dumps(spec))
    found = re.search(r'<svg[^>]* viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if not found:
        raise ValueError("the chart could not be drawn: the SVG has no size")
    return svg, float(found[1]), float(found[2])


def inputs(spec: Spec) -> Iterator[Spec]:
    """The bound params: what the reader can set."""
    for param in spec.get("params", []):
        bind = param.get("bind")
        if isinstance(bind, dict) and "input" in bind:
            yield param


def place(param: Spec) -> str:
    """The classes of an empty row that holds the place of an input until the chart is live."""
    bind = param["bind"]
    if param["name"].startswith("own_"):
        return "laga-own"  # shown where the menu of models says "own"
    if bind["input"] != "radio":
        return ""
    letters = len(bind.get("name", "")) + sum(len(str(label)) + 5 for label in bind.get("labels") or bind["options"])
    return "laga-wide laga-tall" if letters > 40 else "laga-wide"  # tall: two lines on a phone


def answer(spec: Spec) -> str:
    """Where a chart recommends something: why in words, and code to copy; laga-charts.js keeps them up to date."""
    told = spec.get("usermeta", {}).get("answer")
    if not told:
        return ""
    why, code = (html.escape(told[name]) for name in ("why", "code"))
    block = f'<div class="highlight-python notranslate"><div class="highlight"><pre>{code}</pre></div></div>'
    return f'<div class="laga-answer" aria-live="polite"><p>{why}</p>{block}</div>\n'


def visit_chart(self: HTML5Translator, node: chart) -> None:
    spec, name = node["spec"], node["name"]
    try:
        svg, width, height = still_picture(spec)
        narrow_height = still_picture(narrowed(spec))[2]
    except ValueError as error:
        logger.warning("chart %s: %s", name, error, location=node)
        raise nodes.SkipNode from error
    height, narrow_height = (max(node.get("height", 0), each) for each in (height, narrow_height))
    if len(svg) > STILL_LIMIT:
        svg = ""
    places = "".join(f'<div class="vega-bind {place(param)}"></div>' for param in inputs(spec))
    # "</" would end the script element early.
    source = json.dumps(spec, separators=(",", ":")).replace("</", "<\\/")
    alt = html.escape(spec["description"])
    self.body.append(
        f'<div class="laga-chart" id="{name}" data-width="{width:.0f}" '
        f'style="--wide:{height:.0f}px;--narrow:{narrow_height:.0f}px">\n'
        f'<div class="laga-controls">{places}</div>\n'
        f"{answer(spec)}"
        f'<div class="laga-plot" tabindex="0" role="img" aria-label="{alt}">{svg}</div>\n'
        f'<details class="laga-data"><summary>Data</summary><div></div></details>\n'
        f'<script type="application/json">{source}</script>\n'
        "</div>\n"
    )
    raise nodes.SkipNode


def skip_chart(self: Any, node: chart) -> None:
    raise nodes.SkipNode


def unique_name(env: Any, docname: str, wanted: str) -> str:
    """A name no other chart of this page has: the address of a setting starts with it."""
    taken = env.temp_data.setdefault(f"charts {docname}", set())
    name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")
    number = 2
    while name in taken:
        name, number = f"{wanted}-{number}", number + 1
    taken.add(name)
    return name


class ChartDirective(SphinxDirective):
    required_arguments = 1
    has_content = True
    option_spec = {
        "alt": directives.unchanged_required,
        "caption": directives.unchanged_required,
        "height": directives.nonnegative_int,
        "name": directives.unchanged,
    }

    def run(self) -> list[nodes.Node]:
        if not self.options.get("alt"):
            raise self.error("a chart needs :alt: (what it shows, for those who cannot see it)")
        module_name, _, function_name = self.arguments[0].rpartition(".")
        spec = self.call(f"laga_core.charts.{module_name}", function_name)
        node = chart(
            spec=prepared(spec, self.options["alt"]),
            name=unique_name(self.env, self.env.docname, function_name.replace("_", "-")),
            height=self.options.get("height", 0),
        )
        figure = nodes.figure("", node)
        self.set_source_info(figure)
        caption = self.options.get("caption", " ".join(self.content))
        if caption:
            parsed, messages = self.state.inline_text(caption, self.lineno)
            figure += nodes.caption(caption, "", *parsed)
            figure += messages
        self.add_name(figure)
        return [figure]

    def call(self, module_name: str, function_name: str) -> Spec:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise self.error(f"no chart {self.arguments[0]!r}: {error}") from error
        function = getattr(module, function_name, None)
        if not callable(function):
            functions = inspect.getmembers(module, inspect.isfunction)
            found = [name for name, each in functions if name[0] != "_" and each.__module__ == module_name]
            raise self.error(f"no function {function_name!r} in {module_name}; there are: {', '.join(found)}")
        self.env.note_dependency(str(module.__file__))
        return function().to_dict()


class NotebookCharts(SphinxPostTransform):
    """Turns what Altair's default renderer left in a notebook into a chart of the book."""

    default_priority = 900  # after myst-nb has chosen among an output's formats
    formats = ("html",)

    def run(self, **kwargs: Any) -> None:
        number = 0
        for raw in list(self.document.findall(nodes.raw)):
            spec = altair_spec(raw.astext()) if raw.get("format") == "html" else None
            if spec is None:
                continue
            number += 1
            alt = spec.get("description", "")
            if not alt:
                logger.warning(
                    "chart %d of this notebook has no alternative text: give it .properties(description=...)",
                    number,
                    location=self.env.docname,
                )
            name = re.sub(r"[^a-z0-9]+", "-", spec.get("name", f"chart-{number}").lower())
            raw.replace_self(chart(spec=prepared(spec, alt), name=name, height=0))


def altair_spec(markup: str) -> Spec | None:
    """The Vega-Lite spec inside the HTML that Altair's default renderer writes, if this is such HTML."""
    if "vegaEmbed" not in markup:
        return None
    start = markup.find("})({")
    if start < 0:
        return None
    spec, _ = json.JSONDecoder().raw_decode(markup, start + len("})("))
    return spec


def write_bundle(app: Sphinx) -> None:
    """Vega, Vega-Lite and Vega-Embed in one file, from the package that draws the still pictures."""
    if app.builder.format != "html":
        return
    target = Path(app.outdir) / "_static" / "vega.js"
    target.parent.mkdir(parents=True, exist_ok=True)
    # An ES module would not load from a file: the bundle is wrapped as a plain script.
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    target.write_text(f"(() => {{{bundle}\n}})();", encoding="utf-8")


def load_scripts(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    if doctree is not None and next(iter(doctree.findall(chart)), None) is not None:
        app.add_js_file("vega.js", defer="defer")
        app.add_js_file("laga-charts.js", defer="defer")


def setup(app: Sphinx) -> None:
    app.add_node(
        chart,
        html=(visit_chart, None),
        latex=(skip_chart, None),
        text=(skip_chart, None),
        man=(skip_chart, None),
        texinfo=(skip_chart, None),
    )
    app.add_directive("chart", ChartDirective)
    app.add_post_transform(NotebookCharts)
    app.connect("builder-inited", write_bundle)
    app.connect("html-page-context", load_scripts)
