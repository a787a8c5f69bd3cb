"""``python -m laga_core``: what it prints, what it prints for machines, and what it says to bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from laga_core import MLAConfig, communication, simulate_memory
from laga_core.__main__ import main

SIZES = ["--model", "deepseek-v3", "--seq", "16384", "--sp", "8"]


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *SIZES, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    run = simulate_memory(MLAConfig.preset("deepseek-v3"), "laga", "fused", 16384, 8)
    assert found["kind"] == "simulated"
    assert found["forms"]["laga"]["peak_bytes"] == run.peak_bytes
    assert found["forms"]["laga"]["breakdown"] == run.breakdown
    assert main(["memory", *SIZES, "--form", "absorbed", "--kernel", "eager", "--option", "score=split"]) == 0
    assert "scores" in capsys.readouterr().out


def test_communication(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["communication", *SIZES, "--accounting", "paper"]) == 0
    text = capsys.readouterr().out
    assert "derived" in text
    sent = communication(MLAConfig.preset("deepseek-v3"), "explicit", 16384, 8, accounting="paper").total_bytes
    assert f"{sent / 1e6:,.1f}" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory", "--model", "gpt", "--seq", "8", "--sp", "1"], "unknown preset"),
        (["memory", "--model", "toy", "--seq", "9", "--sp", "2"], "cannot be split evenly"),
        (["memory", *SIZES, "--option", "score=split"], "--option needs --form"),
        (["memory", *SIZES, "--kernel", "npu"], "cannot be simulated"),
        (["memory", *SIZES, "--form", "lago"], "unknown form"),
        (["memory", "--model", "toy", "--seq", "1" + 12 * "0", "--sp", "1"], "more than can be simulated"),
        (["communication", *SIZES, "--form", "laga", "--option", "score"], "NAME=VALUE"),
        (["communication", *SIZES, "--form", "explicit", "--option", "colour=red"], "has no option"),
        (["communication", *SIZES, "--form", "explicit", "--option", "seq=3"], "form 'explicit' has no option 'seq'"),
        (["memory", *SIZES, "--form", "explicit", "--option", "form=laga"], "form 'explicit' has no option 'form'"),
        (["memory", *SIZES, "--form", "laga", "--option", "context=²"], "context must be a whole number"),
        (
            ["memory", *SIZES, "--form", "laga", "--option", "context=2", "--option", "context=1"],
            "--option context is given twice: 2 and 1",
        ),
        (["memory", "--model", "", "--seq", "8", "--sp", "1"], "unknown preset ''"),
        (["memory", "--model", 5000 * "x", "--seq", "8", "--sp", "1"], "unknown preset"),
        (["memory", "--model", str(Path(__file__).parent), "--seq", "8", "--sp", "1"], "no such config.json"),
        (["plan", *SIZES, "--latency", "inf"], "latency must be a positive number"),
        (["plan", *SIZES, "--rate", "1e-300"], "rate must be a positive number"),
        (["plan", *SIZES, "--memory", "nan"], "memory must be a positive number"),
        (["plan", *SIZES, "--batch", "1" + 400 * "0"], "batch must be at most 2^53"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_plan_for_the_slowest_and_the_fastest_machine_is_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for rate, link in (("1e-36", "1e-33"), ("1e12", "1e15")):
        assert main(["plan", *SIZES, "--rate", rate, "--node-link", link, "--slow-link", link, "--json"]) == 0
        text = capsys.readouterr().out
        assert json.loads(text)["best"]["seconds"] > 0 and not {"Infinity", "NaN"} & set(text.replace(",", "").split())


def test_a_plan_for_very_many_ranks_is_quick(capsys: pytest.CaptureFixture[str]) -> None:
    started = time.monotonic()
    assert main(["plan", "--model", "deepseek-v3", "--seq", str(2**50), "--sp", str(2**50), "--layers", "1"]) == 0
    assert time.monotonic() - started < 10


def test_a_reader_that_has_seen_enough_ends_it_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "laga_core", "communication", *SIZES]
    root = Path(__file__).parent.parent
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=root, timeout=100, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
