"""The base install alone serves an edge node: a venv with `deploy/requirements/base.txt` and nothing else."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from protos.forebay.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.fakes.edge_process import EdgeProcess, edge_toml

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("edge", "cloud", "router", "protos", "deploy")
ABSENT = ("torch", "transformers", "vllm", "httpx", "onnx", "onnxruntime_genai", "pytest")


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new venv that holds the base requirements and this package."""
    directory = tmp_path_factory.mktemp("base-install")
    source = directory / "source"
    source.mkdir()
    for name in (*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        # A copy, so that the build leaves nothing in the repository.
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    with_uv = importlib.util.find_spec("uv") is not None
    venv.create(directory / "venv", with_pip=not with_uv, symlinks=True)
    python = directory / "venv" / "bin" / "python"
    install = (
        [sys.executable, "-m", "uv", "pip", "install", "-p", str(python)]
        if with_uv
        else [str(python), "-m", "pip", "install"]
    )
    requirements = ROOT / "deploy" / "requirements" / "base.txt"
    _run([*install, "-r", str(requirements)])
    _run([*install, "--no-deps", str(source)])
    return python


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_it_holds_no_training_or_cloud_library(base_python: Path, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {ABSENT!r} if u.find_spec(n)])"
    done = subprocess.run(
        [base_python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_it_serves_and_answers(
    base_python: Path, release_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = next((base_python.parents[1] / "lib").glob("python*/site-packages"))
    size_bytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    with capsys.disabled():
        print(f"\nbase install: {size_bytes / 1e6:.0f} MB in site-packages")  # noqa: T201 - for the reader
    command = [str(base_python.parent / "forebay")]
    edge = EdgeProcess(tmp_path, edge_toml(release_store), command=command)
    try:
        async with grpc.aio.insecure_channel(edge.address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            answer = await stub.Generate(
                inference_pb2.GenerateRequest(
                    model="support-bot",
                    messages=[
                        common_pb2.ChatMessage(
                            role=common_pb2.ROLE_USER, content="What is the capital of France?"
                        )
                    ],
                    sampling=common_pb2.SamplingParams(max_tokens=16),
                    policy=common_pb2.RoutingPolicy(tier=common_pb2.TIER_POLICY_EDGE_ONLY),
                ),
                timeout=60,
            )
    finally:
        status = edge.close()
    assert "Paris" in answer.text
    assert answer.decision.tier == common_pb2.TIER_EDGE
    assert status == 0
