"""Sequence-parallel collectives, the byte ledger and the reduction of gradients."""

from .agreement import agree
from .collectives import degree, gather_sequence, heads_to_sequence, sequence_to_heads
from .gradients import all_reduce_gradients
from .ledger import Entry, Ledger, record_bytes

__all__ = [
    "Entry",
    "Ledger",
    "agree",
    "all_reduce_gradients",
    "degree",
    "gather_sequence",
    "heads_to_sequence",
    "record_bytes",
    "sequence_to_heads",
]
