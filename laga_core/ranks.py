"""The processes of a launch on one node: an agent, which is torch elastic's, and the ranks it starts and watches.

:mod:`laga_core.launch` decides who takes part and collects the values; the two sides meet in a store.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import struct
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

_MARK = "LAGA_LAUNCH"  # environment variable that names the launch a process belongs to, whatever its parent
_CHUNK = 4 << 20  # bytes; a TCPStore refuses values above 8 MiB
POLL = 0.05  # s
LOST = 10.0  # s without a sign of life, and a node counts as lost
_PEER_GONE = re.compile(r"gloo[/:]|connection (closed|reset|refused)|broken pipe|NCCL|HCCL|socket", re.IGNORECASE)


@contextlib.contextmanager
def running_agent(
    host: str, port: int, job: str, settings: dict[str, Any], node_rank: int, nproc: int, interface: str | None
) -> Iterator[subprocess.Popen[bytes]]:
    """This node's agent, and the end of all that it started."""
    scratch = tempfile.mkdtemp(prefix="laga-launch-")
    config = settings | {
        "host": host,
        "port": port,
        "job": job,
        "node_rank": node_rank,
        "nproc": nproc,
        "scratch": scratch,
        "parent": os.getpid(),
    }
    for name in ("path", "preload"):
        del config[name]  # read from the store; they may be long
    command = [sys.executable, "-c", "from laga_core.ranks import agent_main; agent_main()", json.dumps(config)]
    process = None
    try:
        process = subprocess.Popen(
            command,
            env=_environment(host, job, settings, nproc, interface),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C reaches the launching process alone
        )
        yield process
    finally:
        if process is not None:
            if process.poll() is None:
                process.terminate()  # elastic ends and reaps its ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3.0)
            _sweep(job, process.pid)
            process.wait()
        shutil.rmtree(scratch, ignore_errors=True)


def _environment(host: str, job: str, settings: dict[str, Any], nproc: int, interface: str | None) -> dict[str, str]:
    env = dict(os.environ)
    env[_MARK] = f"{env.get(_MARK, '')}:{job}"
    threads = settings["threads"] or int(env.get("OMP_NUM_THREADS", 0)) or max(1, _cores() // nproc)
    env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    env["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), *filter(None, [env.get("PYTHONPATH")])]
    )
    libraries = ["GLOO", "NCCL"] if host.startswith("127.") else ["GLOO", "NCCL", "HCCL"]
    for variable in (f"{library}_SOCKET_IFNAME" for library in libraries):
        if interface:
            env[variable] = interface
        elif variable not in env and (found := _interface_towards(host)):
            env[variable] = found
    return env | settings["env"]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _interface_towards(host: str) -> str | None:
    """The network interface by which this machine reaches ``host``; ``None`` where that cannot be found out."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode()[:15])
                    reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                    if socket.inet_ntoa(reply[20:24]) == address:
                        return name
    except (ImportError, OSError):
        pass
    return None


def _sweep(job: str, group: int | None = None) -> None:
    """Kill every process of a launch, wherever it has been moved to: children inherit the mark in their environment."""
    if group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(10):
        found = [pid for pid in _marked(job) if pid != os.getpid()]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.02)


def _marked(job: str) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if job.encode() in entry.read_bytes():
                yield int(entry.parent.name)


def node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# ---------------------------------------------------------------------------------------------------------------------
# The agent process


def agent_main() -> None:
    """Entry of the agent process: run this node's ranks under torch elastic's agent."""
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    class Agent(LocalElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            processes = super()._start_workers(worker_group)
            # Not before: a rank forked while a thread holds a lock, the resolver's say, waits for that lock for ever.
            watching = threading.Event()
            threading.Thread(target=_watch, args=(config, watching), daemon=True).start()
            watching.wait()  # its end, before it has begun, ends this process too
            _end_with_parent(False)
            return processes

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            # A rank that is done stays until all are, and of one that failed the result says so.
            gone = [w for w in worker_group.workers if not _alive(w.id)] if result.state == WorkerState.HEALTHY else []
            for worker in gone:
                text = "ended before its function did, without an error: something in it left by os._exit"
                report_failure(store, worker.global_rank, f"rank {worker.global_rank} {text}", False)
            return RunResult(state=WorkerState.FAILED) if gone else result

    config = json.loads(sys.argv[1])
    _end_with_parent(True)
    if os.getppid() != config["parent"]:
        sys.exit(1)  # it ended while this process was starting
    tcp = client(config)
    store = dist.PrefixStore(config["job"], tcp)
    settings = json.loads(store.get("settings"))
    sys.path += [entry for entry in settings["path"] if entry not in sys.path]
    for module in settings["preload"] if config["start_method"] == "fork" else ():
        with contextlib.suppress(Exception):  # the rank that needs it will say so
            importlib.import_module(module)
    logging.disable()  # failures are reported by us
    spec = WorkerSpec(
        role="rank",
        local_world_size=config["nproc"],
        entrypoint=_rank,
        args=(config,),
        rdzv_handler=_rendezvous(store, config),
        max_restarts=0,
        monitor_interval=0.05,
        local_addr=config["host"],
    )
    agent = Agent(
        spec,
        DefaultLogsSpecs(log_dir=config["scratch"]),
        start_method=config["start_method"],
        exit_barrier_timeout=5.0,
        shutdown_timeout=2,
    )
    try:
        result = agent.run()
    except SignalException:  # the launch is over
        sys.exit(1)
    for rank, failure in result.failures.items() if result is not None and result.is_failed() else ():
        cause = (
            f"killed by {signal.Signals(-failure.exitcode).name}"
            if failure.exitcode < 0
            else f"gone with exit code {failure.exitcode}"
        )
        hint = ", which the system also sends when memory runs short" if failure.exitcode == -signal.SIGKILL else ""
        report_failure(store, rank, f"rank {rank} (pid {failure.pid}) was {cause}{hint}", False)
    os._exit(0)  # nothing here needs cleaning up, and an interpreter that shuts down may still be told to end


def _end_with_parent(yes: bool) -> None:
    """Have the system kill this process once the one that started it is gone, or no longer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL if yes else 0)  # PR_SET_PDEATHSIG


