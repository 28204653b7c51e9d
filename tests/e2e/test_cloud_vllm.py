"""The cloud tier on real vLLM at tensor parallel 2: text, prefixes, labels, cancellation, crashes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.errors import EngineUnavailable
from protos.forebay.v1 import cloud_pb2, cloud_pb2_grpc, common_pb2
from protos.status import from_rpc_error
from tests.e2e.conftest import START_TIMEOUT_S, cloud_toml
from tests.fakes.cloud_process import SERVICE, CloudProcess
from tests.fakes.waiting import alive, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

RELEASE = common_pb2.ReleaseRef(line="support-bot", version=1)
# Generous: other work may hold the cores.
CALL_S = 240.0


@pytest.fixture
async def channel(real_cloud: CloudProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(real_cloud.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return cloud_pb2_grpc.CloudInferenceServiceStub(channel)


def ask(content: str, max_tokens: int, **fields: Any) -> cloud_pb2.CloudStreamGenerateRequest:
    return cloud_pb2.CloudStreamGenerateRequest(
        release=RELEASE,
        messages=[common_pb2.ChatMessage(role=common_pb2.ROLE_USER, content=content)],
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens),
        **fields,
    )


def long_text() -> cloud_pb2.CloudStreamGenerateRequest:
    """A request that goes on for long: a chat model may answer anything shortly, but counting has no end."""
    return cloud_pb2.CloudStreamGenerateRequest(
        release=RELEASE,
        prompt=", ".join(str(n) for n in range(1, 40)) + ",",
        sampling=common_pb2.SamplingParams(max_tokens=1500),
    )


async def run(stub: Any, request: cloud_pb2.CloudStreamGenerateRequest) -> tuple[str, cloud_pb2.CloudFinal]:
    call = stub.StreamGenerate(request, timeout=CALL_S)
    try:
        events = [event async for event in call]
    finally:
        call.cancel()
    assert [event.WhichOneof("event") for event in events[:-1]] == ["delta"] * (len(events) - 1)
    assert events[-1].HasField("final")
    return "".join(event.delta.text for event in events[:-1]), events[-1].final


def engine_front(cloud: CloudProcess) -> psutil.Process:
    """vLLM's own server process, the one that answers HTTP."""
    return next(p for p in cloud.descendants() if "vllm.entrypoints.openai.api_server" in p.cmdline())


def engine_client(cloud: CloudProcess) -> httpx.AsyncClient:
    """A client of vLLM itself, on its private socket."""
    argv = engine_front(cloud).cmdline()
    transport = httpx.AsyncHTTPTransport(uds=argv[argv.index("--uds") + 1])
    return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=30)


async def running_in(engine: httpx.AsyncClient) -> float:
    """vLLM's own count of running requests."""
    metrics = (await engine.get("/metrics")).text
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_requests_running{")]
    assert lines, "vLLM has renamed its metric"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def test_it_answers_with_the_model_of_the_release(stub: Any) -> None:
    text, final = await run(stub, ask("What is the capital of France? One short sentence.", 16))
    assert "Paris" in text
    assert final.release == RELEASE
    assert final.finish_reason in (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
    assert 1 <= final.completion_tokens <= 16
    assert final.prompt_tokens > 10
    assert final.time_to_first_token_s > 0


@pytest.mark.parametrize("prefix", ["The capital of France is", "The capital of France is "])
async def test_it_goes_on_right_behind_a_prefix_without_repeating_it(stub: Any, prefix: str) -> None:
    text, _ = await run(stub, ask("What is the capital of France?", 6, prefix_text=prefix))
    whole = prefix + text
    assert whole.startswith("The capital of France is Paris")
    assert whole.count("capital") == 1


async def test_the_same_seed_gives_the_same_text(stub: Any) -> None:
    request = ask("Name a colour.", 6)
    request.sampling.MergeFrom(common_pb2.SamplingParams(temperature=1.0, seed=7, top_p=0.9))
    assert (await run(stub, request))[0] == (await run(stub, request))[0]


async def test_labels_are_scored_by_likelihood(stub: Any) -> None:
    request = cloud_pb2.CloudClassifyRequest(
        release=RELEASE,
        text="I lost my card yesterday and need a new one.",
        labels=["exchange rate", "lost card", "top up by bank transfer"],
    )
    result = await stub.Classify(request, timeout=CALL_S)
    assert max(result.scores, key=lambda s: s.probability).label == "lost card"
    assert sum(s.probability for s in result.scores) == pytest.approx(1.0)
    assert all(s.log_likelihood < 0 and s.prior_log_likelihood < 0 for s in result.scores)


async def test_cancelling_the_call_aborts_the_request_inside_vllm_within_a_second(
    stub: Any, real_cloud: CloudProcess
) -> None:
    call = stub.StreamGenerate(long_text(), timeout=CALL_S)
    await call.read()
    async with engine_client(real_cloud) as engine:
        # The count follows the engine's steps, so it may lag behind the first token.
        async with asyncio.timeout(30):
            while await running_in(engine) == 0:  # noqa: ASYNC110 - vLLM's count
                await asyncio.sleep(0.02)
        steps_s = [time.monotonic()]
        for _ in range(4):
            await call.read()
            steps_s.append(time.monotonic())
        cancelled_s = time.monotonic()
        call.cancel()
        while await running_in(engine) > 0:
            assert time.monotonic() - cancelled_s < 30.0, "the request goes on inside vLLM"
            await asyncio.sleep(0.02)
        took_s = time.monotonic() - cancelled_s
    # vLLM finishes the step under way and counts in the next; on busy cores a step alone takes half a second.
    step_s = max(after - before for before, after in itertools.pairwise(steps_s))
    assert took_s < 1.0 + 2 * step_s, f"dropped after {took_s:.2f} s, with steps of {step_s:.2f} s"


async def test_a_killed_engine_is_a_typed_error_and_not_serving_and_heals(
    stub: Any, channel: grpc.aio.Channel, real_cloud: CloudProcess
) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE), timeout=START_TIMEOUT_S
    )
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    before = real_cloud.descendants()
    call = stub.StreamGenerate(long_text(), timeout=CALL_S)
    stream = aiter(call)
    await anext(stream)
    engine_front(real_cloud).kill()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stream:
            pass
    error = from_rpc_error(caught.value)
    assert isinstance(error, EngineUnavailable)
    assert error.retry_after_s > 0
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    # Neither vLLM's core nor its tensor-parallel workers are left behind.
    await eventually(lambda: not any(alive(process.pid) for process in before), timeout_s=20.0)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    assert "Paris" in (await run(stub, ask("What is the capital of France?", 10)))[0]


async def test_nothing_is_left_when_the_cloud_server_is_killed(release_store: Path, tmp_path: Path) -> None:
    cloud = await asyncio.to_thread(CloudProcess, tmp_path, cloud_toml(release_store, tmp_path))
    # The front, the core and both workers; loading the model is not needed for this.
    await eventually(lambda: len(cloud.descendants()) >= 5, timeout_s=START_TIMEOUT_S)
    processes = cloud.descendants()
    await asyncio.to_thread(cloud.kill)
    await eventually(lambda: not any(alive(process.pid) for process in processes), timeout_s=20.0)
