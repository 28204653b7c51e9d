"""The hub is asked first where it is wanted, and never waited for."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud.authoring.hub import hub_answers, hub_is_wanted


class _Hub(http.server.BaseHTTPRequestHandler):
    """Knows one model; anything else is 404."""

    def do_GET(self) -> None:
        known = "/api/models/some/model" in self.path
        body = json.dumps({"id": "some/model", "sha": "0" * 40, "siblings": []} if known else {}).encode()
        self.send_response(200 if known else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def answers(repository: str, endpoint: str, tmp_path: Path) -> bool:
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    return hub_answers(repository, log=tmp_path / "hub.log", stop=threading.Event(), env=env)


def test_a_hub_that_knows_the_model_answers(hub: str, tmp_path: Path) -> None:
    assert answers("some/model", hub, tmp_path), (tmp_path / "hub.log").read_text()


def test_a_hub_that_does_not_know_it_counts_as_none(hub: str, tmp_path: Path) -> None:
    assert not answers("other/model", hub, tmp_path)


def test_no_hub_is_told_within_seconds(tmp_path: Path) -> None:
    started = time.monotonic()
    assert not answers("some/model", "http://127.0.0.1:1", tmp_path)
    assert (
        time.monotonic() - started < 20
    )  # three seconds of waiting, and the library's import on a busy machine


@pytest.mark.parametrize("env", [{"FOREBAY_HUB": "off"}, {"HF_HUB_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "true"}])
def test_the_environment_switches_hubs_off(env: dict[str, str]) -> None:
    assert not hub_is_wanted(env)
    assert hub_is_wanted({})
