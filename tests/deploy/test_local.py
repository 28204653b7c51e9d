"""Children of the all-in-one come up, are watched, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deploy.local import (
    LocalError,
    Server,
    ServerSpec,
    first_to_end,
    free_port,
    running,
    stop_servers,
    wait_ready,
)

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


def spec(*arguments: str, ready_s: float = 5.0, stop_s: float = 0.5) -> ServerSpec:
    return ServerSpec(
        name="thing",
        arguments=arguments,
        address="127.0.0.1:1",
        service="some.Service",
        ready_s=ready_s,
        stop_s=stop_s,
    )


def start(code: str, log: Path) -> Server:
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=sink, stderr=sink, start_new_session=True
        )
    return Server(spec=spec(), process=process, log=log)


def wait_for_line(log: Path) -> str:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (text := log.read_text()).endswith("\n"):
            return text.strip()
        time.sleep(0.02)
    pytest.fail("the child said nothing")


async def test_a_server_that_ends_before_it_is_ready_is_an_error_with_its_log(tmp_path: Path) -> None:
    async with running(
        [spec("cloud", "serve", "--config", "/nowhere.toml", ready_s=60)],
        run_directory=tmp_path,
        env=os.environ,
    ) as servers:
        with pytest.raises(LocalError, match=r"exit code 2; .*thing\.log ends:\n.*no such settings file"):
            await wait_ready(servers[0])
        assert await first_to_end(servers) is servers[0]


async def test_a_server_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    server = start("import time; time.sleep(60)", tmp_path / "log")
    ticks = iter(range(0, 1000, 4))
    try:
        with pytest.raises(LocalError, match="not ready in 5 s"):
            await wait_ready(server, clock=lambda: float(next(ticks)))
    finally:
        stop_servers([server])


def test_a_stubborn_server_is_gone_with_its_grandchildren(tmp_path: Path) -> None:
    server = start(STUBBORN, tmp_path / "log")
    grandchild = int(wait_for_line(tmp_path / "log"))
    stop_servers([server])
    assert server.ended() == -signal.SIGKILL
    assert not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == psutil.STATUS_ZOMBIE


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    inner = (
        "from deploy.child import end_with_parent; end_with_parent();"
        "import time; print(1, flush=True); time.sleep(60)"
    )
    outer = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen([sys.executable, '-c', {inner!r}], stdout=subprocess.PIPE);"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)"
    )
    server = start(outer, tmp_path / "log")
    child = psutil.Process(int(wait_for_line(tmp_path / "log")))
    server.process.kill()
    server.process.wait()
    gone, _ = psutil.wait_procs([child], timeout=10)
    assert gone


def test_the_preferred_port_is_taken_when_it_is_free_and_left_when_not() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = int(taken.getsockname()[1])
        assert free_port(port) != port
    assert free_port(port) == port
