"""Closed forms, written once in SymPy: evaluated here, typeset in the book, run in a widget."""

from .communication import ACCOUNTINGS, Communication, Transfer, communication, communication_expression, transfers
from .symbols import LATEX, check_sizes, substitutions, to_latex, to_vega

__all__ = [
    "ACCOUNTINGS",
    "LATEX",
    "Communication",
    "Transfer",
    "check_sizes",
    "communication",
    "communication_expression",
    "substitutions",
    "to_latex",
    "to_vega",
    "transfers",
]
