"""A byte ledger: what each collective really sends, counted where it is called.

Two accountings stand side by side. *Wire* is what one rank puts on the network: everything it holds that another rank
needs, so an all-gather of degree sp sends its shard sp - 1 times. *Paper* is the accounting behind table 1 of the Laga
paper: an all-to-all counted twice, an all-gather once and without its factor sp - 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One call of one collective by this rank; ``direction`` is "forward" or "backward"."""

    collective: str
    direction: str
    wire_bytes: int
    paper_bytes: int


@dataclass
class Ledger:
    """The entries of one recording, in the order of the calls."""

    entries: list[Entry] = field(default_factory=list)

    def total(self, accounting: str = "wire", direction: str | None = None) -> int:
        """Bytes sent by this rank, of one direction or of both (``None``)."""
        return sum(self.by_collective(accounting, direction).values())

    def by_collective(self, accounting: str = "wire", direction: str | None = None) -> dict[str, int]:
        """Bytes sent by this rank under each collective's name."""
        if accounting not in ("wire", "paper"):
            raise ValueError(f"unknown accounting {accounting!r}; known: wire, paper")
        totals: dict[str, int] = {}
        for entry in self.entries:
            if direction in (None, entry.direction):
                count = entry.wire_bytes if accounting == "wire" else entry.paper_bytes
                totals[entry.collective] = totals.get(entry.collective, 0) + count
        return totals


# A plain list: on a device, backward runs in autograd's own threads, where a context variable would be empty.
_active: list[Ledger] = []


@contextmanager
def record_bytes() -> Iterator[Ledger]:
    """Record what this rank's collectives send while the block runs."""
    ledger = Ledger()
    _active.append(ledger)
    try:
        yield ledger
    finally:
        _active.remove(ledger)


def note(collective: str, direction: str, *, wire_bytes: int, paper_bytes: int) -> None:
    """Add an entry to every ledger now recording."""
    for ledger in _active:
        ledger.entries.append(Entry(collective, direction, wire_bytes, paper_bytes))
