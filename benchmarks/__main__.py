"""``python -m benchmarks [NAME ...]``: run the benchmarks and print one table.

A benchmark is a module ``benchmarks/bench_NAME.py`` with ``compare() -> Iterator[Comparison]``. Figures are reported,
never asserted: a shared machine is no judge of a test. What falls short is printed with the profile that explains it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from .harness import HEADER, Comparison, machine


def main(names: list[str]) -> int:
    known = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    print(f"{machine()}\n{HEADER}", flush=True)
    short: list[Comparison] = []
    for name in names or known:
        for comparison in importlib.import_module(f"benchmarks.bench_{name}").compare():
            print(comparison, flush=True)
            if not comparison.met:
                short.append(comparison)
    for comparison in short:
        if comparison.profile is not None:
            print(f"\n{comparison.name}: where our time goes\n{comparison.profile()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
