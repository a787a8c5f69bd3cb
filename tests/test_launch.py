"""``launch`` on real processes: values, failures, time limits, interrupts, and nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from needs import unavailable

from laga_core.launch import LaunchError, LaunchTimeout, dismiss, join, launch

ROOT = Path(__file__).resolve().parent.parent
REAL = {"device": "cpu", "threads_per_rank": 1}


class Traces:
    """The processes of one launch, known by a token in their environment."""

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex
        self.env = {"LAGA_TEST": self.token}

    def alive(self) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("LAGA_TEST") == self.token and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def gone(self, within: float = 0.0) -> bool:
        return wait_until(lambda: not self.alive(), within)


def wait_until(condition: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def traces() -> Iterator[Traces]:
    """Fails a test that leaves a process behind."""
    one = Traces()
    yield one
    assert one.gone(), one.alive()


def grandchild() -> int:
    """A process that does its best to outlive its rank."""
    return subprocess.Popen(["sleep", "300"], start_new_session=True).pid


# --- what comes back


def look(offset: int, scale: int = 1) -> dict[str, Any]:
    rank = dist.get_rank()
    total = torch.full((3,), float(rank + offset) * scale, requires_grad=True)
    shared = total.detach().clone()
    dist.all_reduce(shared)
    listening = [
        connection.laddr.ip
        for process in (psutil.Process(), psutil.Process(os.getppid()), psutil.Process(os.getppid()).parent())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    return {
        "rank": rank,
        "sum": shared,
        "own": total,
        "slice": torch.arange(4_000_000)[:2],
        "big": torch.full((3_000_000,), rank, dtype=torch.bfloat16).as_subclass(torch.nn.Parameter),
        "backend": dist.get_backend(),
        "threads": torch.get_num_threads(),
        "listening": listening,
        "given": os.environ["GIVEN"],
    }


def test_values_come_back_in_rank_order_on_the_cpu(traces: Traces, capfd: pytest.CaptureFixture[str]) -> None:
    environment, handlers = dict(os.environ), [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    values = launch(look, 1, nproc=3, scale=2, env=traces.env | {"GIVEN": "yes"}, **REAL)
    assert [value["rank"] for value in values] == [0, 1, 2]
    for rank, value in enumerate(values):
        assert value["sum"].tolist() == [12.0] * 3
        assert value["own"].tolist() == [2.0 * (rank + 1)] * 3 and not value["own"].requires_grad
        assert value["slice"].untyped_storage().nbytes() == 16, "a view brought its whole storage along"
        assert value["big"].dtype == torch.bfloat16 and value["big"].float().mean() == rank
        assert (value["backend"], value["threads"], value["given"]) == ("gloo", 1, "yes")
    addresses = {address for value in values for address in value["listening"]}
    assert addresses == {"127.0.0.1"}, "something listens beyond loopback"
    assert dict(os.environ) == environment
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == handlers
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_a_launch_may_run_in_a_thread_and_take_closures(traces: Traces) -> None:
    offset, values = 5, []
    thread = threading.Thread(
        target=lambda: values.extend(launch(lambda: dist.get_rank() + offset, nproc=1, env=traces.env, **REAL))
    )
    thread.start()
    thread.join()
    assert values == [5]


def test_ranks_may_be_spawned_as_on_an_accelerator(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules["laga_core.launch"]._START_METHODS, "cpu", "spawn")
    values = launch(look, 1, nproc=2, env=traces.env | {"GIVEN": "yes"}, **REAL)
    assert [(value["rank"], value["sum"][0].item()) for value in values] == [(0, 3.0), (1, 3.0)]


@pytest.mark.skipif(sys.platform != "linux", reason="counts a process's threads in /proc")
def test_ranks_are_forked_by_a_single_thread(traces: Traces, tmp_path: Path) -> None:
    """A rank forked while another thread of the agent holds a lock would wait for it until the launch's time is up."""
    noted = tmp_path / "noted"
    note = f"open({str(noted)!r}, 'a').write(f\"{{len(os.listdir('/proc/self/task'))}}\\n\")"
    (tmp_path / "sitecustomize.py").write_text(f"import os\nos.register_at_fork(before=lambda: {note})\n")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    launch(dist.get_rank, nproc=3, env=traces.env | {"PYTHONPATH": path}, **REAL)
    assert noted.read_text().split() == ["1"] * 3


# --- how it fails


def one_raises() -> None:
    grandchild()
    dist.barrier()
    if dist.get_rank() == 1:
        raise ZeroDivisionError("on purpose")
    dist.barrier()


