"""Formulas that the book prints: each says what the code computes, and a page that names another does not build."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
import sympy
from docutils import nodes
from laga_book import closed_form
from laga_book.mathml import to_mathml
from sphinx.testing.util import SphinxTestApp

from laga_core import MLAConfig, communication, simulate_memory
from laga_core.costs import ACCOUNTINGS, LATEX, formulas, to_latex
from laga_core.costs.symbols import CONTEXT, HEADS, ROPE, SEQ, SP

ROOT = Path(__file__).resolve().parent.parent
PAPER = MLAConfig.preset("paper-v3")
PRINTED = [
    "sent explicit",
    "sent laga",
    "sent laga accounting=paper",
    "sent absorbed",
    "sent explicit key_rope=headless",
    "sent explicit key_rope=headless packed=true",
    "sent laga context=2 query=latent",
    "token_elements laga",
    "crossover",
    "score_matrix",
    "absorbed_query",
    "absorbed_query score=joint",
    "gathered_latent",
]


def printed(formula: formulas.Formula, values: formulas.Values) -> sympy.Expr:
    """The number that the printed terms come to."""
    return sum(sympy.prod(factors).subs(values) for factors in formula.terms)


@pytest.mark.parametrize("accounting", ACCOUNTINGS)
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("explicit", {}),
        ("explicit", {"key_rope": "headless", "packed": True}),
        ("absorbed", {}),
        ("laga", {}),
        ("laga", {"query": "latent", "context": 2}),
    ],
)
def test_bytes_sent(form: str, options: dict[str, object], accounting: str) -> None:
    config = MLAConfig.preset("deepseek-v3")
    values = {**formulas.numbers("deepseek-v3", 4096, 8, batch=3), CONTEXT: options.get("context", 1)}
    total = communication(config, form, 4096, 8, accounting, batch=3, **options).total_bytes
    assert printed(formulas.sent(form, accounting, **options), values) == total
    if accounting == "wire":
        assert printed(formulas.token_elements(form, **options), values) * 3 * 4096 / 8 * 2 == total


def test_memory() -> None:
    values = formulas.numbers("paper-v3", 16384, 8)
    saved = simulate_memory(PAPER, "absorbed", "eager", 16384, 8, score="split").saved_breakdown
    assert printed(formulas.score_matrix(), values) == saved["probabilities"]
    assert printed(formulas.absorbed_query(), values) == saved["q_absorbed"] == 16 * 16384 * 512 * 2
    assert printed(formulas.absorbed_query("joint"), values) == 16 * 16384 * (512 + 64) * 2
    assert printed(formulas.gathered_latent(), values) == 16384 * (512 + 64) * 2


def test_numbers_put_in() -> None:
    values = formulas.numbers("paper-v3", 16384, 8)
    assert formulas.crossover().equation(values).endswith(r"= 71.11 \end{aligned}")
    assert formulas.token_elements("laga").equation(values).endswith(r"= 39\,872 \end{aligned}")
    assert r"\frac{128}{8} \times 16\,384^{2} \times 2 = 8.59\ \text{GB}" in formulas.score_matrix().equation(values)


def test_an_arrangement_that_is_another_expression_is_refused() -> None:
    with pytest.raises(ValueError, match="is not the expression"):
        formulas.Formula("x", HEADS * ROPE / SP, [(HEADS, ROPE), (SEQ,)])


def test_every_symbol_has_a_name_of_its_own() -> None:
    assert len(set(LATEX.values())) == len(LATEX)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no_such laga", "there are: .*sent"),
        ("sent no_such", "no_such"),
        ("sent laga speed=fast", "speed"),
        ("sent", "missing"),
        ("sent laga accounting=no_such", "no_such"),
    ],
)
def test_what_there_is_not(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        closed_form.formula(text)


def test_the_accountings_of_the_notebook() -> None:
    """Its table is typed; the fractions in it are the code's."""
    cells = nbformat.read(ROOT / "notebooks" / "01_communication.ipynb", as_version=4).cells
    table = next(cell.source for cell in cells if "| as the paper counts |" in cell.source)
    rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")}
    for row, accounting in (("on the wire", "wire"), ("as the paper counts", "paper")):
        for cell, collective in zip(rows[row], ("all_to_all", "all_gather"), strict=True):
            share = sympy.factor(ACCOUNTINGS[accounting][collective])
            assert cell.strip() == "shard" if share == 1 else to_latex(share) in cell, (row, collective)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[nodes.document, str]:
    """A page with every printed formula, and with two that there are not; and the warnings it was read with."""
    source = tmp_path_factory.mktemp("book")
    (source / "conf.py").write_text('extensions = ["myst_parser", "laga_book.closed_form"]\n', encoding="utf-8")
    blocks = [f"```{{closed-form}} {text}\n:numbers: paper-v3 seq=16384 sp=8\n```" for text in PRINTED]
    inline = [f"so {{closed-form}}`{text}`." for text in PRINTED]
    wrong = ["```{closed-form} gone laga\n```", "and {closed-form}`lost`."]
    (source / "index.md").write_text("\n\n".join(["# Formulas", *blocks, *inline, *wrong]), encoding="utf-8")
    app = SphinxTestApp("dummy", srcdir=source, freshenv=True)
    app.build()
    read, warnings = app.env.get_doctree("index"), app.warning.getvalue()
    app.cleanup()
    return read, warnings


def test_formulas_become_mathml(page: tuple[nodes.document, str]) -> None:
    formulas = [*page[0].findall(nodes.math_block), *page[0].findall(nodes.math)]
    assert len(formulas) == 2 * len(PRINTED)
    for node in formulas:
        assert to_mathml(node.astext(), node, "inline").startswith("<math "), node.astext()


def test_an_unknown_formula_fails_the_build(page: tuple[nodes.document, str]) -> None:
    _, warnings = page
    assert "no closed form 'gone'; there are: absorbed_query" in warnings
    assert "no closed form 'lost'" in warnings
    assert warnings.count("ERROR") + warnings.count("WARNING") == 2, warnings
