"""Run a function on N ranks: of this machine, or of several nodes.

Four kinds of process take part. ``launch`` hosts a key-value store (a c10d ``TCPStore``) at ``endpoint`` and puts the
pickled call into it; it never forks, and leaves signals and environment of the calling process alone, so that it works
in a notebook kernel. Each node has one *agent*, torch elastic's, which starts and watches the *ranks* of that node. On
every further node ``join`` starts an agent for each launch that it finds at the endpoint. Values and tracebacks return
through the store.

Whoever can reach the endpoint can run code in the ranks, as with any torch rendezvous. It is on loopback unless you
name another address; name one on a trusted network only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import json
import logging
import os
import pickle
import platform
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
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from .device import backend_for, device_count, resolve_device

_MARK = "LAGA_LAUNCH"  # environment variable that names the launch a process belongs to, whatever its parent
_CHUNK = 4 << 20  # bytes; a TCPStore refuses values above 8 MiB
_POLL = 0.05  # s
_BEAT = 1.0  # s between two signs of life of a node
_LOST = 10.0  # s without one, and the node counts as lost
_GRACE = 3.0  # s to learn why a peer closed its connection
# A forked CPU rank starts at once, with torch loaded; accelerators cannot be used across a fork.
_START_METHODS = {"cpu": "fork", "cuda": "spawn", "npu": "spawn"}
_DISMISSED = "dismissed"
_PEER_GONE = re.compile(r"gloo[/:]|connection (closed|reset|refused)|broken pipe|NCCL|HCCL|socket", re.IGNORECASE)


class LaunchError(RuntimeError):
    """A launch that failed. ``rank`` is the rank that failed first (``None``: no single one) and ``traceback`` its
    traceback; ``failures`` maps every rank known to have failed to what it said."""

    def __init__(self, message: str, rank: int | None = None, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = dict(failures or {})

    @property
    def traceback(self) -> str | None:
        """The failed rank's traceback."""
        return None if self.rank is None else self.failures.get(self.rank)


class LaunchTimeout(LaunchError, TimeoutError):
    """A launch that ran into its time limit, or a node that did not come in time."""


