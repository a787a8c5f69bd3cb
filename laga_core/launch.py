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
import json
import os
import pickle
import platform
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .device import backend_for, device_count, resolve_device
from .ranks import LOST, POLL, node_name, numbered, pickle_call, put, report_failure, running_agent, take, wait_for

_BEAT = 1.0  # s between two signs of life of a node
_GRACE = 3.0  # s to learn why a peer closed its connection
# A forked CPU rank starts at once, with torch loaded; accelerators cannot be used across a fork.
_START_METHODS = {"cpu": "fork", "cuda": "spawn", "npu": "spawn"}
_DISMISSED = "dismissed"
_LONGEST = 1e8  # s, three years


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
    preload: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Run ``fn(*args, **kwargs)`` on every rank and return the ranks' values in rank order, tensors moved to the CPU.

    Each rank finds the process group initialised (``torch.distributed``) and its device selected. ``fn`` may come from
    a module, a script or a notebook cell; it travels, as arguments and values do, by cloudpickle.

    - ``nproc``: ranks on this node; by default one a device, or 2 on a CPU; 0 where this node only coordinates.
    - ``nnodes``: nodes that run ranks. The others join by ``python -m laga_core join --endpoint HOST:PORT``; they run
      ``nproc`` ranks each, unless told otherwise there.
    - ``device``, ``backend``: by default this machine's accelerator, and gloo, nccl or hccl as the device asks for.
    - ``timeout``: seconds ``fn`` may take, also the limit of one collective.
    - ``endpoint``: ``HOST:PORT`` at which this process listens; by default a free port on loopback, or with several
      nodes ``LAGA_ENDPOINT``.
    - ``hosts``: names of the nodes that are to join, in rank order, so that an error can name who is missing (by
      default ``LAGA_HOSTS``, comma-separated). ``join_timeout``: seconds they may take, and the ranks to connect.
    - ``interface``: network interface for gloo, NCCL and HCCL; by default the one that carries the endpoint, or with
      several nodes ``LAGA_INTERFACE``.
    - ``env``: further environment variables for the ranks, such as ``NCCL_IB_HCA`` or ``HCCL_IF_BASE_PORT``.
    - ``threads_per_rank``: CPU threads; by default ``OMP_NUM_THREADS`` or an even share of the cores.
    - ``preload``: modules to import once a node instead of once a rank, where ranks run on the CPU; they must start no
      threads. By default ``fn``'s own if it is of this package.

    Raises ``ValueError`` or ``TypeError`` for bad arguments, ``LaunchError`` with its number and traceback once a rank
    fails, ``LaunchTimeout`` past a time limit. However it ends, it leaves no process behind.
    """
    where = resolve_device(device)
    nproc = _check_sizes(where, nproc, nnodes, timeout, join_timeout, threads_per_rank)
    _check_words(backend=backend, endpoint=endpoint, interface=interface)
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env must map names of environment variables to values, got {env!r}")
    coming = nnodes - (nproc > 0)  # nodes that have to join
    endpoint = endpoint or (coming and os.environ.get("LAGA_ENDPOINT")) or "127.0.0.1:0"
    host, port = _parse_endpoint(endpoint, listening=True)
    interface = interface or (os.environ.get("LAGA_INTERFACE") if coming else None)
    if coming and port == 0:
        raise ValueError(f"nnodes={nnodes} needs an endpoint with a port that the other nodes can be told: 'HOST:PORT'")
    hosts = None if hosts is None else _names("hosts", hosts)
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
        "preload": _own_module(fn) if preload is None else _names("preload", preload),
    }
    call = pickle_call(fn, args, kwargs)
    job = uuid.uuid4().hex
    with _host_store(host, port) as (tcp, port):
        store = dist.PrefixStore(job, tcp)
        put(store, "call", call)
        store.set("settings", json.dumps(settings))
        tcp.set("job", job)
        try:
            nodes = [{"key": "0", "name": node_name(), "nproc": nproc}] if nproc else []
            nodes += _await_nodes(store, coming, expected, join_timeout, f"{host}:{port}")
            store.set("plan", json.dumps(nodes))
            with contextlib.ExitStack() as stack:
                agent = (
                    stack.enter_context(running_agent(host, port, job, settings, 0, nproc, interface))
                    if nproc
                    else None
                )
                return _collect(store, nodes, agent, timeout, join_timeout)
        finally:
            store.set("over", "1")
            wait_for(lambda: store.add("left", 0) >= store.add("node", 0), 5.0)


def dismiss(endpoint: str, nodes: int, timeout: float = 30.0) -> None:
    """Tell the ``nodes`` nodes that wait in ``join`` at ``endpoint`` that no launch will follow."""
    host, port = _parse_endpoint(endpoint)
    _check_seconds("timeout", timeout)
    if nodes < 1:
        raise ValueError(f"nodes must be at least 1, got {nodes}")
    with _host_store(host, port) as (tcp, _):
        tcp.set("job", _DISMISSED)
        if not wait_for(lambda: tcp.add("left", 0) >= nodes, timeout):
            raise LaunchTimeout(f"only {tcp.add('left', 0)} of {nodes} nodes came to {endpoint} within {timeout:g} s")


# ---------------------------------------------------------------------------------------------------------------------
# The launching process


def _check_sizes(
    device: torch.device, nproc: int | None, nnodes: int, timeout: float, join_timeout: float, threads: int | None
) -> int:
    available = device_count(device)
    if nproc is None:
        nproc = 2 if available is None else available
    for name, value, least in (
        ("nproc", nproc, 0),
        ("nnodes", nnodes, 1),
        ("threads_per_rank", 1 if threads is None else threads, 1),
    ):
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
        _check_seconds(name, seconds)
    return nproc


def _check_seconds(name: str, seconds: float) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, got {seconds!r}")
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"{name} must be a positive number of seconds, at most {_LONGEST:g}, got {seconds!r}")


def _check_words(**words: str | None) -> None:
    for name, word in words.items():
        if word is not None and not isinstance(word, str):
            raise TypeError(f"{name} must be a string, got {word!r}")


def _names(what: str, names: Sequence[str]) -> list[str]:
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(n, str) and n for n in names):
        raise TypeError(f"{what} must be a list of names, got {names!r}")
    return list(names)


def _own_module(fn: Callable[..., Any]) -> list[str]:
    module = getattr(fn, "__module__", None) or ""
    return [module] if module.startswith(f"{__package__}.") else []


def _parse_endpoint(endpoint: str, listening: bool = False) -> tuple[str, int]:
    host, separator, port = endpoint.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535 or (int(port) == 0 and not listening):
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
        return [json.loads(store.get(key)) | {"key": key.removeprefix("node/")} for key in numbered(store, "node")]

    complete = wait_for(lambda: len(numbered(store, "node")) >= coming, join_timeout)
    nodes = arrived()
    names = [node["name"] for node in nodes]
    if not complete:
        absent = [name for name in expected if name not in names and name != node_name()]
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
    own = [f"value/{rank}" for node in nodes if node["key"] == "0" for rank in range(node["nproc"])]
    watch = _Heartbeats(store, [node for node in nodes if node["key"] != "0"])
    connected, deadline = False, time.monotonic() + join_timeout
    while store.add("done", 0) < world:
        if numbered(store, "failure"):
            raise _failure(store, world)
        if agent is not None and agent.poll() is not None and not store.check(own):
            if numbered(store, "failure"):
                continue
            raise LaunchError(f"the agent of this node ended with exit code {agent.returncode} before its ranks did")
        if lost := watch.lost():
            raise LaunchError(f"node {lost} gave no sign of life for {LOST:g} s: its machine, network or job is gone")
        if not connected and store.add("connected", 0) == world:
            connected, deadline = True, time.monotonic() + timeout
        if time.monotonic() > deadline:
            raise _out_of_time(store, world, timeout if connected else join_timeout, connected)
        time.sleep(POLL)
    values = [_load_value(take(store, f"value/{rank}"), rank) for rank in range(world)]
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
        return [json.loads(take(store, key)) for key in numbered(store, "failure")]

    wait_for(lambda: any(not each["peer"] for each in reports()), _GRACE)
    time.sleep(0.1)  # ranks that fail alike
    known = reports()
    first = min(known, key=lambda each: each["peer"])
    failures = {each["rank"]: each["text"] for each in reversed(known) if each["rank"] is not None}
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
            elif now - self.seen[node["key"]][1] > LOST:
                return str(node["name"])
        return None


# ---------------------------------------------------------------------------------------------------------------------
# A node that joins


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
    _check_words(endpoint=endpoint, interface=interface, name=name)
    host, port = _parse_endpoint(endpoint)
    _check_seconds("timeout", timeout)
    for what, count in (("nproc", nproc), ("nnodes", nnodes)):
        if count is not None and count < 1:
            raise ValueError(f"{what} must be at least 1, got {count}")
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
                _serve(host, port, tcp, job, nproc, nnodes, interface, name or node_name())
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
            time.sleep(POLL)
        ranks = [node["key"] for node in json.loads(store.get("plan"))]
        if key not in ranks:
            raise LaunchError(f"node {name} came to a launch that already had its {len(ranks)} nodes")
        with running_agent(host, port, job, settings, ranks.index(key), nproc, interface) as agent:
            while not over() and agent.poll() is None:
                time.sleep(POLL)
            if agent.returncode:
                report_failure(store, None, f"the agent of node {name} ended with exit code {agent.returncode}", False)
            while not over():
                time.sleep(POLL)
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
