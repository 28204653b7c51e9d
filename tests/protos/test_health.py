"""Health and reflection as other people's clients use them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from protos.auth import ApiKey, AuthSettings, generate_key, hash_key
from protos.health import HEALTH_SERVICE, HealthServicer
from tests.fakes.scripted_inference import SERVICE, serving

Status = health_pb2.HealthCheckResponse
T = TypeVar("T")


async def check(stub: health_pb2_grpc.HealthStub, service: str) -> int:
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return int(response.status)


async def test_check_and_list_tell_each_service_and_the_whole() -> None:
    async with serving() as (address, health), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert await check(stub, SERVICE) == Status.NOT_SERVING
        assert await check(stub, "") == Status.NOT_SERVING
        health.set_serving(SERVICE, True)
        assert await check(stub, SERVICE) == Status.SERVING
        assert await check(stub, "") == Status.SERVING
        listed = (await stub.List(health_pb2.HealthListRequest(), timeout=10)).statuses
        assert {name: entry.status for name, entry in listed.items()} == {
            "": Status.SERVING,
            SERVICE: Status.SERVING,
        }
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(stub, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watch_tells_changes_and_unknown_services() -> None:
    async with serving() as (address, health), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        assert (await watch.read()).status == Status.NOT_SERVING
        health.set_serving(SERVICE, True)
        assert (await watch.read()).status == Status.SERVING
        health.set_serving(SERVICE, True)
        health.shut_down()
        assert (await watch.read()).status == Status.NOT_SERVING
        watch.cancel()
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=10)
        assert (await unknown.read()).status == Status.SERVICE_UNKNOWN
        unknown.cancel()


async def test_watchers_that_went_away_are_forgotten() -> None:
    async with serving() as (address, health), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
        await watch.read()
        assert len(health._watchers) == 1
        watch.cancel()
        async with asyncio.timeout(2):
            while health._watchers:  # noqa: ASYNC110  # nothing tells of it, on purpose
                await asyncio.sleep(0.005)


async def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.health.MAX_WATCHERS", 0)
    async with serving() as (address, _), grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_whole_serves_when_all_services_do_and_never_again_after_shut_down() -> None:
    health = HealthServicer(["a", "b"])
    health.set_serving("a", True)
    assert health.is_serving("a")
    assert not health.is_serving()
    health.set_serving("b", True)
    assert health.is_serving()
    health.shut_down()
    health.set_serving("a", True)
    assert not health.is_serving("a")
    with pytest.raises(KeyError):
        health.set_serving("c", True)
    assert not HealthServicer([]).is_serving()


async def in_thread(function: Callable[[], T]) -> T:
    """The reflection client is synchronous; the server needs this thread's event loop meanwhile."""
    return await asyncio.to_thread(function)


async def test_a_client_without_our_protos_lists_and_calls_by_reflection() -> None:
    def explore(address: str) -> tuple[set[str], str, float]:
        with grpc.insecure_channel(address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            services = set(database.get_services())
            pool = DescriptorPool(database)
            method = pool.FindServiceByName(SERVICE).FindMethodByName("Generate")
            request_class = message_factory.GetMessageClass(method.input_type)
            response_class = message_factory.GetMessageClass(method.output_type)
            request = request_class(
                model="support-bot", prompt="by reflection", sampling={"temperature": 0.5}, request_id="r"
            )
            call: Any = channel.unary_unary(
                f"/{SERVICE}/{method.name}",
                request_serializer=request_class.SerializeToString,
                response_deserializer=response_class.FromString,
            )
            return services, call(request, timeout=10).text, request.sampling.temperature

    async with serving() as (address, _):
        services, text, temperature = await in_thread(lambda: explore(address))
    assert services == {SERVICE, HEALTH_SERVICE, "grpc.reflection.v1alpha.ServerReflection"}
    assert text == "by reflection"
    assert temperature == 0.5


class WithKey(grpc.StreamStreamClientInterceptor):
    """Adds an API key to the reflection client's calls."""

    def __init__(self, key: str) -> None:
        self.key = key

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=[("x-api-key", self.key)]), requests)


async def test_reflection_needs_a_key_once_there_are_keys_and_health_does_not() -> None:
    key = generate_key()
    auth = AuthSettings(keys=[ApiKey(name="bot", sha256=hash_key(key))])

    def services(address: str, presented: str) -> set[str]:
        with grpc.insecure_channel(address) as channel:
            intercepted = grpc.intercept_channel(channel, WithKey(presented))
            return set(ProtoReflectionDescriptorDatabase(intercepted).get_services())

    async with serving(auth=auth) as (address, _):
        assert SERVICE in await in_thread(lambda: services(address, key))
        with pytest.raises(grpc.RpcError) as caught:
            await in_thread(lambda: services(address, "wrong"))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert await check(stub, SERVICE) == Status.NOT_SERVING
