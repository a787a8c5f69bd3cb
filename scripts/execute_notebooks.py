"""Run the notebooks with papermill and keep an executed copy of each, for the book.

A copy is made anew only when something it depends on has changed: the notebook, the profile, laga_core, the pinned
packages, or the committed data. The fingerprint of all that is stored in the copy itself, so a copy and its
fingerprint can never disagree.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CELL_SECONDS = 300  # no cell of the laptop profile should come near this
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def files_under(paths: Iterable[Path]) -> Iterator[Path]:
    """Every file below these paths, in a stable order, without caches and hidden files."""
    for path in paths:
        if path.is_file():
            yield path
        elif path.is_dir():
            for child in sorted(path.iterdir()):
                if not child.name.startswith((".", "__pycache__")):
                    yield from files_under([child])


def digest(paths: Iterable[Path], root: Path = ROOT) -> str:
    """One hash of the names and contents of these files and folders."""
    total = hashlib.sha256(sys.version.encode())
    for path in files_under(paths):
        total.update(f"{path.relative_to(root)}\0".encode())
        total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def stored_fingerprint(copy: Path) -> str | None:
    try:
        fingerprint = json.loads(copy.read_text(encoding="utf-8"))["metadata"]["laga"]["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return fingerprint if isinstance(fingerprint, str) else None


def execute(notebook: Path, copy: Path, parameters: dict[str, Any], fingerprint: str, root: Path = ROOT) -> None:
    """Run one notebook, from the root of the repository, and write its executed copy."""
    import nbformat
    import papermill

    accepted = papermill.inspect_notebook(str(notebook))
    # No output path: papermill would write after every cell, and leave half a notebook behind when one fails.
    node = papermill.execute_notebook(
        str(notebook),
        None,
        parameters={name: value for name, value in parameters.items() if name in accepted},
        kernel_name="python3",
        cwd=str(root),
        progress_bar=False,
        start_timeout=60,
        execution_timeout=CELL_SECONDS,
        extra_arguments=["--IPKernelApp.log_level=50"],  # its notices are for those who run it by hand
    )
    node.metadata.pop("papermill", None)  # absolute paths and times: they would differ in every copy
    for cell in node.cells:
        cell.metadata.pop("papermill", None)
        cell.metadata.pop("execution", None)
    node.metadata["laga"] = {"fingerprint": fingerprint}
    write_atomically(copy, nbformat.writes(node) + "\n")


def execute_all(notebooks: Path, profile: Path, output: Path, root: Path = ROOT, force: bool = False) -> list[str]:
    """Bring every executed copy up to date; return the names of the notebooks that failed."""
    import yaml

    parameters = yaml.safe_load(profile.read_text(encoding="utf-8")) or {}
    sources = sorted(notebooks.glob("[0-9][0-9]_*.ipynb"))
    shared = [root / name for name in ("laga_core", "data/paper", "data/published", "requirements.txt")]
    shared_digest = digest([profile, *shared], root)
    for stale in set(output.glob("*.ipynb")) - {output / source.name for source in sources}:
        stale.unlink()

    failed = []
    for number, source in enumerate(sources, start=1):
        copy = output / source.name
        fingerprint = hashlib.sha256(f"{shared_digest} {digest([source], root)}".encode()).hexdigest()
        label = f"[{number}/{len(sources)}] {source.stem}"
        if not force and stored_fingerprint(copy) == fingerprint:
            print(f"{label}: unchanged", flush=True)
            continue
        copy.unlink(missing_ok=True)  # an old copy must not stand in for one that fails
        print(f"{label}: running ...", end=" ", flush=True)
        started = time.monotonic()
        try:
            execute(source, copy, parameters, fingerprint, root)
        except Exception as error:  # whatever a notebook raises, the others still get their turn
            print(f"FAILED after {time.monotonic() - started:.0f} s", flush=True)
            print(ANSI.sub("", f"{type(error).__name__}: {error}"), file=sys.stderr, flush=True)
            failed.append(source.name)
        else:
            print(f"{time.monotonic() - started:.0f} s", flush=True)
    return failed


def prepare_environment() -> None:
    """Settings every kernel inherits: this environment's kernel; no debugger notices, no progress bars in pages."""
    os.environ.update(
        JUPYTER_PREFER_ENV_PATH="1",
        JUPYTER_PLATFORM_DIRS="1",
        PYDEVD_DISABLE_FILE_VALIDATION="1",
        TQDM_DISABLE="1",
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--profile", type=Path, help="default: notebooks/profiles/laptop.yaml")
    parser.add_argument("--output", type=Path, help="default: book/experiments")
    parser.add_argument("--force", action="store_true", help="run also what has not changed")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    profile = (options.profile or root / "notebooks/profiles/laptop.yaml").resolve()
    output = (options.output or root / "book/experiments").resolve()
    if not profile.is_file():
        parser.error(f"no such profile: {profile}")
    prepare_environment()
    failed = execute_all(root / "notebooks", profile, output, root, options.force)
    if failed:
        print(f"{len(failed)} notebook(s) failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
