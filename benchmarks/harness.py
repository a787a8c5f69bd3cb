"""What every benchmark shares: interleaved repeats, medians, peak memory, and a line of a table.

Absolute times on a shared machine mean little; a ratio of two things measured in turn, in one run, means something.
"""

from __future__ import annotations

import math
import operator
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

_WIDTH = 58  # of a name
_QUIET = 0.1  # of the machine may be used by others in an undisturbed round
_MUCH = 0.05  # of a step in the operating system is worth a word


class Took(NamedTuple):
    """Seconds of a step, and the CPU seconds of its process in the operating system, mostly for memory new to it.

    On a virtual machine that is cheap where its host has the memory ready, else dear: and a ratio goes with it.
    """

    seconds: float
    system: float


@dataclass(frozen=True)
class Comparison:
    """Ours against theirs; ``ratio`` is wanted ``at_least`` or ``at_most`` so much (``None``: just to know).

    ``bound``: what the ratio would be if ours took no longer than its matrix products (:mod:`.floor`), or sent nothing.
    """

    name: str
    ours: str
    theirs: str
    ratio: float
    at_least: float | None = None
    at_most: float | None = None
    bound: float | None = None
    profile: Callable[[], str] | None = None  # explains a ratio that falls short
    note: str = ""  # below the line

    @property
    def wanted(self) -> str:
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return "" if self.at_most is None else f"<= {self.at_most:.3g}"

    @property
    def met(self) -> bool:
        low, high = self.at_least, self.at_most
        return (low is None or self.ratio >= low) and (high is None or self.ratio <= high)

    def __str__(self) -> str:
        verdict = "" if not self.wanted else "met" if self.met else "FALLS SHORT"
        bound = "" if self.bound is None else f"{self.bound:.2f}"
        figures = f"{self.ours:>12}{self.theirs:>12}{self.ratio:>9.2f}{bound:>9}"
        note = self.note and f"\n  {self.note}"
        return f"{self.name:<{_WIDTH}}{figures}  {self.wanted:<10}{verdict}{note}"


HEADER = f"{'':<{_WIDTH}}{'ours':>12}{'theirs':>12}{'ratio':>9}{'bound':>9}  wanted"


def interleaved(
    candidates: dict[str, Callable[[], object]], repeats: int = 5, spare: int = 0, seconds: float = math.inf
) -> dict[str, Took]:
    """The median :class:`Took` of each candidate over ``repeats`` rounds, the order turned every round.

    Call each once before. Up to ``spare`` rounds more are run while other processes disturb them, and the least
    disturbed are kept. No round but the first begins after ``seconds``. Ranks of one job must all run as many: leave
    both as they are there.
    """
    rounds: list[tuple[float, dict[str, Took]]] = []  # share of the machine that others took, seconds
    names, end = list(candidates), time.perf_counter() + seconds
    while len(rounds) < repeats + spare and sum(others < _QUIET for others, _ in rounds) < repeats:
        if rounds and time.perf_counter() > end:
            break
        turn = len(rounds) % len(names)
        took = {}
        others_before, begin = _others_cpu_seconds(), time.perf_counter()
        for name in names[turn:] + names[:turn]:
            start, system = time.perf_counter(), _system_seconds()
            candidates[name]()
            took[name] = Took(time.perf_counter() - start, _system_seconds() - system)
        wall = time.perf_counter() - begin
        rounds.append(((_others_cpu_seconds() - others_before) / wall / (os.cpu_count() or 1), took))
    kept = sorted(rounds, key=lambda r: r[0])[:repeats]
    if spare and kept[-1][0] > 2 * _QUIET:
        print(f"the machine is busy: other processes took up to {kept[-1][0]:.0%} of it in what follows", flush=True)
    return {name: Took(*map(statistics.median, zip(*(took[name] for _, took in kept), strict=True))) for name in names}


def _system_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def _others_cpu_seconds() -> float:
    """CPU time that other processes have used so far, where /proc tells."""
    try:
        with open("/proc/stat", encoding="ascii") as lines:
            user, nice, system, _idle, _wait, irq, soft, steal = map(int, lines.readline().split()[1:9])
    except OSError:
        return 0.0
    busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
    return busy - time.process_time()


def faster(
    name: str,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    floor: Callable[[], object],
    *,
    at_least: float | None = None,
    repeats: int = 5,
    seconds: float = math.inf,
) -> Comparison:
    """How many times faster ``ours`` is, and ``floor`` would be; see :func:`interleaved`."""
    took = interleaved({"ours": ours, "theirs": theirs, "floor": floor}, repeats, spare=repeats, seconds=seconds)
    mine, other = (f"{1e3 * took[who].seconds:.0f} ms" for who in ("ours", "theirs"))
    ratio, bound = (took["theirs"].seconds / took[who].seconds for who in ("ours", "floor"))
    new = ", ".join(f"{1e3 * took[who].system:.0f} ms of {who}" for who in ("ours", "theirs"))
    much = any(system > _MUCH * seconds for seconds, system in took.values())
    note = f"in the operating system, with memory new to the step: {new}" if much else ""
    return Comparison(name, mine, other, ratio, at_least, bound=bound, profile=lambda: operators(ours), note=note)


def smaller(
    name: str, ours: Callable[[], object], theirs: Callable[[], object], *, at_most: float | None = None
) -> Comparison:
    """The part of the peak memory of ``theirs`` that ``ours`` takes, in one call of each: which also warms them up."""
    mine, other = peak_bytes(ours), peak_bytes(theirs)
    return Comparison(name, f"{mine / 1e6:.0f} MB", f"{other / 1e6:.0f} MB", mine / other, at_most=at_most)


def peak_bytes(run: Callable[[], object]) -> int:
    """Most CPU bytes held at once above what was held before, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=operator.methodcaller("start_ns")):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def operators(run: Callable[[], object], rows: int = 12) -> str:
    """Where the time of ``run`` goes, by operator."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run()
    return recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40)


def machine() -> str:
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