def launch(
    fn: Callable[..., Any],
    *args: Any,
    nproc: int | None = None,
    nnodes: int = 1,
    device: str | torch.device | None = None,
    backend: str | None = None,
    timeout: float = 600.0,
    endpoint: str | None = None,
    hosts: Sequence[str] | None = None,
    join_timeout: float = 120.0,
    interface: str | None = None,
    env: Mapping[str, str] | None = None,
    threads_per_rank: int | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on every rank and return the ranks' values in rank order, tensors moved to the CPU.

    Each rank finds the process group initialised (``torch.distributed``) and its device selected. ``fn`` may come from
    a module, a script or a notebook cell; it travels, as arguments and values do, by cloudpickle.

    ``nproc``: ranks on this node; by default one a device, or 2 on a CPU; 0 where this node only coordinates.
    ``nnodes``: nodes that run ranks. The others join by ``python -m laga_core join --endpoint HOST:PORT``; they run
    ``nproc`` ranks each, unless told otherwise there.
    ``device``, ``backend``: by default this machine's accelerator, and gloo, nccl or hccl as the device asks for.
    ``timeout``: seconds ``fn`` may take, also the limit of one collective.
    ``endpoint``: ``HOST:PORT`` at which this process listens; by default a free port on loopback, or with several nodes
    ``LAGA_ENDPOINT``.
    ``hosts``: names of the nodes that are to join, in rank order, so that an error can name who is missing (by default
    ``LAGA_HOSTS``, comma-separated). ``join_timeout``: seconds they may take, and the ranks to connect.
    ``interface``: network interface for gloo, NCCL and HCCL; by default the one that carries the endpoint, or with
    several nodes ``LAGA_INTERFACE``.
    ``env``: further environment variables for the ranks, such as ``NCCL_IB_HCA`` or ``HCCL_IF_BASE_PORT``.
    ``threads_per_rank``: CPU threads; by default ``OMP_NUM_THREADS`` or an even share of the cores.

    Raises ``ValueError`` or ``TypeError`` for bad arguments, ``LaunchError`` with its number and traceback once a rank
    fails, ``LaunchTimeout`` past a time limit. However it ends, it leaves no process behind.
    """
    where = resolve_device(device)
    nproc = _check_sizes(where, nproc, nnodes, timeout, join_timeout, threads_per_rank)
    coming = nnodes - (nproc > 0)  # nodes that have to join
    endpoint = endpoint or (coming and os.environ.get("LAGA_ENDPOINT")) or "127.0.0.1:0"
    host, port = _parse_endpoint(endpoint, listening=True)
    interface = interface or (os.environ.get("LAGA_INTERFACE") if coming else None)
    if coming and port == 0:
        raise ValueError(f"nnodes={nnodes} needs an endpoint with a port that the other nodes can be told: 'HOST:PORT'")
    expected = list(hosts or filter(None, os.environ.get("LAGA_HOSTS", "").split(","))) if coming else []
    settings = {
        "device": where.type,
        "backend": backend or backend_for(where),
        "timeout": timeout,
        "nnodes": nnodes,
        "nproc": nproc,
        "versions": _versions(),
        "start_method": _START_METHODS[where.type],
        "threads": threads_per_rank,
        "env": {str(name): str(value) for name, value in (env or {}).items()},
        "path": sys.path,
    }
    call = _pickle_call(fn, args, kwargs)
    job = uuid.uuid4().hex
    with _host_store(host, port) as (tcp, port):
        store = dist.PrefixStore(job, tcp)
        _put(store, "call", call)
        store.set("settings", json.dumps(settings))
        tcp.set("job", job)
        try:
            nodes = [{"key": "0", "name": _node_name(), "nproc": nproc}] if nproc else []
            nodes += _await_nodes(store, coming, expected, join_timeout, f"{host}:{port}")
            store.set("plan", json.dumps(nodes))
            with contextlib.ExitStack() as stack:
                agent = stack.enter_context(_agent(host, port, job, settings, 0, nproc, interface)) if nproc else None
                return _collect(store, nodes, agent, timeout, join_timeout)
        finally:
            store.set("over", "1")
            _wait_for(lambda: store.add("left", 0) >= store.add("node", 0), 5.0)


def dismiss(endpoint: str, nodes: int, timeout: float = 30.0) -> None:
    """Tell the ``nodes`` nodes that wait in ``join`` at ``endpoint`` that no launch will follow."""
    host, port = _parse_endpoint(endpoint)
    with _host_store(host, port) as (tcp, _):
        tcp.set("job", _DISMISSED)
        if not _wait_for(lambda: tcp.add("left", 0) >= nodes, timeout):
            raise LaunchTimeout(f"only {tcp.add('left', 0)} of {nodes} nodes came to {endpoint} within {timeout:g} s")


# ---------------------------------------------------------------------------------------------------------------------
# The launching process


def _check_sizes(
    device: torch.device, nproc: int | None, nnodes: int, timeout: float, join_timeout: float, threads: int | None
) -> int:
    available = device_count(device)
    if nproc is None:
        nproc = 2 if available is None else available
    for name, value, least in (("nproc", nproc, 0), ("nnodes", nnodes, 1), ("threads_per_rank", threads or 1, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if nproc == 0 and nnodes == 1:
        raise ValueError("nproc=0 runs no rank here: pass nproc >= 1, or with nproc=0 an endpoint that others join")
    if available is not None and nproc > available:
        raise ValueError(
            f"nproc={nproc} is more than this machine's {available} {device.type} devices, and each rank needs "
            f"its own; pass nproc<={available}, or device='cpu'"
        )
    for name, seconds in (("timeout", timeout), ("join_timeout", join_timeout)):
        if not seconds > 0:
            raise ValueError(f"{name} must be a positive number of seconds, got {seconds!r}")
    return nproc


def _parse_endpoint(endpoint: str, listening: bool = False) -> tuple[str, int]:
    host, separator, port = endpoint.rpartition(":")
    if not separator or not host or not port.isdigit() or int(port) > 65535 or (int(port) == 0 and not listening):
        raise ValueError(f"endpoint must be 'HOST:PORT', such as '10.0.0.1:29500', got {endpoint!r}")
    return host.strip("[]"), int(port)


@contextlib.contextmanager
def _host_store(host: str, port: int) -> Iterator[tuple[dist.TCPStore, int]]:
    """A store that listens on ``host`` alone (by itself a TCPStore listens on every interface)."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        raise RuntimeError(
            f"cannot listen on endpoint {host}:{port} ({error.strerror}); it must be an address of this machine and a "
            "port that no other launch uses"
        ) from error
    port = listener.getsockname()[1]
    yield (
        dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()),
        port,
    )


