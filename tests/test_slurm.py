"""A notebook over two nodes of a real Slurm, which this test starts on this machine, up to its record."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from needs import unavailable

from laga_core.results import Store

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")

CONFIGURATION = """
ClusterName=laga
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/state
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/spool-%n
SlurmdPidFile={root}/slurmd-%n.pid
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=2
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=10 State=UP
"""

PARAMETERS = """
nnodes = 1
nproc = 1
store = ""
"""

EXPERIMENT = """
import os
import torch
import torch.distributed as dist
from laga_core import launch
from laga_core.results import Store, run_cell

def work():
    total = torch.ones(1)
    dist.all_reduce(total)
    return os.environ["SLURMD_NODENAME"], int(total)

def cell(nnodes, nproc):
    values = launch(work, nnodes=nnodes, nproc=nproc, device="cpu", timeout=60)
    return {"nodes": [node for node, _ in values], "sum": values[0][1]}

parameters = {"nnodes": nnodes, "nproc": nproc}
run_cell(Store(store), "two-nodes", parameters, cell, device="cpu", backend="gloo", ranks=nnodes * nproc)
"""


def installed() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


def install() -> None:
    """Debian's packages, kept from starting services of their own."""
    policy = Path("/usr/sbin/policy-rc.d")
    ours = not policy.exists()
    if ours:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for arguments in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", "slurm-wlm", "munge"]):
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if ours:
            policy.unlink()


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which sbatch talks to a cluster of two idle nodes."""
    if os.geteuid() != 0 or sys.platform != "linux":
        unavailable("a Slurm of one's own needs root on Linux")
    if not installed() and shutil.which("apt-get"):
        install()
    if not installed():
        unavailable("slurm-wlm and munge are not installed, and could not be")
    for name in ("state", "spool-n0", "spool-n1"):
        (tmp_path / name).mkdir()
    (tmp_path / "munge.key").write_bytes(os.urandom(128))
    (tmp_path / "munge.key").chmod(0o600)
    configuration = tmp_path / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    configuration.write_text(CONFIGURATION.format(host=host, root=tmp_path, ports=free_ports(3)))
    environment = os.environ | {"SLURM_CONF": str(configuration), "PYTHONUNBUFFERED": "1"}
    for name in [name for name in environment if name.startswith(("SLURM_", "LAGA_")) and name != "SLURM_CONF"]:
        del environment[name]
    munge = [f"--{name}={tmp_path}/munge.{name.split('-')[0]}" for name in ("key-file", "socket", "pid-file")]
    munge += [f"--log-file={tmp_path}/munge.log", f"--seed-file={tmp_path}/munge.seed", "--force", "--foreground"]
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        with (tmp_path / f"daemon-{len(daemons)}.log").open("wb") as log:
            daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))

    try:
        start("munged", *munge)
        wait_for((tmp_path / "munge.socket").exists, 10, tmp_path)
        start("slurmctld", "-D")
        for node in ("n0", "n1"):
            start("slurmd", "-D", "-N", node)
        wait_for(lambda: ask(environment, "sinfo", "-h", "-o", "%D %T") == "2 idle", 40, tmp_path)
        yield environment
    finally:
        if daemons:
            ask(environment, "scancel", "--signal=KILL", "--full", "--user=root")
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in Path("/proc").glob("[0-9]*/environ"):  # job steps, which outlive their daemon
            try:
                if f"SLURM_CONF={configuration}".encode() in process.read_bytes():
                    os.kill(int(process.parent.name), signal.SIGKILL)
            except OSError:
                continue


def ask(environment: dict[str, str], *command: str) -> str:
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    return answer.stdout.strip()


def wait_for(condition, seconds: float, logs: Path) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            texts = [f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(logs.glob("*.log"))]
            pytest.fail("Slurm did not come up\n" + "\n".join(texts))
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_notebook_runs_over_two_nodes_to_a_record(slurm: dict[str, str], tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_code_cell(PARAMETERS.strip(), metadata={"tags": ["parameters"]}),
            nbformat.v4.new_code_cell(EXPERIMENT.strip()),
        ],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, tmp_path / "in.ipynb")
    store = Store(tmp_path / "store")
    submitted = subprocess.run(
        [
            *(str(ROOT / "scripts/slurm/submit.sh"), "--nodes=2", "--wait", f"--output={tmp_path}/job.log", "--time=5"),
            *("--", str(tmp_path / "in.ipynb"), str(tmp_path / "out.ipynb"), "-p", "store", str(store.root)),
        ],
        env=slurm | {"LAGA_PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    log = (tmp_path / "job.log").read_text() if (tmp_path / "job.log").exists() else "the job left no log"
    assert submitted.returncode == 0, f"{submitted.stdout}{submitted.stderr}{log}"
    (record,) = store.load("two-nodes")
    assert record.parameters == {"nnodes": 2, "nproc": 1} and record.status == "ok"
    assert record.metrics == {"nodes": ["n0", "n1"], "sum": 2}
    assert record.provenance["ranks"] == 2
    assert "served 1 launch" in log and "rror" not in log, log
