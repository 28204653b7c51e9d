"""A real edge node in a process of its own: `forebay edge serve`, its address read from its log.

Not a fake itself: it runs the command that users run. The caller gives the interpreter's command line.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_LISTENING = re.compile(r"edge node for \S+ \(\S+\) on (\S+:\d+)")


def edge_toml(store: Path, *, line: str = "support-bot", variant: str = "int4", threads: int = 0) -> str:
    """Settings of an edge node without a cloud, on a free port."""
    return f"""
[server]
listen = "127.0.0.1:0"
[release]
store = "{store}"
line = "{line}"
variant = "{variant}"
[engine]
threads = {threads}
"""


class EdgeProcess:
    """Starts at once and returns when it serves. Blocking; `close` ends it.

    Args:
        directory: For its settings and its log; also its working directory unless `cwd` is given.
        command: What `edge serve --config ...` is appended to.
    """

    def __init__(
        self, directory: Path, toml: str, *, command: Sequence[str], cwd: Path | None = None
    ) -> None:
        self.log_path = directory / "edge.log"
        config = directory / "edge.toml"
        config.write_text(toml)
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "edge", "serve", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd or directory,
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
            )
        self.address = self._read_address(120.0)

    def close(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, and the exit status. Killed when it takes longer than `timeout_s`."""
        self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise

    def _read_address(self, timeout_s: float) -> str:
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            ended = self.process.poll() is not None
            if found := _LISTENING.search(self.log_path.read_text(errors="replace")):
                return found[1]
            if ended:
                break
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        raise AssertionError(f"the edge node does not serve:\n{self.log_path.read_text()[-4000:]}")
