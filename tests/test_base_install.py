"""The base install alone serves an edge node: no torch, no transformers, no vLLM."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.places import edge_release

ROOT = Path(__file__).parents[1]

_SERVE = """
import asyncio, importlib.util, sys
from pathlib import Path
import grpc.aio
from edge.serve import EdgeServer
from edge.settings import EdgeSettings, ReleaseSettings, ServerSettings
from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc

heavy = ["torch", "transformers", "vllm", "onnx", "onnxruntime_genai", "httpx", "bitsandbytes"]
found = [name for name in heavy if importlib.util.find_spec(name)]
assert not found, found

async def main():
    server = EdgeServer(EdgeSettings(
        server=ServerSettings(listen="127.0.0.1:0"),
        release=ReleaseSettings(store=Path(sys.argv[1]), variant="int4"),
    ))
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.address) as channel:
            reply = await inference_pb2_grpc.InferenceServiceStub(channel).Generate(
                inference_pb2.GenerateRequest(
                    model="support-bot",
                    messages=[common_pb2.ChatMessage(role=common_pb2.ROLE_USER, content="Say hello.")],
                    sampling=common_pb2.SamplingParams(max_tokens=8),
                    policy=common_pb2.RoutingPolicy(tier=common_pb2.TIER_POLICY_EDGE_ONLY),
                ),
                timeout=60,
            )
            assert reply.text, reply
            print("answered:", reply.text)
    finally:
        await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_a_base_install_serves_an_edge_node(release_store: Path, tmp_path: Path) -> None:
    assert edge_release().is_dir()
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, timeout=120)
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for part in ("protos", "router", "edge", "cloud", "deploy"):
        shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
    requirements = ROOT / "deploy" / "requirements" / "base.txt"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--requirement", str(requirements)], check=True, timeout=400)
    subprocess.run([*pip, "--no-deps", str(source)], check=True, timeout=200)
    served = subprocess.run(
        [str(python), "-c", _SERVE, str(release_store)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert served.returncode == 0, served.stderr
    assert "answered:" in served.stdout
    help_ = subprocess.run(
        [str(python.with_name("forebay")), "edge", "serve", "--help"],
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert help_.returncode == 0