def _await_nodes(
    store: dist.Store, coming: int, expected: list[str], join_timeout: float, endpoint: str
) -> list[dict[str, Any]]:
    """The nodes that joined, in rank order: that of ``expected``, else by name."""

    def arrived() -> list[dict[str, Any]]:
        return [json.loads(store.get(key)) | {"key": key.removeprefix("node/")} for key in _numbered(store, "node")]

    complete = _wait_for(lambda: len(_numbered(store, "node")) >= coming, join_timeout)
    nodes = arrived()
    names = [node["name"] for node in nodes]
    if not complete:
        absent = [name for name in expected if name not in names and name != _node_name()]
        raise LaunchTimeout(
            f"{len(nodes)} of the {coming} nodes that were to join came within {join_timeout:g} s"
            + (f"; came: {', '.join(names)}" if names else "")
            + (f"; missing: {', '.join(absent)}" if absent else "")
            + f". Run there: python -m laga_core join --endpoint {endpoint}"
        )
    if problems := [f"node {node['name']}: {node['problem']}" for node in nodes if node["problem"]]:
        raise LaunchError("; ".join(problems))
    order = {name: place for place, name in enumerate(expected)}
    return sorted(nodes[:coming], key=lambda node: (order.get(node["name"], len(order)), node["name"]))


def _collect(
    store: dist.Store,
    nodes: list[dict[str, Any]],
    agent: subprocess.Popen[bytes] | None,
    timeout: float,
    join_timeout: float,
) -> list[Any]:
    """Wait for every rank's value."""
    world = sum(node["nproc"] for node in nodes)
    watch = _Heartbeats(store, [node for node in nodes if node["key"] != "0"])
    connected, deadline = False, time.monotonic() + join_timeout
    while store.add("done", 0) < world:
        if _numbered(store, "failure"):
            raise _failure(store, world)
        if agent is not None and agent.poll() is not None and store.add("done", 0) < world:
            if _numbered(store, "failure"):
                continue
            raise LaunchError(f"the agent of this node ended with exit code {agent.returncode} before its ranks did")
        if lost := watch.lost():
            raise LaunchError(f"node {lost} gave no sign of life for {_LOST:g} s: its machine, network or job is gone")
        if not connected and store.add("connected", 0) == world:
            connected, deadline = True, time.monotonic() + timeout
        if time.monotonic() > deadline:
            raise _out_of_time(store, world, timeout if connected else join_timeout, connected)
        time.sleep(_POLL)
    values = [_load_value(_take(store, f"value/{rank}"), rank) for rank in range(world)]
    if agent is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(5.0)
    return values


def _load_value(data: bytes, rank: int) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise LaunchError(f"the value of rank {rank} cannot be read here: {error}; return plain data", rank) from error


