"""Numbers stay whole: no line of a page ends within 16 384, or between a number and its unit."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

_UNITS = r"(?:%|(?:[kMGT]?B|[MG]bit/s|TFLOP/s|ms|s)\b)"
_BREAK = re.compile(rf"(?<=\d) (?=\d{{3}}(?!\d)|{_UNITS})")
_AS_WRITTEN = (nodes.literal, nodes.literal_block, nodes.math, nodes.math_block, nodes.raw, nodes.comment)


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", lambda app, doctree, docname: keep_whole(doctree))


def keep_whole(doctree: nodes.document) -> None:
    """Make the spaces within numbers, and before their units, ones that do not break; code and formulas stay."""
    for text in list(doctree.findall(nodes.Text)):
        if _BREAK.search(text) and not isinstance(text.parent, _AS_WRITTEN):
            text.parent.replace(text, nodes.Text(_BREAK.sub("\N{NO-BREAK SPACE}", text)))