def test_a_failing_rank_ends_all_and_is_named(traces: Traces, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 of 3 failed(.|\n)*ZeroDivisionError: on purpose") as caught:
        launch(one_raises, nproc=3, timeout=60, env=traces.env, **REAL)
    assert caught.value.rank == 1
    assert "in one_raises" in caught.value.traceback and "laga_core" not in caught.value.traceback
    assert traces.gone()
    assert capfd.readouterr().err == ""


def one_is_killed(marker: str) -> None:
    grandchild()
    dist.barrier()
    if dist.get_rank() == 1:
        Path(marker).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(1000):
        dist.barrier()


def test_a_killed_rank_ends_the_launch_within_seconds(traces: Traces, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"rank 1 .*killed by SIGKILL") as caught:
        launch(one_is_killed, str(tmp_path / "marker"), nproc=3, timeout=60, env=traces.env, **REAL)
    assert time.time() - float((tmp_path / "marker").read_text()) < 10
    assert caught.value.rank == 1
    assert traces.gone()


def one_hangs(marker: str = os.devnull) -> None:
    grandchild()
    Path(marker).write_text(str(time.time()))
    if dist.get_rank() == 1:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        time.sleep(300)
    dist.barrier()


def test_a_time_limit_ends_a_hang(traces: Traces, tmp_path: Path) -> None:
    with pytest.raises(LaunchTimeout, match=r"limit of 1 s .* rank 0 was in one_hangs, rank 1 was in one_hangs"):
        launch(one_hangs, str(tmp_path / "marker"), nproc=2, timeout=1, env=traces.env, **REAL)
    assert time.time() - float((tmp_path / "marker").read_text()) < 1 + 10
    assert traces.gone()


def leave(how: str) -> Any:
    if how == "exit code":
        os._exit(7)
    if how == "without a word" and dist.get_rank() == 0:
        os._exit(0)
    if how == "without a word":
        time.sleep(300)
    if how == "sys.exit":
        sys.exit("no more")
    return socket.socket()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("exit code", "rank 0 .*exit code 7"),
        ("sys.exit", "SystemExit: no more"),
        ("socket", "what rank 0 returned cannot be sent between processes"),
        ("without a word", "rank 0 ended before its function did, without an error"),
    ],
)
def test_every_way_to_leave_is_reported(traces: Traces, how: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(leave, how, nproc=1 + (how == "without a word"), timeout=60, env=traces.env, **REAL)
    assert traces.gone()


SCRIPT = """
import os, signal, sys, time
import torch.distributed as dist
from laga_core import launch

class Local:  # as a user writes it: no module, no main guard
    pass

def wait(marker):
    open(marker + str(dist.get_rank()), "w").close()
    time.sleep(300)

before = signal.getsignal(signal.SIGINT)
try:
    launch(wait, sys.argv[1], nproc=2, device="cpu")
except KeyboardInterrupt:
    print("interrupted", launch(lambda: type(Local()).__name__, nproc=1, device="cpu"), flush=True)
assert signal.getsignal(signal.SIGINT) is before
print("waiting", flush=True)
try:
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted again", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path, traces: Traces) -> Iterator[subprocess.Popen[str]]:
    """A script whose two ranks are running."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = os.environ | traces.env | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(path), str(tmp_path / "rank")], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert wait_until(lambda: len(list(tmp_path.glob("rank*"))) == 2, 90)
    yield process
    process.kill()
    process.communicate()


def test_an_interrupt_ends_the_ranks_and_the_script_goes_on(script: subprocess.Popen[str], traces: Traces) -> None:
    script.send_signal(signal.SIGINT)
    assert script.stdout is not None
    assert script.stdout.readline() == "interrupted ['Local']\n"
    assert script.stdout.readline() == "waiting\n"
    assert len(traces.alive()) == 1, "only the script itself should be left"
    script.send_signal(signal.SIGINT)
    assert script.communicate(timeout=20)[0] == "interrupted again\n"
    assert script.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_the_launching_process(
    script: subprocess.Popen[str], traces: Traces, number: signal.Signals
) -> None:
    script.send_signal(number)
    script.wait(10)
    assert traces.gone(within=5), traces.alive()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the agent ends when its store does not answer")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_agent_outlives_a_launching_process_that_ends_at_once(traces: Traces, number: signal.Signals) -> None:
    code = (
        "from laga_core import launch; import torch.distributed as dist; launch(dist.get_rank, nproc=2, device='cpu')"
    )
    for wait in (0.0, 1.0):  # while the agent is still being imported, and a little later
        with subprocess.Popen([sys.executable, "-c", code], env=os.environ | traces.env, cwd=ROOT) as process:
            assert wait_until(lambda: any("agent_main" in each for each in traces.alive()), 60)
            time.sleep(wait)
            process.send_signal(number)
        assert traces.gone(within=15), traces.alive()


@pytest.mark.parametrize("arguments", [{"timeout": float("nan")}, {"timeout": -1.0}, {"nproc": 0}, {"nnodes": -3}])
def test_joining_with_bad_numbers(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(arguments))} must be"):
        join("127.0.0.1:9", **arguments)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_a_notebook_kernel(traces: Traces) -> None:
    from jupyter_client.manager import start_new_kernel

    environment = os.environ | traces.env | {"PYTHONPATH": str(ROOT)}
    del environment["PYTEST_CURRENT_TEST"]  # under which a kernel does not show what its children print
    manager, client = start_new_kernel(env=environment)
    try:

        def run(code: str, interrupt_after: str | None = None) -> tuple[str, str]:
            printed: list[str] = []

            def on_output(message: dict[str, Any]) -> None:
                if message["msg_type"] == "stream":
                    printed.append(message["content"]["text"])
                    if interrupt_after and interrupt_after in printed[-1]:
                        manager.interrupt_kernel()

            reply = client.execute_interactive(textwrap.dedent(code), output_hook=on_output, timeout=90)["content"]
            return reply.get("ename", reply["status"]), "".join(printed)

        prepare = """
            import time, torch, torch.distributed as dist
            from laga_core import launch
            def work(x):
                return dist.get_rank() + x
            def wait():
                print(f"rank {dist.get_rank()} waits", flush=True)
                time.sleep(300)
        """
        call = "print(launch(work, 10, nproc=2, device='cpu'))"
        assert run(prepare) == ("ok", "")
        assert run(call) == ("ok", "[10, 11]\n")
        status, _ = run("launch(wait, nproc=2, device='cpu')", interrupt_after="waits")
        assert status == "KeyboardInterrupt"
        assert len(traces.alive()) == 1, "only the kernel itself should be left"
        assert run(call) == ("ok", "[10, 11]\n")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


