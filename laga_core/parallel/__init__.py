"""Sequence-parallel collectives, the byte ledger and the reduction of gradients."""

from .agreement import agree
from .collectives import PendingGather, begin_gather, degree, gather_sequence, heads_to_sequence, sequence_to_heads
from .gradients import all_reduce_gradients
from .ledger import Entry, Ledger, record_bytes
from .topology import Topology, split_degree, topology

__all__ = [
    "Entry",
    "Ledger",
    "PendingGather",
    "Topology",
    "agree",
    "all_reduce_gradients",
    "begin_gather",
    "degree",
    "gather_sequence",
    "heads_to_sequence",
    "record_bytes",
    "sequence_to_heads",
    "split_degree",
    "topology",
]
