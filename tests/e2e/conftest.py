"""Fixtures of the end-to-end tests: real models, real vLLM at tensor parallel 2, real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.cloud_process import CloudProcess
from tests.fakes.waiting import alive

# vLLM loads in about 45 s on two idle cores, and in several times that on busy ones.
START_TIMEOUT_S = 420.0


def cloud_toml(store: Path, directory: Path) -> str:
    """Settings of a cloud server as small as vLLM at tensor parallel 2 gets."""
    return f"""
[server]
listen = "127.0.0.1:0"
default_deadline_s = 240.0
[release]
store = "{store}"
line = "support-bot"
version = 1
[vllm]
tensor_parallel_size = 2
enforce_eager = true
max_model_len = 2048
cpu_kv_cache_gib = 1
first_backoff_s = 0.2
log_dir = "{directory}"
[admission]
max_running = 16
"""


@pytest.fixture(scope="session")
def real_cloud(release_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CloudProcess]:
    """The cloud tier serving `support-bot@1` on real vLLM, shared by the session. It must end clean."""
    directory = tmp_path_factory.mktemp("real-cloud")
    cloud = CloudProcess(directory, cloud_toml(release_store, directory))
    try:
        cloud.wait_serving(START_TIMEOUT_S)
        yield cloud
    finally:
        children = cloud.descendants()
        status = cloud.close()
    assert status == 0
    assert not [child for child in children if alive(child.pid)], "the engine outlived the cloud server"