# --- bad input is refused before any process starts


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"nproc": -1}, ValueError, "nproc must be at least 0, got -1"),
        ({"nproc": 0}, ValueError, "nproc=0 runs no rank here"),
        ({"nproc": 2.0}, TypeError, "nproc must be an integer"),
        ({"nproc": True}, TypeError, "nproc must be an integer"),
        ({"nnodes": 0}, ValueError, "nnodes must be at least 1"),
        ({"threads_per_rank": -2}, ValueError, "threads_per_rank must be at least 1"),
        ({"threads_per_rank": 0}, ValueError, "threads_per_rank must be at least 1"),
        ({"timeout": 0}, ValueError, "timeout must be a positive number"),
        ({"timeout": float("inf")}, ValueError, "timeout must be a positive number"),
        ({"timeout": "5"}, TypeError, "timeout must be a number of seconds"),
        ({"preload": "laga_core"}, TypeError, "preload must be a list of names"),
        ({"preload": [3]}, TypeError, "preload must be a list of names"),
        ({"hosts": "node-a", "nnodes": 2, "endpoint": "127.0.0.1:9"}, TypeError, "hosts must be a list of names"),
        ({"env": ["A=1"]}, TypeError, "env must map names"),
        ({"endpoint": 29500}, TypeError, "endpoint must be a string"),
        ({"interface": ["eth0"]}, TypeError, "interface must be a string"),
        ({"backend": torch.device("cpu")}, TypeError, "backend must be a string"),
        ({"join_timeout": float("nan")}, ValueError, "join_timeout must be a positive number"),
        ({"nnodes": 2}, ValueError, "needs an endpoint with a port"),
        ({"endpoint": "29500"}, ValueError, "endpoint must be 'HOST:PORT'"),
        ({"endpoint": "localhost:http"}, ValueError, "endpoint must be 'HOST:PORT'"),
        ({"endpoint": "192.0.2.1:29500"}, RuntimeError, "cannot listen on endpoint 192.0.2.1:29500"),
        ({"endpoint": "no-such-host.invalid:29500"}, RuntimeError, "cannot listen on endpoint"),
        ({"device": "tpu"}, ValueError, "unknown device 'tpu'; known: cpu, cuda, npu"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=message):
        launch(one_hangs, **{"nproc": 1, "device": "cpu"} | options)
    assert time.monotonic() - start < 5


def test_more_ranks_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["laga_core.launch"]
    monkeypatch.setattr(module, "resolve_device", lambda _: torch.device("cuda"))
    monkeypatch.setattr(module, "device_count", lambda _: 4)
    with pytest.raises(ValueError, match=r"nproc=5 is more than this machine's 4 cuda devices.*device='cpu'"):
        launch(one_hangs, nproc=5)


def test_arguments_that_cannot_travel_are_named() -> None:
    with pytest.raises(TypeError, match=r"argument 1 of look cannot be sent between processes"):
        launch(look, 1, threading.Lock(), nproc=1, device="cpu")
    with pytest.raises(TypeError, match=r"argument 'scale' of look cannot"):
        launch(look, 1, scale=socket.socket(), nproc=1, device="cpu")
    with pytest.raises(TypeError, match="fn must be a function"):
        launch("look", nproc=1)  # type: ignore[arg-type]


