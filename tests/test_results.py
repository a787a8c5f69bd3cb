"""Records and their store: what is written can be read, what is damaged is named, what is missing is run."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laga_core.launch import LaunchError, launch
from laga_core.results import Record, Store, data_dir, is_out_of_memory, provenance, run_cell

ROOT = Path(__file__).resolve().parent.parent


def record(**changes: Any) -> Record:
    content: dict[str, Any] = {
        "experiment": "throughput",
        "kind": "measured",
        "parameters": {"sp": 2, "form": "laga"},
        "metrics": {"tokens_per_s": 1.5},
    }
    return Record(**content | changes)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


# --- records

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.dictionaries(st.text(), JSON, max_size=4))
def test_what_is_written_comes_back(parameters: dict[str, Any], metrics: dict[str, Any]) -> None:
    one = record(parameters=parameters, metrics=metrics, provenance={})
    assert Record.from_json(one.to_json()) == one
    reordered = dict(reversed(list(parameters.items())))
    assert record(parameters=reordered).key == one.key, "the order of parameters must not matter"


def test_the_key_tells_kind_and_parameters_apart() -> None:
    keys = {
        one.key
        for one in (
            record(),
            record(kind="emulated"),
            record(parameters={"sp": 4, "form": "laga"}),
            record(parameters={"sp": "2", "form": "laga"}),
            record(parameters={"sp": 2}),
        )
    }
    assert len(keys) == 5
    assert record(metrics={}, status="oom").key == record().key


SELF: list[Any] = []
SELF.append(SELF)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kind": "guessed"}, ValueError, "kind is 'guessed'; known: reported, derived, simulated, emulated, measured"),
        ({"status": "fine"}, ValueError, "status is 'fine'; known: ok, oom, failed"),
        ({"experiment": "../away"}, ValueError, "experiment must be a name of at most 100 letters"),
        ({"experiment": ""}, ValueError, "experiment must be a name of at most 100 letters"),
        ({"schema": 2}, ValueError, "schema is 2, this version reads 1"),
        ({"metrics": {"a": [1.0, {"b": float("nan")}]}}, ValueError, r"metrics\.a\[1\]\.b is nan"),
        ({"metrics": {"a": float("inf")}}, ValueError, r"metrics\.a is inf"),
        ({"metrics": {"a": torch.tensor(1.0)}}, TypeError, r"metrics\.a is a Tensor"),
        ({"parameters": {"dtype": torch.bfloat16}}, TypeError, r"parameters\.dtype is a dtype"),
        ({"parameters": {1: 2}}, TypeError, "parameters has the key 1"),
        ({"parameters": {"a": SELF}}, ValueError, "parameters is nested too deeply, or holds itself"),
        ({"metrics": {"a": 10**5000}}, ValueError, r"metrics\.a is a number of 16610 bits"),
        ({"experiment": "a" * 300}, ValueError, "at most 100 letters"),
        ({"parameters": {"a": ["\ud800"]}}, ValueError, r"parameters\.a\[0\] is .* half a character"),
        ({"metrics": {"\udfff": 1}}, ValueError, "a key of metrics is .* half a character"),
        ({"parameters": [1]}, TypeError, "parameters must be a mapping"),
    ],
)
def test_a_record_holds_only_what_json_can(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        record(**changes)


def test_provenance_says_where_it_comes_from() -> None:
    said = provenance(device="cpu", backend="gloo", ranks=2, link="200 Mbit/s")
    assert said["torch"] == torch.__version__ and said["python"] == sys.version.split()[0]
    assert (said["backend"], said["ranks"], said["link"], said["device"]) == ("gloo", 2, "200 Mbit/s", "cpu")
    vectors = torch.backends.cpu.get_cpu_capability()
    assert re.search(rf", {os.cpu_count()} cores, {vectors} with(out)? bf16$", said["hardware"])
    assert said["platform"] and said["date"].endswith("+00:00")
    head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert said["commit"].removesuffix("-dirty") == head.stdout.strip()


# --- the store


def test_load_and_find(store: Store) -> None:
    for sp in (2, 4):
        for kind in ("measured", "emulated"):
            store.write(record(kind=kind, parameters={"sp": sp, "shape": (1, 2)}, metrics={"x": sp}))
    store.write(record(parameters={"sp": 8, "shape": (1, 2)}, status="oom", metrics={}))
    assert len(store.load("throughput")) == 5
    assert [one.metrics["x"] for one in store.load("throughput", kind="measured", sp=4, shape=(1, 2))] == [4]
    assert [one.parameters["sp"] for one in store.load("throughput", status="oom")] == [8]
    assert store.load("throughput", sp=3) == store.load("throughput", absent=None) == store.load("memory") == []
    found = store.find("throughput", "emulated", {"shape": [1, 2], "sp": 2})
    assert found is not None and found.kind == "emulated"
    assert store.find("throughput", "derived", {"sp": 2, "shape": [1, 2]}) is None


def test_the_same_cell_replaces_its_record(store: Store) -> None:
    first, second = store.write(record()), store.write(record(metrics={"tokens_per_s": 2.0}))
    assert first == second
    assert [one.metrics for one in store.load("throughput")] == [{"tokens_per_s": 2.0}]


GOOD = record(provenance={}).to_json()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        (GOOD[: len(GOOD) // 2], "not a valid record"),
        ("[]", "a record is a JSON object, this is list"),
        (100_000 * "[", "nested too deeply"),
        (GOOD.replace('"schema": 1', '"schema": true'), "schema is True"),
        (GOOD.replace('"kind"', '"sort"'), "lacks kind"),
        (GOOD.replace('"schema"', '"note": 1, "schema"'), "has unknown fields note"),
        (GOOD.replace("1.5", "NaN"), "NaN is not a number"),
        (GOOD.replace('"measured"', '"hoped"'), "kind is 'hoped'"),
        (GOOD.replace('"schema": 1', '"schema": 7'), "schema is 7"),
        (GOOD.replace('"laga"', '"absorbed"'), "its name does not match"),
        (GOOD.replace('"metrics": {', '"metrics": [{').replace("1.5\n }", "1.5\n }]"), "metrics must be a mapping"),
        ("\udcff", "can't decode|codec"),
    ],
)
def test_a_damaged_file_is_named(store: Store, text: str, message: str) -> None:
    path = store.write(record())
    kept = store.write(record(parameters={"sp": 4}))
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    for read in (lambda: store.load("throughput"), lambda: store.find("throughput", "measured", record().parameters)):
        with pytest.raises(ValueError, match=f"(?s){path}.*({message}).*Restore the file, or delete it and run again"):
            read()
    with pytest.warns(UserWarning, match=str(path)):
        assert [one.key for one in store.load("throughput", strict=False)] == [kept.stem]


def test_a_folder_in_place_of_a_record_is_named(store: Store) -> None:
    path = store.write(record())
    path.unlink()
    path.mkdir()
    for read in (lambda: store.load("throughput"), lambda: store.find("throughput", "measured", record().parameters)):
        with pytest.raises(ValueError, match=f"{path}: not a valid record: .*directory"):
            read()


def test_load_takes_known_names_and_true_for_no_number(store: Store) -> None:
    store.write(record(parameters={"causal": True}))
    assert store.load("throughput", causal=1) == []
    assert len(store.load("throughput", causal=True)) == 1
    with pytest.raises(ValueError, match="kind is 'measurd'; known: "):
        store.load("throughput", kind="measurd")
    with pytest.raises(ValueError, match="status is 'fine'; known: "):
        store.load("throughput", status="fine")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        if os.environ.get("CI") == "true":
            pytest.fail("a small file system needs root and mount")
        pytest.skip("a small file system needs root and mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_leaves_what_was_there(small_disk: Path) -> None:
    store = Store(small_disk)
    store.write(record())
    before = {path: path.read_bytes() for path in small_disk.rglob("*.json")}
    for parameters in (record().parameters, {"sp": 4}):
        with pytest.raises(OSError, match=r"the record was not stored .*make room") as caught:
            store.write(record(parameters=parameters, metrics={"text": "x" * 100_000}))
        assert caught.value.errno == errno.ENOSPC
    assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
    store.write(record(parameters={"sp": 8}))
    assert len(store.load("throughput")) == 2


def write_often(root: str, writer: int, times: int) -> None:
    store = Store(root)
    for number in range(times):
        store.write(record(metrics={"writer": writer, "text": "x" * (1000 * writer)}))
        store.write(record(parameters={"writer": writer, "number": number}))


def test_several_writers_and_a_reader(store: Store) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_often, args=(str(store.root), number, 20)) for number in (1, 2, 3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        for one in store.load("throughput"):  # raises on anything half-written
            if "writer" in one.metrics:
                assert len(one.metrics["text"]) == 1000 * one.metrics["writer"]
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert len(store.load("throughput")) == 61
    assert not [path for path in store.root.rglob("*") if path.suffix == ".tmp"]


def test_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAGA_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert data_dir() == ROOT / "data"
    monkeypatch.setenv("LAGA_DATA", str(tmp_path))
    assert data_dir() == tmp_path
    assert Store().root == tmp_path / "local"


# --- sweeps

CELLS = [{"sp": sp, "seq": seq} for sp in (1, 2) for seq in (1024, 2048)]


def test_running_out_of_memory_is_a_result(store: Store) -> None:
    def work(sp: int, seq: int) -> dict[str, Any]:
        torch.empty(10**15 if seq == 2048 else 1)
        return {"seq": seq}

    records = [run_cell(store, "sweep", cell, work, device="cpu") for cell in CELLS]
    assert [one.status for one in records] == ["ok", "oom", "ok", "oom"]
    assert "DefaultCPUAllocator" in records[1].provenance["error"] and records[1].metrics == {}
    assert store.missing("sweep", "measured", CELLS) == []
    assert store.missing("sweep", "measured", CELLS, retry=("failed", "oom")) == [CELLS[1], CELLS[3]]
    assert store.missing("sweep", "emulated", CELLS) == CELLS


def test_a_failure_is_recorded_raised_and_tried_again(store: Store) -> None:
    calls = []

    def work(sp: int, seq: int) -> dict[str, Any]:
        calls.append((sp, seq))
        if len(calls) == 2:
            raise LaunchError("node b gave no sign of life")
        return {"call": len(calls)}

    with pytest.raises(LaunchError):
        for cell in CELLS:
            run_cell(store, "sweep", cell, work)
    assert [one.status for one in store.load("sweep", seq=2048)] == ["failed"]
    assert store.missing("sweep", "measured", CELLS) == CELLS[1:]
    assert [run_cell(store, "sweep", cell, work).metrics["call"] for cell in CELLS] == [1, 3, 4, 5]
    assert len(calls) == 5, "the first cell ran again"
    assert run_cell(store, "sweep", CELLS[0], work, rerun=True).metrics == {"call": 6}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("NPU out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("MemoryError"), False),
        (LaunchError("rank 0 failed", 0, {0: "Traceback ...\ntorch.OutOfMemoryError: CUDA out of memory."}), True),
        (LaunchError("rank 0 failed", 0, {0: "rank 0 was killed by SIGKILL, which ..."}), False),
    ],
)
def test_which_errors_mean_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def allocate_too_much() -> None:
    torch.empty(10**15)


def test_a_rank_that_runs_out_of_memory(store: Store) -> None:
    work = lambda: {"values": launch(allocate_too_much, nproc=1, device="cpu")}  # noqa: E731
    assert run_cell(store, "sweep", {}, work, device="cpu").status == "oom"


SWEEP = """
import sys, time
from laga_core.results import Store, run_cell

