"""A cluster emulated on this machine: each node a network namespace, each node's link shaped, ranks inside.

The nodes hang on one bridge in a namespace of its own. Ranks of one node talk over its loopback; what they send to
another node leaves by ``eth0``, which :func:`shape` slows down and :func:`sent_bytes` counts. Needs Linux and root.
However a run ends, its processes and namespaces go: on return, on an error, on SIGTERM; after a SIGKILL the ranks die
with their parent, and the next run removes what is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

_PREFIX = "laga"
_NETWORK = "10.213.7"
_PORT = 29500
_HUB = "hub"


def unavailable() -> str | None:
    """Why this machine cannot emulate a cluster, in words; ``None`` if it can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(missing)} not found; on Debian: apt install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{_PREFIX}{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"this machine lets nobody make network namespaces ({made.stderr.strip()})"
    _ip("netns", "del", probe)
    return None


def run(
    fn: Callable[..., Any],
    *args: Any,
    nodes: int = 2,
    ranks_per_node: int = 1,
    timeout: float = 600.0,
    threads: int = 1,
    **kwargs: Any,
) -> list[Any]:
    """``fn(*args, **kwargs)`` on every rank, gloo between them; the values in rank order. Neighbours share a node.

    ``fn`` travels by cloudpickle. Links are unshaped until a rank calls :func:`shape`. ``timeout`` seconds limit the
    whole run; ``threads`` are CPU threads a rank.

    Raises ``RuntimeError`` where namespaces cannot be had, or with a failed rank's traceback; ``TimeoutError``.
    """
    if reason := unavailable():
        raise RuntimeError(f"no emulated cluster here: {reason}")
    with network(nodes) as names, tempfile.TemporaryDirectory(prefix=f"{_PREFIX}-") as folder:
        call = Path(folder) / "call"
        call.write_bytes(cloudpickle.dumps((fn, args, kwargs, timeout)))
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(nodes * ranks_per_node):
                command = [sys.executable, "-m", __name__, str(call), str(rank), str(nodes * ranks_per_node)]
                environment = {
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": str(threads),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "LOCAL_RANK": str(rank % ranks_per_node),
                }
                inside = ["ip", "netns", "exec", names[rank // ranks_per_node]]
                ranks.append(subprocess.Popen([*inside, *command], env=environment, preexec_fn=_die_with_parent))
            return _values(ranks, call, timeout)
        finally:
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()


def shape(mbit: float | None) -> None:
    """Limit what this node sends to ``mbit`` megabits a second (``None``: no limit). One rank of each node calls it."""
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
    if mbit is not None:
        # A burst of 2 ms, and at least one segment that the kernel hands over in one piece.
        burst = max(80_000, int(mbit * 1e6 / 8 * 0.002))
        limit = ["rate", f"{mbit:g}mbit", "burst", f"{burst}", "latency", "100ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit], check=True, capture_output=True)


def sent_bytes() -> int:
    """Bytes that this node has sent to others so far."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


@contextlib.contextmanager
def network(nodes: int) -> Iterator[list[str]]:
    """Names of ``nodes`` network namespaces that reach each other over ``eth0``; gone when the block ends."""
    _remove_leftovers()
    owner = f"{_PREFIX}{os.getpid()}"
    hub, names = f"{owner}-{_HUB}", [f"{owner}-{i}" for i in range(nodes)]
    with _sigterm_raises():
        try:
            for name in (hub, *names):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", hub, "link", "add", "bridge0", "type", "bridge")
            _ip("-n", hub, "link", "set", "bridge0", "up")
            for i, name in enumerate(names):
                _ip("-n", hub, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
                _ip("-n", hub, "link", "set", f"port{i}", "master", "bridge0", "up")
                _ip("-n", name, "address", "add", f"{_NETWORK}.{i + 1}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "eth0", "up")
            yield names
        finally:
            for name in (*names, hub):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")


def _remove_leftovers() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    for name, owner in re.findall(rf"^({_PREFIX}(\d+)-\S+)", listed, re.MULTILINE):
        if not Path(f"/proc/{owner}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM unwinds the stack instead of ending the process on the spot."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which an exec keeps


def _values(ranks: list[subprocess.Popen[bytes]], call: Path, timeout: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            time.sleep(0.2)  # for the traceback of the one that failed first
            _raise_failure(ranks, call)
        if time.monotonic() > deadline:
            raise TimeoutError(f"the emulated cluster of {len(ranks)} ranks did not finish within {timeout:g} s")
        time.sleep(0.05)
    _raise_failure(ranks, call)
    return [pickle.loads(call.with_name(f"value{rank}").read_bytes()) for rank in range(len(ranks))]


def _raise_failure(ranks: list[subprocess.Popen[bytes]], call: Path) -> None:
    for rank in sorted(range(len(ranks)), key=lambda rank: not call.with_name(f"error{rank}").exists()):
        if code := ranks[rank].poll():
            error = call.with_name(f"error{rank}")
            text = error.read_text() if error.exists() else f"it ended with code {code}"
            raise RuntimeError(f"rank {rank} of {len(ranks)} failed: {text}")


def _rank(call: Path, rank: int, world: int) -> None:
    fn, args, kwargs, timeout = pickle.loads(call.read_bytes())
    try:
        limit = timedelta(seconds=timeout)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        store = dist.TCPStore(f"{_NETWORK}.1", _PORT, world, is_master=rank == 0, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        value = fn(*args, **kwargs)
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        call.with_name(f"error{rank}").write_text(traceback.format_exc())
        raise SystemExit(1) from None
    call.with_name(f"value{rank}").write_bytes(cloudpickle.dumps(value))


if __name__ == "__main__":
    _rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