# --- several nodes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_port_in_use_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=rf"cannot listen on endpoint 127.0.0.1:{port}.*no other launch"):
            launch(one_hangs, nproc=1, device="cpu", endpoint=f"127.0.0.1:{port}")


def test_nodes_that_do_not_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAGA_HOSTS", "a17,a18")
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(LaunchTimeout, match=rf"0 of the 2 nodes .* missing: a17, a18\. Run .* join .*{endpoint}"):
        launch(one_hangs, nproc=0, nnodes=2, device="cpu", endpoint=endpoint, join_timeout=0.5)


def test_joining_where_no_launch_is() -> None:
    with pytest.raises(LaunchTimeout, match=r"found no launch at 127\.0\.0\.1:9 within 0\.3 s"):
        join("127.0.0.1:9", 1, timeout=0.3)


def place() -> tuple[int, int, str, str]:
    total = torch.ones(250_000)  # 1 MB
    dist.all_reduce(total)
    namespace = os.readlink("/proc/self/ns/net")
    return dist.get_rank(), int(total[0]), namespace, os.environ["GLOO_SOCKET_IFNAME"]


def wait_for_the_end(marker: str) -> None:
    dist.barrier()
    Path(marker).touch()
    time.sleep(300)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces joined by a link: 10.77.0.1 in the first, 10.77.0.2 in the second."""
    require_root("network namespaces")
    names = [f"laga-{uuid.uuid4().hex[:6]}" for _ in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, timeout=10)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link1", "netns", names[1])
        for number, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"link{number}")
            ip("-n", name, "link", "set", f"link{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=10)


def require_root(what: str) -> None:
    """Skip where this machine cannot have ``what``; in CI, fail."""
    import shutil

    if os.geteuid() != 0 or shutil.which("ip") is None:
        unavailable(f"{what} need root and iproute2")


LAUNCHING_NODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from test_launch import place, wait_for_the_end
from laga_core.launch import LaunchError, dismiss, launch

where = dict(nproc=1, nnodes=2, device="cpu", endpoint="10.77.0.1:29577", join_timeout=60)
for _ in range(2):
    print(launch(place, **where), flush=True)
dismiss("10.77.0.1:29577", 1)
try:
    launch(wait_for_the_end, sys.argv[2], hosts=["second"], **where)
except LaunchError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_nodes_over_network_namespaces(namespaces: list[str], traces: Traces, tmp_path: Path) -> None:
    marker = tmp_path / "both run"
    environment = os.environ | traces.env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def inside(namespace: str, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    first = inside(namespaces[0], "-c", LAUNCHING_NODE, str(ROOT / "tests"), str(marker))
    joining = [
        "-m",
        "laga_core",
        "join",
        "--endpoint",
        "10.77.0.1:29577",
        "--nproc",
        "2",
        "--nnodes",
        "2",
        "--name",
        "second",
    ]
    second = inside(namespaces[1], *joining)
    running = [first, second]
    try:
        assert second.communicate(timeout=90)[0].endswith("served 2 launches\n"), (
            "it should serve both, and be dismissed"
        )
        running.append(inside(namespaces[1], *joining))
        assert wait_until(marker.exists, 60)
        running[-1].kill()  # ... and its ranks are cut off
        start = time.monotonic()
        printed = [line for line in first.communicate(timeout=40)[0].splitlines() if "socket.cpp" not in line]
        assert time.monotonic() - start < 25
        assert traces.gone(within=5), traces.alive()
    finally:
        for process in running:
            process.kill()
            process.communicate()
    for line in printed[:2]:
        ranks = eval(line)
        assert [rank[:2] for rank in ranks] == [(0, 3), (1, 3), (2, 3)]
        assert ranks[0][2] != ranks[1][2] == ranks[2][2], "ranks 1 and 2 should be in the other namespace"
        assert [rank[3] for rank in ranks] == ["link0", "link1", "link1"]
    assert printed[2].startswith("node second gave no sign of life"), printed


def finish_late() -> int:
    time.sleep(7.0 * dist.get_rank())  # longer than an agent that is done waits for the others
    return dist.get_rank()


def test_a_node_may_be_done_long_before_another(traces: Traces) -> None:
    where: dict[str, Any] = {"nproc": 1, "nnodes": 2, "endpoint": f"127.0.0.1:{free_port()}", "timeout": 60}
    joining = threading.Thread(target=join, args=(where["endpoint"], 1), kwargs={"timeout": 5.0})
    joining.start()
    assert launch(finish_late, env=traces.env, **where, **REAL) == [0, 1]
    joining.join(30)


def test_dismissing_nodes_that_are_not_there() -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with pytest.raises(LaunchTimeout, match="only 0 of 2 nodes came"):
        dismiss(endpoint, 2, timeout=0.2)