def work(cell):
    print(cell, flush=True)
    if cell == 2 and sys.argv[2] == "stay":
        time.sleep(60)
    return {"cell": cell}

for cell in range(4):
    run_cell(Store(sys.argv[1]), "sweep", {"cell": cell}, work, device="cpu")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_sweep_goes_on_where_it_stopped(store: Store, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SWEEP, str(store.root)]
    options: dict[str, Any] = {"cwd": ROOT, "text": True, "stderr": subprocess.DEVNULL}
    sweep = subprocess.Popen([*command, "stay"], stdout=subprocess.PIPE, **options)
    assert sweep.stdout is not None
    assert [sweep.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "2\n"]
    time.sleep(0.1)
    sweep.send_signal(number)
    sweep.communicate(timeout=30)
    assert [one.status for one in store.load("sweep")] == ["ok", "ok"], "an interrupt must record nothing"
    assert subprocess.check_output([*command, "go"], timeout=60, **options).split() == ["2", "3"]
    assert sorted(one.metrics["cell"] for one in store.load("sweep")) == [0, 1, 2, 3]


NODES = """
import os, sys, time
from pathlib import Path
from laga_core import launch
from laga_core.results import Store, run_cell

def on_rank(waits):
    if waits:
        marker.touch()
        time.sleep(60)
    return os.environ["RANK"]

def work(cell):
    print(cell, flush=True)
    waits = cell == 1 and not marker.exists()
    where = dict(nproc=1, nnodes=2, device="cpu", endpoint=sys.argv[2], join_timeout=90, threads_per_rank=1)
    return {"ranks": launch(on_rank, waits, **where)}

marker = Path(sys.argv[3])

for cell in range(2):
    run_cell(Store(sys.argv[1]), "sweep", {"cell": cell}, work, device="cpu", ranks=2)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_lost_in_mid_sweep(store: Store, tmp_path: Path) -> None:
    """Another node joins, dies in the second cell, and joins again: only the cell that is missing is run again."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    marker = tmp_path / "the second cell runs"
    sweep = [sys.executable, "-c", NODES, str(store.root), endpoint, str(marker)]
    node = [sys.executable, "-m", "laga_core", "join", "--endpoint", endpoint, "--timeout", "90"]
    options: dict[str, Any] = {"cwd": ROOT, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    running = [subprocess.Popen(command, **options) for command in (sweep, node)]
    try:
        deadline = time.monotonic() + 120
        while not marker.exists():
            assert time.monotonic() < deadline and running[0].poll() is None, running[0].communicate()
            time.sleep(0.05)
        running[1].kill()
        printed, error = running[0].communicate(timeout=60)
        assert printed.split() == ["0", "1"] and "gave no sign of life" in error
        found = {one.parameters["cell"]: one.status for one in store.load("sweep")}
        assert found == {0: "ok", 1: "failed"}

        running += [subprocess.Popen(command, **options) for command in (node, sweep)]
        printed, error = running[-1].communicate(timeout=120)
        assert (printed.split(), running[-1].returncode) == (["1"], 0), error
        assert [one.metrics for one in store.load("sweep", status="ok")] == [{"ranks": ["0", "1"]}] * 2
    finally:
        for process in running:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_two_papermill_runs_at_once_into_one_store(store: Store, tmp_path: Path) -> None:
    sources = (
        "store = ''",
        "import time\nfrom laga_core.results import Store, run_cell",
        "def work(cell):\n    time.sleep(0.1)\n    return {'cell': cell, 'text': 'x' * 100_000}",
        "found = [run_cell(Store(store), 'sweep', {'cell': cell}, work, device='cpu') for cell in range(8)]",
        "print(sum(record.metrics['cell'] for record in found))",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebook.cells[0].metadata["tags"] = ["parameters"]
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "in.ipynb")
    command = [
        sys.executable,
        "-m",
        "papermill",
        "--no-progress-bar",
        "-p",
        "store",
        str(store.root),
        "--cwd",
        str(ROOT),
    ]
    outputs = [tmp_path / f"out{number}.ipynb" for number in range(2)]
    runs = [subprocess.Popen([*command, str(tmp_path / "in.ipynb"), str(output)]) for output in outputs]
    try:
        assert [run.wait(timeout=180) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    for output in outputs:
        assert nbformat.read(output, as_version=4).cells[-1].outputs[0].text == "28\n"
    assert sorted(one.metrics["cell"] for one in store.load("sweep")) == list(range(8))
    assert len(list(store.root.rglob("*"))) == 9, "nothing but the folder and eight records"


def test_records_in_the_repository_are_valid() -> None:
    published = sorted((ROOT / "data" / "published").glob("*/*/*.json"))
    for path in published:
        assert Record.from_json(path.read_text()).key == path.stem, path
        assert json.loads(path.read_text())["provenance"]["hardware"], path
