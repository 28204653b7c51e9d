"""The cloud server over gRPC, in front of a fake engine at an address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cloud.serve import CloudServer
from cloud.settings import (
    AdmissionSettings,
    CloudSettings,
    EngineSettings,
    ReleaseSettings,
    ServerSettings,
)
from deploy.certs import make_dev_certs
from protos.auth import ApiKey, AuthSettings, generate_key, hash_key
from protos.channel import open_channel
from protos.errors import (
    ContextTooLong,
    DeadlineExpired,
    EngineUnavailable,
    ForebayError,
    InvalidArgument,
    Overloaded,
    ReleaseMismatch,
    Unauthenticated,
    UnavailableError,
)
from protos.forebay.v1 import cloud_pb2, cloud_pb2_grpc, common_pb2
from protos.settings import SettingsError
from protos.status import from_rpc_error
from protos.tls import ClientTlsSettings, TlsSettings
from tests.fakes.openai_server import FakeOpenAIServer
from tests.fakes.waiting import eventually

SERVICE = "forebay.v1.CloudInferenceService"
RELEASE = common_pb2.ReleaseRef(line="support-bot", version=1)


@pytest.fixture
def settings(store: Path, engine: FakeOpenAIServer) -> CloudSettings:
    return CloudSettings(
        server=ServerSettings(listen="127.0.0.1:0", drain_grace_s=5.0),
        release=ReleaseSettings(store=store),
        engine=EngineSettings(url=f"unix://{engine.socket_path}", health_interval_s=0.02, unhealthy_limit=2),
        admission=AdmissionSettings(max_running=2, max_queued=1),
    )


@asynccontextmanager
async def serving(settings: CloudSettings) -> AsyncIterator[CloudServer]:
    server = CloudServer(settings, environment={})
    await server.start()
    try:
        await server.wait_ready()
        yield server
    finally:
        await server.stop(grace_s=0.0)


@pytest.fixture
async def server(settings: CloudSettings) -> AsyncIterator[CloudServer]:
    async with serving(settings) as server:
        yield server


@pytest.fixture
async def channel(server: CloudServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> Any:
    return cloud_pb2_grpc.CloudInferenceServiceStub(channel)


# The generated stub's asynchronous type exists for type checkers only.
Stub = Any
Request = cloud_pb2.CloudStreamGenerateRequest


def ask(content: str = "Hi", **fields: object) -> Request:
    message = common_pb2.ChatMessage(role=common_pb2.ROLE_USER, content=content)
    sampling = common_pb2.SamplingParams(max_tokens=8)
    return Request(**{"release": RELEASE, "messages": [message], "sampling": sampling, **fields})  # type: ignore[arg-type]


async def run(stub: Stub, request: Request, timeout_s: float = 10.0) -> tuple[str, cloud_pb2.CloudFinal]:
    text, final = "", None
    call = stub.StreamGenerate(request, timeout=timeout_s)
    try:
        async for event in call:
            assert final is None, "nothing comes after the final message"
            text += event.delta.text
            final = event.final if event.HasField("final") else None
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
    assert final is not None
    return text, final


def last_prompt(engine: FakeOpenAIServer) -> bytes:
    return bytes(engine.bodies("/v1/completions")[-1]["prompt"])


async def test_an_answer_is_its_deltas_and_one_final_message(stub: Stub, engine: FakeOpenAIServer) -> None:
    text, final = await run(stub, ask())
    assert text == "Hello there."
    assert final.release == RELEASE
    assert final.finish_reason == common_pb2.FINISH_REASON_STOP
    assert (final.prompt_tokens, final.completion_tokens) == (2, 3)
    assert final.time_to_first_token_s > 0
    assert last_prompt(engine) == b"Hi"


@pytest.mark.parametrize(
    ("request_", "prompt"),
    [
        (ask(prefix_text="The answer "), b"HiThe answer"),
        (ask(prefix_tokens=cloud_pb2.TokenIds(ids=[65, 66])), b"HiAB"),
        (Request(release=RELEASE, prompt="Once", prefix_text=" upon"), b"Once upon"),
        (Request(release=RELEASE, prompt_tokens=cloud_pb2.TokenIds(ids=[79, 75])), b"OK"),
        (
            Request(release=RELEASE, prompt_tokens=cloud_pb2.TokenIds(ids=[79]), prefix_text="é"),
            "Oé".encode(),
        ),
    ],
)
async def test_the_model_sees_the_prompt_and_right_behind_it_the_prefix(
    stub: Stub, engine: FakeOpenAIServer, request_: Request, prompt: bytes
) -> None:
    request_.sampling.max_tokens = 8
    await run(stub, request_)
    assert last_prompt(engine) == prompt


async def test_a_space_at_the_seam_is_not_doubled(stub: Stub, engine: FakeOpenAIServer) -> None:
    engine.script.reply = [" France", " is"]
    text, _ = await run(stub, ask(prefix_text="The capital of "))
    assert text == "France is"


async def test_the_trailers_name_the_release_that_answered(stub: Stub) -> None:
    call = stub.StreamGenerate(ask(), timeout=10)
    assert [event async for event in call]
    assert dict(await call.trailing_metadata())["forebay-release"] == "support-bot@1"


async def test_logprobs_come_when_asked_for(stub: Stub) -> None:
    request = ask()
    request.sampling.logprobs = 1
    call = stub.StreamGenerate(request, timeout=10)
    deltas = [event.delta async for event in call if event.HasField("delta")]
    assert [d.logprobs[0].token for d in deltas] == ["H", " ", "."]
    assert len(deltas[0].logprobs[0].top) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.ClearField("release"), "release.line"),
        (lambda r: r.ClearField("messages"), "messages"),
        (lambda r: setattr(r, "prompt", "both"), "prompt"),
        (lambda r: r.prompt_tokens.ids.append(1), "prompt_tokens"),
        (lambda r: r.prefix_tokens.ids.append(-1), "prefix_tokens.ids"),
        (lambda r: setattr(r.sampling, "temperature", float("nan")), "sampling.temperature"),
        (lambda r: setattr(r.sampling, "max_tokens", -1), "sampling.max_tokens"),
        (lambda r: setattr(r, "request_id", "x" * 200), "request_id"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(
    stub: Stub, engine: FakeOpenAIServer, change: Callable[[Request], None], field: str
) -> None:
    request = ask()
    change(request)
    before = len(engine.bodies("/v1/completions"))
    with pytest.raises(InvalidArgument) as caught:
        await run(stub, request)
    assert caught.value.field == field
    assert len(engine.bodies("/v1/completions")) == before


async def test_another_release_is_a_mismatch_that_names_the_served_one(stub: Stub) -> None:
    request = ask(release=common_pb2.ReleaseRef(line="support-bot", version=2))
    with pytest.raises(ReleaseMismatch) as caught:
        await run(stub, request)
    assert caught.value.metadata["served"] == "support-bot@1"
    with pytest.raises(grpc.aio.AioRpcError) as raw:
        await stub.Classify(
            cloud_pb2.CloudClassifyRequest(release=request.release, text="t", labels=["a", "b"]), timeout=5
        )
    assert raw.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_what_does_not_fit_the_context_is_refused_with_the_limit(stub: Stub) -> None:
    with pytest.raises(ContextTooLong) as caught:
        await run(stub, ask("x" * 250))
    assert caught.value.metadata["context_tokens"] == "256"


async def test_the_deadline_ends_the_work_in_the_engine(stub: Stub, engine: FakeOpenAIServer) -> None:
    engine.script.hold_after = 1
    with pytest.raises(DeadlineExpired):
        await run(stub, ask(), timeout_s=0.3)
    await eventually(lambda: engine.running == 0)


async def test_cancelling_the_call_ends_the_work_in_the_engine(
    stub: Stub, server: CloudServer, engine: FakeOpenAIServer
) -> None:
    engine.script.hold_after = 1
    call = stub.StreamGenerate(ask(), timeout=30)
    await call.read()
    assert engine.running == 1
    started_s = time.monotonic()
    call.cancel()
    await eventually(lambda: engine.running == 0)
    assert time.monotonic() - started_s < 1.0
    status = await stub.GetStatus(cloud_pb2.GetStatusRequest(), timeout=5)
    assert (status.running, status.queued) == (0, 0)


async def test_a_full_queue_sheds_and_late_work_is_dropped_before_it_is_started(
    stub: Stub, engine: FakeOpenAIServer
) -> None:
    engine.script.hold_after = 0
    warm = len(engine.bodies("/v1/completions"))
    running = [asyncio.create_task(run(stub, ask())) for _ in range(2)]
    await eventually(lambda: engine.running == 2)
    # Time enough to be seen in the queue on a busy machine, and too little to get out of it.
    waiting = asyncio.create_task(run(stub, ask(), timeout_s=2.0))
    for _ in range(500):
        status = await stub.GetStatus(cloud_pb2.GetStatusRequest(), timeout=5)
        if status.queued:
            break
    assert (status.running, status.queued, status.queue_capacity) == (2, 1, 1)
    with pytest.raises(Overloaded) as caught:
        await run(stub, ask())
    assert caught.value.retry_after_s > 0
    with pytest.raises(DeadlineExpired):
        await waiting
    engine.release.set()
    assert [text for text, _ in await asyncio.gather(*running)] == ["Hello there."] * 2
    assert len(engine.bodies("/v1/completions")) == warm + 2


async def test_an_engine_that_dies_in_mid_stream_is_a_typed_error_and_the_health_says_so(
    stub: Stub, channel: grpc.aio.Channel, engine: FakeOpenAIServer
) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE)
    watch = health.Watch(request, timeout=30)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    engine.script.hold_after = 1
    task = asyncio.create_task(run(stub, ask()))
    await engine.holding.wait()
    engine.script.healthy = False
    engine.drop_connections()
    with pytest.raises(EngineUnavailable) as caught:
        await task
    assert caught.value.retry_after_s > 0
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with pytest.raises(EngineUnavailable):
        await run(stub, ask())
    engine.script.healthy, engine.script.hold_after = True, None
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert (await run(stub, ask()))[0] == "Hello there."
    watch.cancel()


async def test_a_stop_lets_the_running_end_and_refuses_the_new(
    stub: Stub, server: CloudServer, engine: FakeOpenAIServer
) -> None:
    engine.script.hold_after = 1
    running = asyncio.create_task(run(stub, ask()))
    await engine.holding.wait()
    stopping = asyncio.create_task(server.stop())
    await eventually(lambda: server.draining)
    with pytest.raises(EngineUnavailable, match="stopping"):
        await run(stub, ask())
    assert not stopping.done()
    engine.release.set()
    assert (await running)[0] == "Hello there."
    await stopping


async def test_a_stop_cuts_off_what_outlasts_the_grace_with_an_error(
    settings: CloudSettings, engine: FakeOpenAIServer
) -> None:
    async with (
        serving(settings) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Stub = cloud_pb2_grpc.CloudInferenceServiceStub(channel)
        engine.script.hold_after = 1
        running = asyncio.create_task(run(stub, ask()))
        await engine.holding.wait()
        await server.stop(grace_s=0.05)
        with pytest.raises(ForebayError):
            await running
        await eventually(lambda: engine.running == 0)


async def test_labels_are_scored_less_their_prior_which_is_computed_once(
    stub: Stub, engine: FakeOpenAIServer
) -> None:
    request = cloud_pb2.CloudClassifyRequest(release=RELEASE, text="zz", labels=["zz", "yy"])
    first = await stub.Classify(request, timeout=10)
    calls = len([b for b in engine.bodies("/v1/completions") if "prompt_logprobs" in b])
    second = await stub.Classify(request, timeout=10)
    assert len([b for b in engine.bodies("/v1/completions") if "prompt_logprobs" in b]) == calls + 1
    assert [s.label for s in first.scores] == ["zz", "yy"]
    assert list(first.scores) == list(second.scores)
    # The fake model finds what it has seen before twice as likely: the text makes "zz" gain.
    assert first.scores[0].probability > 0.6
    assert sum(s.probability for s in first.scores) == pytest.approx(1.0)
    contexts = [bytes(p) for b in engine.bodies("/v1/completions") for p in b["prompt"] if "stream" not in b]
    assert contexts == [b"Topic: zz", b"Topic: yy", *([b"zz\nTopic: zz", b"zz\nTopic: yy"] * 2)]


async def test_a_text_too_long_to_classify_names_the_limit(stub: Stub) -> None:
    request = cloud_pb2.CloudClassifyRequest(release=RELEASE, text="t" * 300, labels=["a", "b"])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Classify(request, timeout=5)
    error = from_rpc_error(caught.value)
    assert isinstance(error, ContextTooLong)
    assert error.metadata["context_tokens"] == "256"


async def test_a_plain_openai_cluster_is_asked_by_its_chat_completions(
    settings: CloudSettings, engine: FakeOpenAIServer
) -> None:
    engine.script.plain = True
    engine.script.reply = [" Paris", "."]
    async with serving(settings) as server, grpc.aio.insecure_channel(server.address) as channel:
        stub: Stub = cloud_pb2_grpc.CloudInferenceServiceStub(channel)
        text, final = await run(stub, ask(prefix_text="It is "))
        assert text == "Paris."
        assert final.completion_tokens == 2
        (body,) = engine.bodies("/v1/chat/completions")
        assert body["messages"][-1] == {"role": "assistant", "content": "It is"}
        assert body["continue_final_message"] is True
        assert "top_k" not in body
        await run(stub, ask())
        assert "continue_final_message" not in engine.bodies("/v1/chat/completions")[-1]
        request = ask()
        request.sampling.logprobs = 1
        with pytest.raises(InvalidArgument) as caught:
            await run(stub, request)
        assert caught.value.field == "sampling.logprobs"


async def test_the_status_lists_the_release_only_while_the_engine_is_ready(
    stub: Stub, server: CloudServer, engine: FakeOpenAIServer
) -> None:
    status = await stub.GetStatus(cloud_pb2.GetStatusRequest(), timeout=5)
    assert list(status.ready_releases) == [RELEASE]
    engine.script.healthy = False
    await eventually(lambda: server.phase.value == "backoff")
    assert not (await stub.GetStatus(cloud_pb2.GetStatusRequest(), timeout=5)).ready_releases


async def test_with_mutual_tls_only_a_client_with_a_certificate_is_served(
    settings: CloudSettings, tmp_path: Path
) -> None:
    certs = make_dev_certs(tmp_path / "pki")
    tls = TlsSettings(
        cert_file=certs.cloud.cert_file, key_file=certs.cloud.key_file, client_ca_file=certs.ca.cert_file
    )
    known = ClientTlsSettings(
        ca_file=certs.ca.cert_file,
        cert_file=certs.edge_client.cert_file,
        key_file=certs.edge_client.key_file,
    )
    async with serving(msgspec.structs.replace(settings, tls=tls)) as server:
        async with open_channel(server.address, known) as channel:
            assert (await run(cloud_pb2_grpc.CloudInferenceServiceStub(channel), ask()))[0] == "Hello there."
        async with open_channel(server.address, ClientTlsSettings(ca_file=certs.ca.cert_file)) as channel:
            with pytest.raises(UnavailableError):
                await run(cloud_pb2_grpc.CloudInferenceServiceStub(channel), ask(), timeout_s=5.0)


async def test_with_keys_a_caller_without_one_is_refused_and_health_stays_open(
    settings: CloudSettings,
) -> None:
    key = generate_key()
    auth = AuthSettings(keys=[ApiKey(name="edge-1", sha256=hash_key(key))])
    async with (
        serving(msgspec.structs.replace(settings, auth=auth)) as server,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        stub: Stub = cloud_pb2_grpc.CloudInferenceServiceStub(channel)
        with pytest.raises(Unauthenticated):
            await run(stub, ask())
        status = await stub.GetStatus(
            cloud_pb2.GetStatusRequest(), timeout=5, metadata=[("authorization", f"Bearer {key}")]
        )
        assert list(status.ready_releases) == [RELEASE]
        health = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=5
        )
        assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_the_service_is_found_by_reflection(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]), timeout=5)
    names = [s.name for s in (await call.read()).list_services_response.service]
    assert SERVICE in names
    call.cancel()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"release": ReleaseSettings(store=Path("/nowhere"))}, "release.version"),
        ({"server": ServerSettings(listen="0.0.0.0:0")}, "tls.allow_plaintext"),
        ({"tls": TlsSettings(cert_file=Path("/none"))}, "tls"),
        ({"engine": EngineSettings(url="http://127.0.0.1:1", api_key_env="NO_SUCH")}, "engine.api_key_env"),
    ],
)
async def test_settings_that_cannot_be_are_refused_at_the_start(
    settings: CloudSettings, change: dict[str, object], key: str
) -> None:
    server = CloudServer(msgspec.structs.replace(settings, **change), environment={})
    with pytest.raises(SettingsError) as caught:
        await server.start()
    assert caught.value.key == key


async def test_a_port_that_is_taken_is_refused(settings: CloudSettings, server: CloudServer) -> None:
    taken = msgspec.structs.replace(settings, server=ServerSettings(listen=server.address))
    with pytest.raises(SettingsError) as caught:
        await CloudServer(taken, environment={}).start()
    assert caught.value.key == "server.listen"


async def test_the_version_must_be_in_the_store(settings: CloudSettings, store: Path) -> None:
    missing = msgspec.structs.replace(settings, release=ReleaseSettings(store=store, version=9))
    with pytest.raises(SettingsError, match="there is support-bot@1"):
        await CloudServer(missing, environment={}).start()
