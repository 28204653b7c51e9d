"""The supervisor with real processes: a small fake engine as the child."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from cloud.vllm.client import VllmClient
from cloud.vllm.command import VllmCommand
from cloud.vllm.launcher import RotatingLog
from cloud.vllm.lifecycle import Phase, RestartPolicy
from cloud.vllm.process import LogSpec
from cloud.vllm.supervisor import EngineStartFailed, VllmSupervisor
from protos.errors import EngineUnavailable
from tests.fakes.waiting import alive, eventually

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where Linux shows it
FAKE_ENGINE = Path(__file__).parents[2] / "fakes" / "openai_server.py"
POLICY = RestartPolicy(startup_timeout_s=30.0, stop_grace_s=3.0, first_backoff_s=0.05, max_backoff_s=0.1)


class Supervised:
    """A supervisor and what it has reported."""

    def __init__(self, supervisor: VllmSupervisor, phases: list[Phase], log: LogSpec) -> None:
        self.supervisor = supervisor
        self.phases = phases
        self.log = log

    def engine_process(self) -> psutil.Process:
        pid = self.supervisor.pid
        assert pid is not None
        return next(p for p in psutil.Process(pid).children() if "openai_server" in " ".join(p.cmdline()))


async def nothing() -> None:
    return None


@asynccontextmanager
async def supervise(
    directory: Path,
    *arguments: str,
    argv: tuple[str, ...] | None = None,
    policy: RestartPolicy = POLICY,
    warm_up: Callable[[], object] = nothing,
) -> AsyncIterator[Supervised]:
    socket_path = directory / "s"
    client = VllmClient.connect(f"unix://{socket_path}", model="m", max_connections=2, connect_timeout_s=1.0)
    phases: list[Phase] = []
    log = LogSpec(path=directory / "log" / "vllm.log", max_bytes=4096, keep=1)
    supervisor = VllmSupervisor(
        VllmCommand(
            argv=argv or (sys.executable, str(FAKE_ENGINE), "--uds", str(socket_path), *arguments),
            environment=dict(os.environ),
        ),
        socket_path=socket_path,
        log=log,
        policy=policy,
        healthy=lambda: client.healthy(2.0),
        warm_up=warm_up,  # type: ignore[arg-type]
        health_interval_s=0.02,
        clock=time.monotonic,
        random=random.random,
        listener=phases.append,
    )
    supervisor.start()
    try:
        yield Supervised(supervisor, phases, log)
    finally:
        await supervisor.stop()
        await client.aclose()


async def test_it_becomes_ready_keeps_the_log_and_stops_clean(socket_dir: Path) -> None:
    async with supervise(socket_dir, "--say", "hello from the engine") as s:
        await s.supervisor.wait_ready()
        launcher, engine = s.supervisor.pid, s.engine_process().pid
        assert launcher is not None
        assert "hello from the engine" in s.log.tail()
    assert s.phases == [Phase.STARTING, Phase.READY, Phase.STOPPING, Phase.STOPPED]
    assert not alive(launcher)
    assert not alive(engine)


@pytest.mark.parametrize("victim", ["engine", "launcher"])
async def test_a_killed_child_is_reported_and_comes_back(socket_dir: Path, victim: str) -> None:
    async with supervise(socket_dir) as s:
        await s.supervisor.wait_ready()
        engine, launcher = s.engine_process().pid, s.supervisor.pid
        assert launcher is not None
        os.kill(engine if victim == "engine" else launcher, signal.SIGKILL)
        await eventually(lambda: Phase.BACKOFF in s.phases)
        await eventually(lambda: s.supervisor.phase is Phase.READY)
        assert s.supervisor.restarts == 1
        assert not alive(engine)
        assert not alive(launcher)


async def test_a_worker_that_outlives_its_killed_engine_is_not_left_behind(socket_dir: Path) -> None:
    pid_file = socket_dir / "worker"
    async with supervise(socket_dir, "--with-worker", str(pid_file)) as s:
        await s.supervisor.wait_ready()
        worker = int(pid_file.read_text())
        assert alive(worker)
        s.engine_process().kill()
        await eventually(lambda: Phase.BACKOFF in s.phases)
        await eventually(lambda: not alive(worker), timeout_s=5.0)


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="shared memory is seen as files on Linux only")
async def test_a_killed_engine_leaves_no_shared_memory(socket_dir: Path) -> None:
    name_file = socket_dir / "memory"
    async with supervise(socket_dir, "--with-memory", str(name_file)) as s:
        await s.supervisor.wait_ready()
        await eventually(lambda: name_file.exists() and bool(name_file.read_text()))
        memory = SHARED_MEMORY / name_file.read_text()
        assert memory.exists()
        s.engine_process().kill()
        await eventually(lambda: Phase.BACKOFF in s.phases)
        await eventually(lambda: not memory.exists(), timeout_s=5.0)


async def test_nothing_is_left_when_the_server_itself_is_killed(socket_dir: Path) -> None:
    pid_file = socket_dir / "worker"
    # It stands for the cloud server: it starts the launcher as `EngineProcess` does, and is killed.
    script = (
        "import subprocess, sys\n"
        "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(p.pid, flush=True)\n"
        "p.wait()\n"
    )
    server = subprocess.Popen(  # noqa: ASYNC220 - returns at once
        [
            *(sys.executable, "-c", script, sys.executable, "-m", "cloud.vllm.launcher"),
            *("--log", str(socket_dir / "l"), "--log-max-bytes", "4096", "--log-keep", "1"),
            *("--grace-s", "60", "--", sys.executable, str(FAKE_ENGINE)),
            *("--uds", str(socket_dir / "s"), "--with-worker", str(pid_file)),
        ],
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    launcher = int(await asyncio.to_thread(server.stdout.readline))
    await eventually(lambda: pid_file.exists() and bool(pid_file.read_text()))
    processes = [launcher, int(pid_file.read_text()), *(p.pid for p in psutil.Process(launcher).children())]
    server.kill()
    server.wait()
    await eventually(lambda: not any(alive(pid) for pid in processes))


async def test_a_child_that_ends_at_once_fails_the_start_with_its_log(socket_dir: Path) -> None:
    argv = (sys.executable, "-c", "import sys; print('no such model'); sys.exit(3)")
    async with supervise(socket_dir, argv=argv) as s:
        with pytest.raises(EngineStartFailed) as caught:
            await s.supervisor.wait_ready()
        assert "no such model" in caught.value.log_tail
        await eventually(lambda: s.supervisor.restarts >= 2)
        assert Phase.READY not in s.phases


async def test_a_child_that_never_answers_is_killed_at_the_startup_timeout(socket_dir: Path) -> None:
    policy = RestartPolicy(startup_timeout_s=0.5, stop_grace_s=1.0, first_backoff_s=30.0)
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    async with supervise(socket_dir, argv=argv, policy=policy) as s:
        launcher = s.supervisor.pid
        with pytest.raises(EngineStartFailed):
            await s.supervisor.wait_ready()
        await eventually(lambda: s.supervisor.pid is None)
        assert launcher is None or not alive(launcher)


async def test_it_is_not_ready_before_the_warm_up_has_passed(socket_dir: Path) -> None:
    attempts = 0

    async def warm_up() -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise EngineUnavailable("not yet", retry_after_s=1.0)

    async with supervise(socket_dir, warm_up=warm_up) as s:
        await s.supervisor.wait_ready()
        assert attempts == 3


async def test_a_child_deaf_to_sigterm_is_killed_after_its_grace(socket_dir: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('deaf', flush=True); time.sleep(600)"
    )
    policy = RestartPolicy(startup_timeout_s=30.0, stop_grace_s=0.2)
    async with supervise(socket_dir, argv=(sys.executable, "-c", deaf), policy=policy) as s:
        await eventually(lambda: "deaf" in s.log.tail())
        launcher = s.supervisor.pid
        assert launcher is not None
        await s.supervisor.stop()
        assert s.supervisor.phase is Phase.STOPPED
        assert not alive(launcher)


def test_the_log_is_rotated_by_size_and_old_ones_are_dropped(tmp_path: Path) -> None:
    log = RotatingLog(tmp_path / "v.log", max_bytes=10, keep=2)
    for letter in b"abcde":
        log.write(bytes([letter]) * 8)
    contents = {path.name: path.read_bytes()[:1] for path in tmp_path.iterdir()}
    assert contents == {"v.log": b"e", "v.log.1": b"d", "v.log.2": b"c"}
