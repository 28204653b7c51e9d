"""Servers and channels that fit each other, and channels that follow their certificate files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest

from deploy.certs import CertPair, make_dev_certs
from protos.channel import (
    FILES_CHECK_INTERVAL_S,
    ReloadingChannel,
    channel_options,
    listen,
    open_channel,
    server_options,
)
from protos.errors import InvalidArgument
from protos.forebay.v1 import inference_pb2, inference_pb2_grpc
from protos.limits import MAX_PROMPT_BYTES
from protos.settings import SettingsError
from protos.tls import ClientTlsSettings, TlsSettings
from tests.fakes.scripted_inference import Context, ScriptedInference, serving

REQUEST = inference_pb2.GenerateRequest(prompt="hi")
PLAIN = ClientTlsSettings()


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_clients_ping_no_oftener_than_servers_permit() -> None:
    server, client = dict(server_options()), dict(channel_options())
    least_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert int(client["grpc.keepalive_time_ms"]) >= int(least_ms)
    assert server["grpc.keepalive_permit_without_calls"] == client["grpc.keepalive_permit_without_calls"] == 1
    sizes = ("grpc.max_receive_message_length", "grpc.max_send_message_length", "grpc.max_metadata_size")
    assert [server[size] for size in sizes] == [client[size] for size in sizes]


async def test_a_prompt_of_ten_megabytes_reaches_the_check_that_names_the_limit() -> None:
    async def on_generate(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        raise InvalidArgument(f"{len(request.prompt)} over {MAX_PROMPT_BYTES}", field="prompt")

    async with (
        serving(ScriptedInference(on_generate)) as (address, _),
        open_channel(address, PLAIN) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest(prompt="x" * 10_000_000), timeout=30)
        assert caught.value.details() == f"10000000 over {MAX_PROMPT_BYTES}"


async def test_a_port_in_use_and_addresses_of_no_use_are_settings_errors() -> None:
    async with serving() as (address, _):
        server = grpc.aio.server(options=server_options())
        with pytest.raises(SettingsError, match="cannot listen on"):
            listen(server, address, TlsSettings())
    for bad in ("127.0.0.1", "127.0.0.1:", ":50051", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", ""):
        with pytest.raises(SettingsError):
            listen(grpc.aio.server(), bad, TlsSettings(allow_plaintext=True))
        with pytest.raises(SettingsError):
            open_channel(bad, ClientTlsSettings(allow_plaintext=True))


async def test_plaintext_beyond_loopback_is_refused_before_anything_listens() -> None:
    server = grpc.aio.server(options=server_options())
    with pytest.raises(SettingsError, match="allow_plaintext"):
        listen(server, "[::]:0", TlsSettings())
    address = listen(server, "[::]:0", TlsSettings(allow_plaintext=True))
    assert address.startswith("[::]:")
    assert not address.endswith(":0")


async def test_unix_sockets_serve_plaintext(tmp_path: Path) -> None:
    server = grpc.aio.server(options=server_options())
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(ScriptedInference(), server)
    address = listen(server, f"unix:{tmp_path}/s", TlsSettings())
    assert address == f"unix:{tmp_path}/s"
    await server.start()
    try:
        async with open_channel(address, PLAIN) as channel:
            answer = await inference_pb2_grpc.InferenceServiceStub(channel).Generate(REQUEST, timeout=10)
            assert answer.text == "hi"
    finally:
        await server.stop(None)


def copy_pair(source: CertPair, target: CertPair) -> None:
    target.cert_file.write_bytes(source.cert_file.read_bytes())
    target.key_file.write_bytes(source.key_file.read_bytes())


async def test_a_channel_follows_its_client_certificate_and_live_calls_go_on(tmp_path: Path) -> None:
    certs = make_dev_certs(tmp_path / "a")
    others = make_dev_certs(tmp_path / "b")
    live = CertPair(cert_file=tmp_path / "live.pem", key_file=tmp_path / "live-key.pem")
    copy_pair(certs.edge_client, live)
    both_cas = tmp_path / "cas.pem"
    both_cas.write_bytes(certs.ca.cert_file.read_bytes() + others.ca.cert_file.read_bytes())
    names: list[tuple[bytes, ...]] = []
    held, let_go = asyncio.Event(), asyncio.Event()

    async def on_generate(
        request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        names.append(tuple(context.auth_context()["x509_pem_cert"]))
        if request.prompt == "hold":
            held.set()
            await let_go.wait()
        return inference_pb2.GenerateResponse(text=request.prompt)

    tls = TlsSettings(cert_file=certs.edge.cert_file, key_file=certs.edge.key_file, client_ca_file=both_cas)
    client = ClientTlsSettings(ca_file=certs.ca.cert_file, cert_file=live.cert_file, key_file=live.key_file)
    clock = Clock()
    async with serving(ScriptedInference(on_generate), tls=tls) as (address, _):
        channel = ReloadingChannel(address, client, clock=clock)
        try:
            first = channel.current()
            stub = inference_pb2_grpc.InferenceServiceStub(first)
            long_call = asyncio.ensure_future(
                stub.Generate(inference_pb2.GenerateRequest(prompt="hold"), timeout=20)
            )
            await asyncio.wait_for(held.wait(), 10)
            live.cert_file.write_bytes(b"half written")
            clock.now_s += FILES_CHECK_INTERVAL_S
            assert channel.current() is first
            copy_pair(others.edge_client, live)
            assert channel.current() is first
            clock.now_s += FILES_CHECK_INTERVAL_S
            second = channel.current()
            assert second is not first
            answer = await inference_pb2_grpc.InferenceServiceStub(second).Generate(REQUEST, timeout=10)
            assert answer.text == "hi"
            let_go.set()
            assert (await long_call).text == "hold"
        finally:
            await channel.close()
    assert len(set(names)) == 2
