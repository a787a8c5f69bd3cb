"""Math as MathML, made when the book is built: pages with equations need no MathJax.

Browsers lay out MathML with an OpenType math font, and many systems have none. The STIX Two Math font that ships in
the ziamath package (SIL Open Font License) is cut down to the characters in use. Pages with math get it from a short
script: only a font handed over as bytes is there at the first paint. One that a style sheet names arrives later, and
moves the text.
"""

from __future__ import annotations

import base64
import html
import io
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from docutils import nodes
from fontTools import subset
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)

FONT_SCRIPT = "laga-math-font.js"

# What every page may need: Latin, the italics that a single letter turns into, Greek, common signs. Whatever else an
# equation uses is added when it is rendered.
RANGES = [(0x20, 0x7E), (0xB0, 0xB7), (0x391, 0x3F5), (0x2032, 0x2033), (0x1D434, 0x1D467), (0x1D6E2, 0x1D71B)]
CHARACTERS = {code for first, last in RANGES for code in range(first, last + 1)} | {
    0xD7,
    0xF7,
    0x210E,
    0x2061,
    0x2062,
    0x2212,
    0x2260,
    0x2264,
    0x2265,
    0x2248,
    0x221A,
    0x22C5,
}

# The converter knows one environment that aligns without numbering each line; Sphinx numbers the whole equation.
ALIGNED = re.compile(r"\\(begin|end)\{(?:aligned|align\*?)\}")


def to_mathml(latex: str, node: nodes.Node, display: str) -> str:
    try:
        rendered = convert(ALIGNED.sub(r"\\\1{split}", latex), display=display)
        CHARACTERS.update(map(ord, html.unescape(rendered)))
        return rendered
    except Exception as error:  # the converter raises a class of its own for each kind of mistake
        logger.warning("could not render the equation %r: %s", latex, error or type(error).__name__, location=node)
        return f"<code>{html.escape(latex)}</code>"


def visit_inline(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(to_mathml(node.astext(), node, "inline"))
    raise nodes.SkipNode


def visit_block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(self.starttag(node, "div", CLASS="math-block"))
    self.body.append(to_mathml(node.astext(), node, "block"))
    if node["number"]:
        self.body.append(f'<span class="eqno">({get_node_equation_number(self, node)})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    self.body.append("</div>\n")
    raise nodes.SkipNode


def font_subset() -> bytes:
    """The math font, cut down to the characters in use, as WOFF2."""
    options = subset.Options(flavor="woff2", layout_features=["*"], notdef_outline=True, drop_tables=["DSIG"])
    font = subset.load_font(str(files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"), options)
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=CHARACTERS)
    cutter.subset(font)
    result = io.BytesIO()
    subset.save_font(font, result, options)
    return result.getvalue()


def write_script(app: Sphinx, error: Exception | None) -> None:
    if error or app.builder.format != "html":
        return
    encoded = base64.b64encode(font_subset()).decode()
    script = (
        f'const bytes = Uint8Array.from(atob("{encoded}"), (each) => each.charCodeAt(0));\n'
        'document.fonts.add(new FontFace("STIX Two Math", bytes));\n'
    )
    (Path(app.outdir) / "_static" / FONT_SCRIPT).write_text(f"{{\n{script}}}\n", encoding="utf-8")


def load_script(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    if doctree is not None and (any(doctree.findall(nodes.math)) or any(doctree.findall(nodes.math_block))):
        app.add_js_file(FONT_SCRIPT)


def choose_renderer(app: Sphinx, config: Any) -> None:
    config.html_math_renderer = "mathml"


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("config-inited", choose_renderer)
    app.connect("html-page-context", load_script)
    app.connect("build-finished", write_script)
