"""Build the book: run the notebooks, then Jupyter Book with warnings as errors; only what has changed."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import execute_notebooks
import psutil

ROOT = Path(__file__).resolve().parent.parent
HTML = ROOT / "_build" / "html"
BUILT = ROOT / "_build" / "built.sha256"  # written after a build without a warning, and only then
INPUTS = ("book", "laga_core", "data/paper", "data/published", "_config.yml", "_toc.yml", "requirements.txt", "LICENSE")


class PeakMemory(threading.Thread):
    """Largest memory of this process and all its children together, looked at twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self.finished = threading.Event()

    def run(self) -> None:
        while not self.finished.wait(0.5):
            me = psutil.Process()
            self.peak_bytes = max(self.peak_bytes, sum(map(self.in_use, [me, *me.children(recursive=True)])))

    @staticmethod
    def in_use(process: psutil.Process) -> int:
        try:
            # Pages that processes share count once (pss) where the system can tell.
            memory = process.memory_full_info()
            return getattr(memory, "pss", memory.rss)
        except psutil.Error:
            return 0


def build_pages() -> bool:
    """Build into _build/html; True when it went through without a warning."""
    fingerprint = execute_notebooks.digest([ROOT / name for name in INPUTS])
    if BUILT.is_file() and BUILT.read_text() == fingerprint and (HTML / "index.html").is_file():
        print("pages: unchanged", flush=True)
        return True
    BUILT.unlink(missing_ok=True)
    shutil.rmtree(ROOT / "_build", ignore_errors=True)  # a build on top of a failed one would not repeat its warnings
    print("pages: building ...", flush=True)
    jupyter_book = str(Path(sys.executable).with_name("jupyter-book"))
    command = [jupyter_book, "build", ".", "-W", "--keep-going", "-n", "--quiet"]
    build = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=600, check=False)  # errors: stderr
    if build.returncode == 0:
        execute_notebooks.write_atomically(BUILT, fingerprint)
    return build.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--started", type=float, default=time.time(), help="when the whole run started (Unix time)")
    options = parser.parse_args()
    memory = PeakMemory()
    memory.start()
    # Every process reads this environment: the book's source must be importable while its pages are built.
    os.environ["PYTHONPATH"] = str(ROOT)
    built = execute_notebooks.main([]) == 0 and build_pages()
    memory.finished.set()
    memory.join()
    print(f"{time.time() - options.started:.0f} s, peak memory {memory.peak_bytes / 1e9:.2f} GB", flush=True)
    if not built:
        print("The book was not built: see above.", file=sys.stderr)
        return 1
    print(f"The book is at {HTML / 'index.html'} (make serve opens it on localhost)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
