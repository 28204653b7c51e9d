"""A real cloud server in a process of its own, for tests that signal and kill it.

Not a fake itself: it runs `cloud.serve.serve` as the `forebay` command does, and reads the address.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE = "forebay.v1.CloudInferenceService"

_PROGRAM = (
    "import logging, os, pathlib, signal, sys, threading\n"
    "from cloud.serve import serve\n"
    "from cloud.settings import load\n"
    "logging.basicConfig(level=logging.INFO, stream=sys.stderr)\n"
    # Nothing is left behind by a test run that is killed: its end of the pipe goes with it.
    "def watch():\n"
    "    sys.stdin.read()\n"
    "    os.kill(os.getpid(), signal.SIGTERM)\n"
    "threading.Thread(target=watch, daemon=True).start()\n"
    "serve(load(pathlib.Path(sys.argv[1]), env=os.environ),\n"
    "      on_listening=lambda server: print(server.address, flush=True))\n"
)


class CloudProcess:
    """Started by `start`, ended by `close`. Blocking; use it from fixtures or in threads.

    Args:
        directory: For its settings and its log.
        toml: Its settings.
    """

    def __init__(self, directory: Path, toml: str, *, env: Mapping[str, str] | None = None) -> None:
        self.log_path = directory / "cloud.log"
        config = directory / "cloud.toml"
        config.write_text(toml)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.address = self._read_address(60.0)

    def wait_serving(self, timeout_s: float) -> None:
        """Return once health says SERVING. Raises AssertionError with the log's end otherwise."""
        end_s = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < end_s:
                assert self.process.poll() is None, f"the cloud server ended:\n{self.log_tail()}"
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(0.2)
        raise AssertionError(f"not serving within {timeout_s} s:\n{self.log_tail()}")

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self, timeout_s: float = 60.0) -> int:
        """SIGTERM, and the exit status. What is left after `timeout_s` is killed."""
        self.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            for process in self.descendants():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.kill()
            raise
        finally:
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]

    def _read_address(self, timeout_s: float) -> str:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline().decode().strip() if readable else ""
        if not line:
            self.kill()
            raise AssertionError(f"the cloud server did not listen:\n{self.log_tail()}")
        return line