def client(config: dict[str, Any]) -> dist.TCPStore:
    return dist.TCPStore(
        config["host"],
        config["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=config["timeout"] + LOST),
    )


def _watch(config: dict[str, Any], watching: threading.Event) -> None:
    """End this node's part of a launch whose launching process is gone."""
    try:
        tcp = client(config)
        watching.set()
        while tcp.check(["job"]):
            time.sleep(0.5)
    finally:
        shutil.rmtree(config["scratch"], ignore_errors=True)
        _sweep(config["job"])
        os.kill(os.getpid(), signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _rendezvous(store: dist.Store, config: dict[str, Any]) -> Any:
    """Elastic's meeting of the agents. The launch has already brought the nodes together and given each its rank."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    class Meeting(RendezvousHandler):
        use_agent_store = False

        def get_backend(self) -> str:
            return "laga"

        def get_run_id(self) -> str:
            return str(config["job"])

        def next_rendezvous(self) -> RendezvousInfo:
            address = RendezvousStoreInfo(config["host"], config["port"])
            return RendezvousInfo(store, config["node_rank"], len(json.loads(store.get("plan"))), address)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def shutdown(self) -> bool:
            return True

    return Meeting()


# ---------------------------------------------------------------------------------------------------------------------
# A rank


def _rank(config: dict[str, Any]) -> None:
    logging.disable(logging.NOTSET)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # a fork inherits the agent's handlers
    _end_with_parent(True)  # no rank outlives its agent
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    store = dist.PrefixStore(config["job"], client(config))
    try:
        store.set(f"phase/{rank}", "connecting to its peers")
        fn, args, kwargs = pickle.loads(take(store, "call"))
        options: dict[str, Any] = {}
        if config["device"] != "cpu":
            torch.accelerator.set_device_index(local)
            options["device_id"] = torch.device(config["device"], local)
        dist.init_process_group(
            config["backend"],
            store=dist.PrefixStore("peers", dist.PrefixStore(config["job"], client(config))),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=config["timeout"] + LOST),  # later than the launch, which can say more
            **options,
        )
        store.set(f"phase/{rank}", f"in {getattr(fn, '__qualname__', fn)}")
        store.add("connected", 1)
        value = fn(*args, **kwargs)
        # A peer that is still connecting would take the end of this rank for a failure.
        wait_for(lambda: store.add("connected", 0) == world, config["timeout"])
        dist.destroy_process_group()
        put(store, f"value/{rank}", _pickle(value, f"what rank {rank} returned"))
        store.set(f"phase/{rank}", "done")
        store.add("done", 1)
    except BaseException as error:
        inner = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # leave out this frame
        lost_peer = isinstance(error, dist.DistError | RuntimeError) and _PEER_GONE.search(str(error)) is not None
        report_failure(store, rank, "".join(traceback.format_exception(inner)), lost_peer)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LOST)  # connections stay up, so that no peer fails of this failure; the launch ends us all
        os._exit(1)


def report_failure(store: dist.Store, rank: int | None, text: str, peer: bool) -> None:
    content = {"rank": rank, "node": node_name(), "text": text[-1_000_000:], "peer": peer}
    with contextlib.suppress(dist.DistError):
        put(store, f"failure/{store.add('failure', 1)}", json.dumps(content).encode())


# ---------------------------------------------------------------------------------------------------------------------
# Values in the store


class _CPUPickler(cloudpickle.Pickler):
    """Pickles tensors as detached CPU tensors, without the rest of the storage a view looks into."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            data = obj.detach().to("cpu")
            if data.untyped_storage().nbytes() > data.numel() * data.element_size():
                data = data.clone()
            return data.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _pickle(value: Any, what: str) -> bytes:
    buffer = io.BytesIO()
    try:
        _CPUPickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception as error:
        raise TypeError(
            f"{what} cannot be sent between processes ({type(error).__name__}: {error}); use plain data and tensors, "
            "and open files, groups and devices inside the function"
        ) from error
    return buffer.getvalue()


def pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}")
    _pickle(fn, f"the function {getattr(fn, '__qualname__', fn)}")
    for name, value in [*enumerate(args), *kwargs.items()]:
        _pickle(value, f"argument {name!r} of {getattr(fn, '__qualname__', fn)}")
    return _pickle((fn, args, kwargs), "the call")


def put(store: dist.Store, key: str, data: bytes) -> None:
    chunks = range(0, len(data), _CHUNK)
    for number, start in enumerate(chunks):
        store.set(f"{key}/{number}", data[start : start + _CHUNK])  # type: ignore[arg-type]
    store.set(key, str(len(chunks)))


def take(store: dist.Store, key: str) -> bytes:
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def numbered(store: dist.Store, kind: str) -> list[str]:
    """The keys ``kind/1``, ``kind/2``, ... that are there; the counter ``kind`` says how many there may be."""
    keys = [f"{kind}/{number}" for number in range(1, store.add(kind, 0) + 1)]
    return [key for key in keys if store.check([key])]


def wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL)
    return True
