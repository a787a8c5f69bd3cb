"""The notebook runner: runs what changed, leaves the rest, and never passes off a failure as a result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "execute_notebooks.py"


def write_notebook(path: Path, *sources: str) -> None:
    cells = [v4.new_markdown_cell("# Title", id="title"), v4.new_code_cell("n = 1", id="parameters")]
    cells[1].metadata["tags"] = ["parameters"]
    cells += [v4.new_code_cell(source, id=f"cell-{index}") for index, source in enumerate(sources)]
    node = v4.new_notebook(cells=cells)
    node.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(node, path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_notebook(tmp_path / "notebooks" / "01_good.ipynb", "print('n is', n)")
    profile = tmp_path / "notebooks" / "profiles" / "laptop.yaml"
    profile.parent.mkdir()
    profile.write_text("n: 7\nunused_elsewhere: 3\n")
    package = tmp_path / "laga_core" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    return tmp_path


def run(root: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--root", str(root), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )


def printed(copy: Path) -> str:
    node = nbformat.read(copy, as_version=4)
    return "".join(output.get("text", "") for cell in node.cells for output in cell.get("outputs", []))


def test_runs_once_and_again_only_after_a_change(root: Path) -> None:
    copy = root / "book" / "experiments" / "01_good.ipynb"
    source = (root / "notebooks" / "01_good.ipynb").read_bytes()

    first = run(root)
    assert first.returncode == 0, first.stderr
    assert "[1/1] 01_good: running" in first.stdout
    assert printed(copy) == "n is 7\n"  # the profile's value
    assert "unused_elsewhere" not in copy.read_text()  # parameters that this notebook does not declare stay away
    assert (root / "notebooks" / "01_good.ipynb").read_bytes() == source
    assert str(root) not in copy.read_text()

    written = copy.stat().st_mtime_ns
    os.utime(root / "notebooks" / "01_good.ipynb")  # contents count, not times
    assert "unchanged" in run(root).stdout
    assert copy.stat().st_mtime_ns == written

    (root / "laga_core" / "new.py").write_text("x = 1\n")
    assert "running" in run(root).stdout
    (root / "notebooks/profiles/laptop.yaml").write_text("n: 8\n")
    assert "running" in run(root).stdout
    assert printed(copy) == "n is 8\n"


def test_a_failing_notebook_fails_the_run_with_its_traceback(root: Path) -> None:
    assert run(root).returncode == 0
    copies = root / "book" / "experiments"
    write_notebook(root / "notebooks" / "01_good.ipynb", "def deep():\n    return 1 / 0", "deep()")
    write_notebook(root / "notebooks" / "02_after.ipynb", "print('still runs')")

    result = run(root)
    assert result.returncode != 0
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "in deep()" in result.stderr
    assert "\x1b[" not in result.stderr
    assert "01_good: running ... FAILED" in result.stdout
    assert not (copies / "01_good.ipynb").exists()  # the copy of the time before does not stand in
    assert printed(copies / "02_after.ipynb") == "still runs\n"
    assert run(root).returncode != 0  # and it does not pass the next time either

    (root / "notebooks" / "01_good.ipynb").unlink()
    assert run(root).returncode == 0
    (root / "notebooks" / "02_after.ipynb").unlink()
    run(root)
    assert list(copies.iterdir()) == []  # nothing outlives its notebook


def test_a_damaged_copy_is_made_anew(root: Path) -> None:
    assert run(root).returncode == 0
    copy = root / "book" / "experiments" / "01_good.ipynb"
    copy.write_text(copy.read_text()[:100])
    assert run(root).returncode == 0
    json.loads(copy.read_text())


def test_a_missing_profile_is_named(root: Path) -> None:
    result = run(root, "--profile", str(root / "absent.yaml"))
    assert result.returncode != 0
    assert "absent.yaml" in result.stderr
