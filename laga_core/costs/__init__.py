"""Closed forms, written once in SymPy: evaluated here, typeset in the book, run in a widget."""

from .choice import Cost, FormChoice, Machine, choose, cost, members
from .communication import ACCOUNTINGS, Communication, Transfer, communication, communication_expression, transfers
from .symbols import LATEX, check_sizes, substitutions, to_latex, to_vega

__all__ = [
    "ACCOUNTINGS",
    "LATEX",
    "Communication",
    "Cost",
    "FormChoice",
    "Machine",
    "Transfer",
    "check_sizes",
    "choose",
    "communication",
    "communication_expression",
    "cost",
    "members",
    "substitutions",
    "to_latex",
    "to_vega",
    "transfers",
]