def _failure(store: dist.Store, world: int) -> LaunchError:
    """The failure that started it. Ranks that only lost their peer wait for the agent to say what became of it."""

    def reports() -> list[dict[str, Any]]:
        return [json.loads(_take(store, key)) for key in _numbered(store, "failure")]

    _wait_for(lambda: any(not report["peer"] for report in reports()), _GRACE)
    time.sleep(0.1)  # ranks that fail alike
    known = reports()
    first = min(known, key=lambda report: report["peer"])
    failures = {report["rank"]: report["text"] for report in reversed(known) if report["rank"] is not None}
    others = sorted(set(failures) - {first["rank"]})
    who = f"rank {first['rank']} of {world}" if first["rank"] is not None else "a node"
    return LaunchError(
        f"{who} failed on {first['node']}{f' (and {len(others)} more: {others})' if others else ''}\n{first['text']}",
        first["rank"],
        failures,
    )


def _out_of_time(store: dist.Store, world: int, limit: float, connected: bool) -> LaunchTimeout:
    phases = {rank: key for rank in range(world) if store.check([key := f"phase/{rank}"])}
    text = ", ".join(
        f"rank {rank} was {store.get(phases[rank]).decode() if rank in phases else 'not started'}"
        for rank in range(world)
    )
    if connected:
        return LaunchTimeout(f"the time limit of {limit:g} s ended a launch of {world} ranks: {text}")
    return LaunchTimeout(
        f"the ranks did not find each other within join_timeout={limit:g} s: {text}. See that interface= names the "
        "network that joins the nodes, and that they may open connections to each other"
    )


class _Heartbeats:
    """Which of the joined nodes has gone silent."""

    def __init__(self, store: dist.Store, nodes: list[dict[str, Any]]) -> None:
        self.store, self.nodes = store, nodes
        self.seen = {node["key"]: (b"", time.monotonic()) for node in nodes}
        self.next = 0.0

    def lost(self) -> str | None:
        now = time.monotonic()
        if now < self.next:
            return None
        self.next = now + _BEAT
        for node in self.nodes:
            beat = self.store.get(f"beat/{node['key']}")
            if beat != self.seen[node["key"]][0]:
                self.seen[node["key"]] = (beat, now)
            elif now - self.seen[node["key"]][1] > _LOST:
                return str(node["name"])
        return None


# ---------------------------------------------------------------------------------------------------------------------
# A node: its agent, and joining from elsewhere


@contextlib.contextmanager
def _agent(
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
    }
    del config["path"]  # read from the store; it may be long
    command = [sys.executable, "-c", "from laga_core.launch import _agent_main; _agent_main()", json.dumps(config)]
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


def join(
    endpoint: str,
    nproc: int | None = None,
    *,
    nnodes: int | None = None,
    interface: str | None = None,
    timeout: float = 600.0,
    name: str | None = None,
) -> int:
    """Lend this node's ranks to the launches that appear at ``endpoint``, one after the other.

    ``nproc`` is by default what the launch runs on its own node; ``nnodes``, if given, must be what the launch says.
    Ends once dismissed, or when no launch appeared for ``timeout`` seconds; returns how many were served. Raises
    ``LaunchTimeout`` when none came at all.
    """
    host, port = _parse_endpoint(endpoint)
    interface = interface or os.environ.get("LAGA_INTERFACE")
    seen: set[str] = set()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(dist.DistError):  # the launch has ended meanwhile
            tcp = _connect(host, port, deadline)
            if tcp is None:
                break
            job = tcp.get("job").decode()
            if job == _DISMISSED:
                tcp.add("left", 1)
                return len(seen)
            if job not in seen:
                seen.add(job)
                _serve(host, port, tcp, job, nproc, nnodes, interface, name or _node_name())
                deadline = time.monotonic() + timeout
        time.sleep(0.2)
    if not seen:
        raise LaunchTimeout(
            f"found no launch at {endpoint} within {timeout:g} s; start it with endpoint='{endpoint}' on the node with "
            "that address, and see that no firewall lies between"
        )
    return len(seen)


def _connect(host: str, port: int, deadline: float) -> dist.TCPStore | None:
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=5.0).close()  # quieter than a TCPStore's own attempts
            return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        time.sleep(0.2)
    return None


