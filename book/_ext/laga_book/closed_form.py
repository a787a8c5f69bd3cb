"""Closed forms in the book, taken from the code that computes with them.

In a chapter:

    ```{closed-form} sent laga accounting=paper
    :numbers: deepseek-v3 seq=16384 sp=8
    ```

prints `laga_core.costs.formulas.sent("laga", accounting="paper")`; with `:numbers:` a line follows in which the symbols
have these values. In a sentence, `` {closed-form}`crossover` `` prints the right-hand side alone.
"""

from __future__ import annotations

import inspect
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective, SphinxRole

from laga_core.costs import formulas
from laga_core.costs.formulas import Formula


def names() -> list[str]:
    """The formulas that there are."""
    functions = inspect.getmembers(formulas, inspect.isfunction)
    return [name for name, each in functions if inspect.signature(each).return_annotation == "Formula"]


def values(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Arguments as they are written: ``laga context=2`` is ``("laga", context=2)``."""
    named = dict(word.split("=", 1) for word in words if "=" in word)
    known = {"true": True, "false": False}
    return [word for word in words if "=" not in word], {
        name: int(text) if text.isdigit() else known.get(text, text) for name, text in named.items()
    }


def formula(text: str) -> Formula:
    """The formula that ``text`` names; ``ValueError`` if there is none, or not with these arguments."""
    name, *words = text.split()
    if name not in names():
        raise ValueError(f"no closed form {name!r}; there are: {', '.join(names())}")
    given, options = values(words)
    try:
        return getattr(formulas, name)(*given, **options)
    except TypeError as error:
        raise ValueError(f"closed form {text!r}: {error}") from None


class ClosedFormDirective(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True
    option_spec = {"numbers": directives.unchanged_required, "name": directives.unchanged}

    def run(self) -> list[nodes.Node]:
        try:
            given, options = values(self.options.get("numbers", "").split())
            numbers = formulas.numbers(given[0], **options) if given else None
            latex = formula(self.arguments[0]).equation(numbers)
        except (TypeError, ValueError) as error:
            raise self.error(str(error)) from error
        self.env.note_dependency(formulas.__file__)
        node = nodes.math_block(latex, latex, nowrap=False, number=None, label=None, docname=self.env.docname)
        self.set_source_info(node)
        self.add_name(node)
        return [node]


class ClosedFormRole(SphinxRole):
    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        try:
            latex = formula(self.text).right
        except ValueError as error:
            message = self.inliner.reporter.error(str(error), line=self.lineno)
            return [self.inliner.problematic(self.rawtext, self.rawtext, message)], [message]
        self.env.note_dependency(formulas.__file__)
        return [nodes.math(latex, latex)], []


def setup(app: Sphinx) -> None:
    app.add_directive("closed-form", ClosedFormDirective)
    app.add_role("closed-form", ClosedFormRole())
