"""Math as MathML, made when the book is built: pages with equations need no script.

Browsers lay out MathML with an OpenType math font, and many systems have none. The STIX Two Math font that ships in
the ziamath package (SIL Open Font License) is cut down to the characters in use and served with the pages.
"""

from __future__ import annotations

import html
from importlib.resources import files
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)

# Latin, Greek, punctuation, arrows, operators and the mathematical alphabets.
CHARACTERS = [(0x20, 0x7E), (0xA0, 0xFF), (0x370, 0x3FF), (0x2000, 0x206F), (0x2070, 0x209F), (0x20D0, 0x20DC)]
CHARACTERS += [(0x2100, 0x214F), (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2308, 0x230B), (0x23DC, 0x23E1)]
CHARACTERS += [(0x25A0, 0x25FF), (0x27E6, 0x27EB), (0x2A00, 0x2A0F), (0x1D400, 0x1D7FF)]


def to_mathml(latex: str, node: nodes.Node, display: str) -> str:
    try:
        return convert(latex, display=display)
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


def write_font(app: Sphinx) -> None:
    """Write the subset of the math font beside the other static files."""
    if app.builder.format != "html":
        return
    from fontTools import subset

    options = subset.Options(flavor="woff2", layout_features=["*"], notdef_outline=True, drop_tables=["DSIG"])
    font = subset.load_font(str(files("ziamath") / "fonts" / "STIXTwoMath-Regular.ttf"), options)
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=[code for first, last in CHARACTERS for code in range(first, last + 1)])
    cutter.subset(font)
    target = Path(app.outdir) / "_static" / "stix-two-math.woff2"
    target.parent.mkdir(parents=True, exist_ok=True)
    subset.save_font(font, str(target), options)


def choose_renderer(app: Sphinx, config: Any) -> None:
    config.html_math_renderer = "mathml"


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    app.connect("config-inited", choose_renderer)
    app.connect("builder-inited", write_font)