def _serve(
    host: str,
    port: int,
    tcp: dist.TCPStore,
    job: str,
    nproc: int | None,
    nnodes: int | None,
    interface: str | None,
    name: str,
) -> None:
    """Take part in one launch until it is over."""
    store = dist.PrefixStore(job, tcp)
    settings = json.loads(store.get("settings"))
    nproc, problem = _check_node(settings, nproc, nnodes)
    key, beats = str(store.add("node", 1)), 0
    store.set(f"beat/{key}", "0")
    store.set(f"node/{key}", json.dumps({"name": name, "nproc": nproc, "problem": problem}))

    def over() -> bool:
        nonlocal beats
        beats += 1
        store.set(f"beat/{key}", str(beats))
        return bool(store.check(["over"]))

    try:
        while not store.check(["plan"]):
            if over():
                return
            time.sleep(_POLL)
        ranks = [node["key"] for node in json.loads(store.get("plan"))]
        if key not in ranks:
            raise LaunchError(f"node {name} came to a launch that already had its {len(ranks)} nodes")
        with _agent(host, port, job, settings, ranks.index(key), nproc, interface) as agent:
            while not over() and agent.poll() is None:
                time.sleep(_POLL)
            if agent.returncode:
                _report(store, None, f"the agent of node {name} ended with exit code {agent.returncode}", False)
            while not over():
                time.sleep(_POLL)
    finally:
        with contextlib.suppress(dist.DistError):
            store.add("left", 1)


def _check_node(settings: dict[str, Any], nproc: int | None, nnodes: int | None) -> tuple[int, str | None]:
    """How many ranks this node runs, and what keeps it from taking part, which the launch is to say."""
    if settings["versions"] != _versions():
        return 0, f"runs {_versions()}, the launch {settings['versions']}; they must agree"
    if nnodes not in (None, settings["nnodes"]):
        return 0, f"was told --nnodes {nnodes}, the launch has nnodes={settings['nnodes']}"
    try:
        device = resolve_device(settings["device"])
        return _check_sizes(device, nproc or settings["nproc"] or None, 1, 1.0, 1.0, None), None
    except (ValueError, TypeError, RuntimeError) as error:
        return 0, str(error)


def _node_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _versions() -> str:
    return f"Python {'.'.join(platform.python_version_tuple()[:2])} and torch {torch.__version__.split('+')[0]}"


def add_commands(commands: Any) -> None:
    """Add ``join`` and ``dismiss`` to the subcommands of ``python -m laga_core``."""
    parser = commands.add_parser("join", help="lend this node's ranks to a launch on another node")
    parser.add_argument("--endpoint", required=True, help="HOST:PORT at which the launch listens")
    parser.add_argument("--nproc", type=int, help="ranks on this node (default: as many as on the launching node)")
    parser.add_argument("--nnodes", type=int, help="nodes in all, to check against the launch")
    parser.add_argument("--interface", help="network interface (default: the one that reaches the endpoint)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a launch (default 600)")
    parser.add_argument("--name", help="name of this node in messages (default: its Slurm name or host name)")
    parser.set_defaults(run=_join_command)

    parser = commands.add_parser("dismiss", help="tell the nodes that wait in join that no launch will follow")
    parser.add_argument("--endpoint", required=True, help="HOST:PORT, an address of this machine, that they wait for")
    parser.add_argument("--nodes", type=int, required=True, help="how many wait")
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds they may take to answer (default 30)")
    parser.set_defaults(run=_dismiss_command)


