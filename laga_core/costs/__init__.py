"""Closed forms, written once in SymPy: evaluated here, typeset in the book, run in a widget."""

from .choice import Cost, FormChoice, Machine, choose, cost, members
from .communication import (
    ACCOUNTINGS,
    Communication,
    Transfer,
    communication,
    communication_expression,
    crossover_expression,
    transfers,
)
from .memory import (
    MemoryCost,
    longest_sequence,
    memory_cost,
    memory_moments,
    peak_expression,
    saved_expression,
    saved_roles,
)
from .symbols import LATEX, check_sizes, substitutions, to_latex, to_vega
from .tensors import FLOOR

__all__ = [
    "ACCOUNTINGS",
    "FLOOR",
    "LATEX",
    "Communication",
    "Cost",
    "FormChoice",
    "Machine",
    "MemoryCost",
    "Transfer",
    "check_sizes",
    "choose",
    "communication",
    "communication_expression",
    "cost",
    "crossover_expression",
    "longest_sequence",
    "members",
    "memory_cost",
    "memory_moments",
    "peak_expression",
    "saved_expression",
    "saved_roles",
    "substitutions",
    "to_latex",
    "to_vega",
    "transfers",
]
