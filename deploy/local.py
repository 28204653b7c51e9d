"""Child servers of the local all-in-one: started in process groups of their own, watched, and stopped whole.

Each server's output goes to a file in the run directory. Whatever way the block is left, every child and
everything that it started is gone: first SIGTERM so that it drains, then SIGKILL for what remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.command import CommandError

_POLL_S = 0.25
_PROBE_TIMEOUT_S = 2.0
_TAIL_LINES = 15


class LocalError(CommandError):
    """A server did not come up or went away. The message names its log and quotes its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """One server to run.

    Attributes:
        name: Such as `edge`; its log is `<name>.log`.
        arguments: Of the `forebay` command.
        address: `host:port` where it answers.
        service: Full gRPC service name whose health means readiness.
        ready_s: Most seconds until it serves.
        stop_s: Most seconds to drain after SIGTERM.
    """

    name: str
    arguments: tuple[str, ...]
    address: str
    service: str
    ready_s: float
    stop_s: float = 15.0


@dataclass(slots=True)
class Server:
    """A running child."""

    spec: ServerSpec
    process: subprocess.Popen[bytes]
    log: Path
    stopped: bool = field(default=False)

    def ended(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.process.poll()


def start_server(spec: ServerSpec, *, run_directory: Path, env: Mapping[str, str]) -> Server:
    """Start a child; it ends by itself should this process be killed."""
    log = run_directory / f"{spec.name}.log"
    with log.open("ab") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.child", *spec.arguments],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
    return Server(spec=spec, process=process, log=log)


async def wait_ready(server: Server, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Wait until the server's health says SERVING.

    Raises:
        LocalError: It ended, or was not ready in time.
    """
    spec = server.spec
    deadline = clock() + spec.ready_s
    async with grpc.aio.insecure_channel(spec.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=spec.service)
        while True:
            if (code := server.ended()) is not None:
                raise LocalError(f"the {spec.name} ended with exit code {code}; {quote(server)}")
            with contextlib.suppress(grpc.aio.AioRpcError):
                answer = await health.Check(request, timeout=_PROBE_TIMEOUT_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            if clock() >= deadline:
                raise LocalError(f"the {spec.name} was not ready in {spec.ready_s:.0f} s; {quote(server)}")
            await asyncio.sleep(_POLL_S)


def stop_servers(servers: Sequence[Server]) -> None:
    """Stop them side by side. Returns when no process of theirs is left."""
    families = {id(server): _family(server.process.pid) for server in servers}
    for server in servers:
        if server.ended() is None:
            with contextlib.suppress(ProcessLookupError):
                server.process.send_signal(signal.SIGTERM)
    for server in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(server.spec.stop_s)
        left = {*families[id(server)], *_family(server.process.pid)}
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if server.ended() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
        psutil.wait_procs(list(left), timeout=5.0)
        server.stopped = True


@contextlib.asynccontextmanager
async def running(
    specs: Sequence[ServerSpec], *, run_directory: Path, env: Mapping[str, str]
) -> AsyncIterator[list[Server]]:
    """Start every server, and stop them all when the block is left. Readiness is the caller's to await."""
    servers: list[Server] = []
    try:
        for spec in specs:  # one by one: a failure must stop those already started
            servers.append(start_server(spec, run_directory=run_directory, env=env))  # noqa: PERF401
        yield servers
    finally:
        # In a thread, shielded: a second ctrl-C must not leave children behind.
        await asyncio.shield(asyncio.to_thread(stop_servers, list(reversed(servers))))


async def first_to_end(servers: Sequence[Server]) -> Server:
    """Wait until one of the servers has ended by itself."""
    while True:
        for server in servers:
            if server.ended() is not None:
                return server
        await asyncio.sleep(_POLL_S)


def quote(server: Server) -> str:
    """Where a server's log is, and its last lines."""
    try:
        lines = server.log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join([f"{server.log} ends:", *(line[:300] for line in lines[-_TAIL_LINES:])])


def free_port(preferred: int) -> int:
    """`preferred` on loopback when nothing listens there, else one that the system picks."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return int(probe.getsockname()[1])
    raise LocalError("there is no free port on the loopback interface")


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []
