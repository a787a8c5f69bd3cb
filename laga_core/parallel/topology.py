"""One sequence-parallel group split in two dimensions: sp = U * R ranks.

Heads are split over the U ranks of a *within* group, which are neighbours in rank order and so share a node; the R
ranks that hold the same heads, one of each within group, form an *across* group. Rank number r * U + u is rank u of
within group r and rank r of across group u.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from .collectives import degree


class Topology(NamedTuple):
    """The two groups of this rank; ``None`` where a dimension has one rank."""

    within: ProcessGroup | None
    across: ProcessGroup | None


def split_degree(sp: int, context: int) -> int:
    """U = sp / R, the ranks that share the heads; ``ValueError`` unless ``context`` = R divides ``sp``."""
    if sp % context:
        divisors = [d for d in range(1, sp + 1) if sp % d == 0]
        raise ValueError(f"context={context} does not divide sp={sp}; choose context among {divisors}")
    return sp // context


def topology(group: ProcessGroup | None, context: int) -> Topology:
    """The within and across group of this rank for R = ``context``; every rank of ``group`` must call it together.

    Process groups are made once for each ``(group, context)`` and kept; R = 1 and R = sp need none.
    Raises ``ValueError`` unless ``context`` divides the degree.
    """
    ranks_within = split_degree(degree(group), context)
    if group is None or context == 1:
        return Topology(group, None)
    if ranks_within == 1:
        return Topology(None, group)
    known = _topologies.setdefault(group, {})
    if context not in known:
        known[context] = _create(group, ranks_within)
    return known[context]


_topologies: WeakKeyDictionary[ProcessGroup, dict[int, Topology]] = WeakKeyDictionary()


def _create(group: ProcessGroup, ranks_within: int) -> Topology:
    ranks = dist.get_process_group_ranks(group)
    me = dist.get_rank(group)
    first = me - me % ranks_within
    within, across = ranks[first : first + ranks_within], ranks[me % ranks_within :: ranks_within]
    # Only members meet, so a group that is part of a larger job can be split without the others.
    return Topology(*(dist.new_group(members, use_local_synchronization=True) for members in (within, across)))
