"""The cloud server as a process: signals, settings, exit status. The engine is a fake at an address."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc.aio
import pytest

from protos.errors import UnavailableError
from protos.forebay.v1 import cloud_pb2, cloud_pb2_grpc, common_pb2
from protos.status import from_rpc_error
from tests.fakes.cloud_process import CloudProcess
from tests.fakes.openai_server import FakeOpenAIServer
from tests.fakes.waiting import eventually


def settings_of(store: Path, engine: FakeOpenAIServer, grace_s: float) -> str:
    return (
        f'server = {{ listen = "127.0.0.1:0", drain_grace_s = {grace_s} }}\n'
        f'release = {{ store = "{store}" }}\n'
        f'engine = {{ url = "unix://{engine.socket_path}", health_interval_s = 0.05 }}\n'
    )


def ask() -> cloud_pb2.CloudStreamGenerateRequest:
    return cloud_pb2.CloudStreamGenerateRequest(
        release=common_pb2.ReleaseRef(line="support-bot", version=1),
        prompt="Hi",
        sampling=common_pb2.SamplingParams(max_tokens=8),
    )


async def test_sigterm_lets_the_running_request_end_and_exits_clean(
    store: Path, engine: FakeOpenAIServer, tmp_path: Path
) -> None:
    cloud = await asyncio.to_thread(CloudProcess, tmp_path, settings_of(store, engine, 20.0))
    try:
        await asyncio.to_thread(cloud.wait_serving, 60.0)
        async with grpc.aio.insecure_channel(cloud.address) as channel:
            engine.script.hold_after = 1
            call = cloud_pb2_grpc.CloudInferenceServiceStub(channel).StreamGenerate(ask(), timeout=60)
            stream = aiter(call)
            events = [await anext(stream)]
            cloud.terminate()
            await eventually(lambda: "stopping: draining" in cloud.log_tail())
            assert cloud.process.poll() is None
            engine.release.set()
            events += [event async for event in stream]
        assert "".join(event.delta.text for event in events) == "Hello there."
        assert events[-1].HasField("final")
        assert await asyncio.to_thread(cloud.process.wait, 30) == 0
    finally:
        await asyncio.to_thread(cloud.close)


async def test_a_second_signal_cuts_the_grace_short(
    store: Path, engine: FakeOpenAIServer, tmp_path: Path
) -> None:
    cloud = await asyncio.to_thread(CloudProcess, tmp_path, settings_of(store, engine, 300.0))
    await asyncio.to_thread(cloud.wait_serving, 60.0)
    async with grpc.aio.insecure_channel(cloud.address) as channel:
        engine.script.hold_after = 1
        call = cloud_pb2_grpc.CloudInferenceServiceStub(channel).StreamGenerate(ask(), timeout=60)
        await call.read()
        cloud.terminate()
        await eventually(lambda: "stopping: draining" in cloud.log_tail())
        assert await asyncio.to_thread(cloud.close, 30.0) == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc_error(caught.value), UnavailableError)


async def test_a_killed_server_is_a_typed_error_for_its_requests_and_drops_them_in_the_engine(
    store: Path, engine: FakeOpenAIServer, tmp_path: Path
) -> None:
    cloud = await asyncio.to_thread(CloudProcess, tmp_path, settings_of(store, engine, 20.0))
    await asyncio.to_thread(cloud.wait_serving, 60.0)
    async with grpc.aio.insecure_channel(cloud.address) as channel:
        engine.script.hold_after = 1
        call = cloud_pb2_grpc.CloudInferenceServiceStub(channel).StreamGenerate(ask(), timeout=60)
        await call.read()
        cloud.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc_error(caught.value), UnavailableError)
    await eventually(lambda: engine.running == 0)


def test_settings_that_cannot_be_end_the_process_with_the_reason(tmp_path: Path) -> None:
    config = tmp_path / "cloud.toml"
    config.write_text('release = { store = "nowhere" }\n')
    program = "import os, pathlib, sys; from cloud.serve import serve; from cloud.settings import load;"
    program += "serve(load(pathlib.Path(sys.argv[1]), env=os.environ))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(config)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "no release support-bot" in done.stderr