def _join_command(arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the agent is ended too
    options = {name: value for name, value in vars(arguments).items() if name not in ("run", "command")}
    served = join(**options)
    print(f"served {served} launch{'' if served == 1 else 'es'}")
    return 0


def _dismiss_command(arguments: argparse.Namespace) -> int:
    dismiss(arguments.endpoint, arguments.nodes, arguments.timeout)
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The agent process


def _agent_main() -> None:
    """Entry of the agent process: run this node's ranks under torch elastic's agent."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    config = json.loads(sys.argv[1])
    tcp = _client(config)
    store = dist.PrefixStore(config["job"], tcp)
    threading.Thread(target=_die_with_store, args=(config,), daemon=True).start()
    sys.path += [entry for entry in json.loads(store.get("settings"))["path"] if entry not in sys.path]
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
    agent = LocalElasticAgent(
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
        _report(store, rank, f"rank {rank} (pid {failure.pid}) was {cause}{hint}", False)
    os._exit(0)  # nothing here needs cleaning up, and an interpreter that shuts down may still be told to end


def _client(config: dict[str, Any]) -> dist.TCPStore:
    return dist.TCPStore(
        config["host"],
        config["port"],
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=config["timeout"] + _LOST),
    )


def _die_with_store(config: dict[str, Any]) -> None:
    """End this node's part of a launch whose launching process is gone."""
    try:
        tcp = _client(config)
        while tcp.check(["job"]):
            time.sleep(0.5)
    finally:
        _sweep(config["job"])
        os.kill(os.getpid(), signal.SIGKILL)


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
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives its agent
    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    store = dist.PrefixStore(config["job"], _client(config))
    try:
        store.set(f"phase/{rank}", "connecting to its peers")
        fn, args, kwargs = pickle.loads(_take(store, "call"))
        options: dict[str, Any] = {}
        if config["device"] != "cpu":
            torch.accelerator.set_device_index(local)
            options["device_id"] = torch.device(config["device"], local)
        dist.init_process_group(
            config["backend"],
            store=dist.PrefixStore("peers", dist.PrefixStore(config["job"], _client(config))),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=config["timeout"] + _LOST),  # later than the launch, which can say more
            **options,
        )
        store.set(f"phase/{rank}", f"in {getattr(fn, '__qualname__', fn)}")
        store.add("connected", 1)
        value = fn(*args, **kwargs)
        dist.destroy_process_group()
        _put(store, f"value/{rank}", _pickle(value, f"what rank {rank} returned"))
        store.set(f"phase/{rank}", "done")
        store.add("done", 1)
    except BaseException as error:
        inner = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # leave out this frame
        lost_peer = isinstance(error, dist.DistError | RuntimeError) and _PEER_GONE.search(str(error)) is not None
        _report(store, rank, "".join(traceback.format_exception(inner)), lost_peer)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_LOST)  # connections stay up, so that no peer fails of this failure; the launch ends us all
        os._exit(1)


def _report(store: dist.Store, rank: int | None, text: str, peer: bool) -> None:
    report = {"rank": rank, "node": _node_name(), "text": text[-1_000_000:], "peer": peer}
    with contextlib.suppress(dist.DistError):
        _put(store, f"failure/{store.add('failure', 1)}", json.dumps(report).encode())


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


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}")
    _pickle(fn, f"the function {getattr(fn, '__qualname__', fn)}")
    for name, value in [*enumerate(args), *kwargs.items()]:
        _pickle(value, f"argument {name!r} of {getattr(fn, '__qualname__', fn)}")
    return _pickle((fn, args, kwargs), "the call")


def _put(store: dist.Store, key: str, data: bytes) -> None:
    chunks = range(0, len(data), _CHUNK)
    for number, start in enumerate(chunks):
        store.set(f"{key}/{number}", data[start : start + _CHUNK])  # type: ignore[arg-type]
    store.set(key, str(len(chunks)))


def _take(store: dist.Store, key: str) -> bytes:
    return b"".join(store.get(f"{key}/{number}") for number in range(int(store.get(key))))


def _numbered(store: dist.Store, kind: str) -> list[str]:
    """The keys ``kind/1``, ``kind/2``, ... that are there; the counter ``kind`` says how many there may be."""
    keys = [f"{kind}/{number}" for number in range(1, store.add(kind, 0) + 1)]
    return [key for key in keys if store.check([key])]


def _wait_for(condition: Callable[[], bool], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True
