"""The repository itself: clean notebooks, nothing generated or private in git, links that lead somewhere."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from pathlib import Path

import nbformat
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROFILES = sorted((ROOT / "notebooks" / "profiles").glob("*.yaml"))


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout


def tracked() -> list[str]:
    try:
        listed = git("ls-files", "-z")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def declared(notebook: Path) -> set[str]:
    """The names that the parameters cell assigns."""
    cells = nbformat.read(notebook, as_version=4).cells
    cell = next(each for each in cells if "parameters" in each.metadata.get("tags", []))
    return set(re.findall(r"^(\w+)\s*(?::[^=]+)?=", cell.source, re.MULTILINE))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS
    assert (ROOT / "notebooks/profiles/laptop.yaml") in PROFILES


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(notebook: Path) -> None:
    node = nbformat.read(notebook, as_version=4)
    nbformat.validate(node)
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", notebook.stem)
    assert node.cells[0].cell_type == "markdown", "a notebook opens with its title"
    assert "parameters" in code[0].metadata.get("tags", []), "the first code cell is tagged `parameters`"
    assert sum("parameters" in cell.metadata.get("tags", []) for cell in code) == 1
    assert [cell.outputs for cell in code if cell.outputs] == []
    assert [cell.execution_count for cell in code if cell.execution_count is not None] == []
    assert "widgets" not in node.metadata
    assert "papermill" not in node.metadata
    assert node.metadata.kernelspec.name == "python3"


def test_profiles_name_parameters_that_exist() -> None:
    known = set().union(*map(declared, NOTEBOOKS))
    for profile in PROFILES:
        parameters = yaml.safe_load(profile.read_text(encoding="utf-8")) or {}
        assert set(parameters) <= known, f"{profile.name} sets what no notebook declares"


def test_nothing_generated_or_local_is_tracked() -> None:
    generated = re.compile(
        r"(^|/)(_build|\.venv|__pycache__|\.ipynb_checkpoints|[^/]*\.egg-info)/|^data/local/|^book/experiments/|^_static/|\.pyc$"
    )
    assert [name for name in tracked() if generated.search(name)] == []


def test_no_path_of_one_machine_is_tracked() -> None:
    # Spelled in pieces, so that this file does not contain what it looks for.
    places = "|".join(["wo" + "rk", "ro" + "ot", "ho" + "me/[a-z]", "Us" + "ers/[a-z]"])
    home = re.compile(rf"(?<![\w./-])/(?:{places})\b/")
    texts = {".py", ".md", ".ipynb", ".yaml", ".yml", ".toml", ".txt", ".json", ".csv", ".js", ".css", ".sh", ""}
    found = []
    for name in tracked():
        if Path(name).suffix in texts:
            lines = (ROOT / name).read_text(encoding="utf-8", errors="replace").splitlines()
            found += [f"{name}:{number}" for number, line in enumerate(lines, start=1) if home.search(line)]
    assert found == []


def test_what_a_build_writes_is_ignored_by_git() -> None:
    """`make test` has built the book before: running the notebooks must leave `git status` clean."""
    tracked()
    for name in ("_build/html/index.html", "book/experiments/00_any.ipynb", "data/local/any/record.json"):
        assert git("check-ignore", name).strip() == name
    if os.environ.get("CI") == "true":  # a clean checkout: whatever has changed, the build has changed
        assert git("status", "--porcelain") == ""


def test_readme_links_lead_somewhere() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in target and not target.startswith("_build"):
                assert (ROOT / target).exists(), f"{page} links to {target}"


def shown_code(chapter: Path) -> list[str]:
    """Lines of code that a chapter shows, its own and those of the objects that it includes."""
    lines: list[str] = []
    for kind, body in re.findall(r"```(\{literalinclude\} \S+|python|console)\n(.*?)```", chapter.read_text(), re.S):
        if kind.startswith("{"):
            source = (chapter.parent / kind.split()[1]).read_text()
            name = re.search(r":pyobject: (\w+)", body)
            node = next(n for n in ast.walk(ast.parse(source)) if name and getattr(n, "name", None) == name[1])
            body = ast.get_source_segment(source, node) or ""
        lines += body.splitlines()
    return lines


def test_code_in_chapters_fits_their_column() -> None:
    shown = {chapter.name: shown_code(chapter) for chapter in (ROOT / "book").glob("*.md")}
    assert any(line.startswith("def laga(") for line in shown["forms.md"])
    assert not [(name, line) for name, lines in shown.items() for line in lines if len(line) > 85]


def test_workflows_run_what_there_is() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
        steps = [step for job in jobs.values() for step in job["steps"]]
        assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
        for command in (step["run"] for step in steps if "run" in step):
            program, *arguments = command.split()
            assert set(arguments) <= targets if program == "make" else program == "git" or (ROOT / program).is_file()
