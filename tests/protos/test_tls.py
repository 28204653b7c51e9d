"""TLS on real sockets: who gets in, who does not, and certificates that change under a running server."""

from __future__ import annotations

import logging
from pathlib import Path

import grpc
import grpc.aio
import pytest

from deploy.certs import CertPair, DevCerts, make_dev_certs, spiffe_id
from protos.auth import CallerKind, current_caller
from protos.channel import open_channel
from protos.forebay.v1 import inference_pb2, inference_pb2_grpc
from protos.settings import SettingsError
from protos.tls import (
    ClientTlsSettings,
    ServerFiles,
    TlsSettings,
    channel_credentials,
    check_plaintext,
    host_of,
    is_loopback,
    server_credentials,
    uses_tls,
)
from tests.fakes.scripted_inference import Context, ScriptedInference, serving

REQUEST = inference_pb2.GenerateRequest(prompt="hi")


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> DevCerts:
    return make_dev_certs(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def other_certs(tmp_path_factory: pytest.TempPathFactory) -> DevCerts:
    return make_dev_certs(tmp_path_factory.mktemp("other-pki"))


def server_tls(pair: CertPair, client_ca: Path | None = None) -> TlsSettings:
    return TlsSettings(cert_file=pair.cert_file, key_file=pair.key_file, client_ca_file=client_ca)


def client_tls(ca: CertPair, pair: CertPair | None = None) -> ClientTlsSettings:
    if pair is None:
        return ClientTlsSettings(ca_file=ca.cert_file)
    return ClientTlsSettings(ca_file=ca.cert_file, cert_file=pair.cert_file, key_file=pair.key_file)


async def call(address: str, tls: ClientTlsSettings) -> str:
    async with open_channel(address, tls) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return (await stub.Generate(REQUEST, timeout=10)).text


async def refused(address: str, tls: ClientTlsSettings) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(address, tls)
    return caught.value.code()


async def test_a_client_that_trusts_the_ca_is_served(certs: DevCerts) -> None:
    async with serving(tls=server_tls(certs.edge)) as (address, _):
        assert await call(address, client_tls(certs.ca)) == "hi"


async def test_a_client_that_trusts_another_ca_refuses_the_server(
    certs: DevCerts, other_certs: DevCerts
) -> None:
    async with serving(tls=server_tls(certs.edge)) as (address, _):
        assert await refused(address, client_tls(other_certs.ca)) is grpc.StatusCode.UNAVAILABLE


async def test_plaintext_to_a_tls_port_is_refused(certs: DevCerts) -> None:
    async with serving(tls=server_tls(certs.edge)) as (address, _):
        assert await refused(address, ClientTlsSettings()) is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_tells_the_servicer_the_client_s_spiffe_id(certs: DevCerts) -> None:
    async def who(request: inference_pb2.GenerateRequest, context: Context) -> inference_pb2.GenerateResponse:
        caller = current_caller()
        return inference_pb2.GenerateResponse(text=f"{caller.kind.value} {caller.name}")

    tls = server_tls(certs.cloud, certs.ca.cert_file)
    async with serving(ScriptedInference(who), tls=tls) as (address, _):
        answer = await call(address, client_tls(certs.ca, certs.edge_client))
        assert answer == f"{CallerKind.CERTIFICATE.value} {spiffe_id('edge')}"


async def test_mutual_tls_refuses_clients_without_a_certificate_or_with_a_stranger_s(
    certs: DevCerts, other_certs: DevCerts
) -> None:
    async with serving(tls=server_tls(certs.cloud, certs.ca.cert_file)) as (address, _):
        assert await refused(address, client_tls(certs.ca)) is grpc.StatusCode.UNAVAILABLE
        stranger = client_tls(certs.ca, other_certs.edge_client)
        assert await refused(address, stranger) is grpc.StatusCode.UNAVAILABLE
        # A server's certificate is no client's.
        assert await refused(address, client_tls(certs.ca, certs.edge)) is grpc.StatusCode.UNAVAILABLE
        assert await call(address, client_tls(certs.ca, certs.edge_client)) == "hi"


async def test_a_server_name_may_differ_from_the_address(certs: DevCerts) -> None:
    async with serving(tls=server_tls(certs.edge)) as (address, _):
        port = address.rpartition(":")[2]
        wrong = ClientTlsSettings(ca_file=certs.ca.cert_file, server_name="elsewhere.example")
        right = ClientTlsSettings(ca_file=certs.ca.cert_file, server_name="localhost")
        assert await refused(f"127.0.0.1:{port}", wrong) is grpc.StatusCode.UNAVAILABLE
        assert await call(f"127.0.0.1:{port}", right) == "hi"


def copy_pair(source: CertPair, target: CertPair) -> None:
    target.cert_file.write_bytes(source.cert_file.read_bytes())
    target.key_file.write_bytes(source.key_file.read_bytes())


async def test_new_certificates_are_served_without_a_restart_and_open_connections_go_on(
    tmp_path: Path, certs: DevCerts, other_certs: DevCerts
) -> None:
    live = CertPair(cert_file=tmp_path / "live.pem", key_file=tmp_path / "live-key.pem")
    copy_pair(certs.edge, live)
    async with (
        serving(tls=server_tls(live)) as (address, _),
        open_channel(address, client_tls(certs.ca)) as open_before,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(open_before)
        assert (await stub.Generate(REQUEST, timeout=10)).text == "hi"
        copy_pair(other_certs.edge, live)
        assert await call(address, client_tls(other_certs.ca)) == "hi"
        assert await refused(address, client_tls(certs.ca)) is grpc.StatusCode.UNAVAILABLE
        assert (await stub.Generate(REQUEST, timeout=10)).text == "hi"


async def test_unusable_new_certificates_leave_the_old_ones_and_are_logged_once(
    tmp_path: Path, certs: DevCerts, other_certs: DevCerts, caplog: pytest.LogCaptureFixture
) -> None:
    live = CertPair(cert_file=tmp_path / "live.pem", key_file=tmp_path / "live-key.pem")
    copy_pair(certs.edge, live)
    with caplog.at_level(logging.ERROR, logger="protos.tls"):
        async with serving(tls=server_tls(live)) as (address, _):
            # Half of a replacement: the certificate is new, the key is not.
            live.cert_file.write_bytes(other_certs.edge.cert_file.read_bytes())
            assert await call(address, client_tls(certs.ca)) == "hi"
            assert await call(address, client_tls(certs.ca)) == "hi"
            assert len(caplog.records) == 1
            assert "is not the key of" in caplog.text
            live.key_file.write_bytes(other_certs.edge.key_file.read_bytes())
            assert await call(address, client_tls(other_certs.ca)) == "hi"
            live.cert_file.unlink()
            assert await call(address, client_tls(other_certs.ca)) == "hi"


async def test_a_client_ca_that_is_replaced_shuts_its_clients_out(
    tmp_path: Path, certs: DevCerts, other_certs: DevCerts
) -> None:
    ca = tmp_path / "client-ca.pem"
    ca.write_bytes(certs.ca.cert_file.read_bytes())
    async with serving(tls=server_tls(certs.cloud, ca)) as (address, _):
        assert await call(address, client_tls(certs.ca, certs.edge_client)) == "hi"
        ca.write_bytes(other_certs.ca.cert_file.read_bytes())
        shut_out = await refused(address, client_tls(certs.ca, certs.edge_client))
        assert shut_out is grpc.StatusCode.UNAVAILABLE
        assert await call(address, client_tls(certs.ca, other_certs.edge_client)) == "hi"


def test_unchanged_files_are_not_read_again(certs: DevCerts) -> None:
    files = ServerFiles(certs.edge.cert_file, certs.edge.key_file, None, key="tls")
    assert files.fetch() is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key_file": None}, "both cert_file and key_file"),
        ({"cert_file": None}, "both cert_file and key_file"),
        ({"cert_file": Path("none.pem")}, "tls.cert_file: cannot read none.pem"),
        ({"client_ca_file": Path("none.pem")}, "tls.client_ca_file: cannot read none.pem"),
    ],
)
def test_incomplete_and_missing_files_are_settings_errors(
    certs: DevCerts, change: dict[str, Path | None], words: str
) -> None:
    complete: dict[str, Path | None] = {"cert_file": certs.edge.cert_file, "key_file": certs.edge.key_file}
    with pytest.raises(SettingsError, match=words):
        server_credentials(TlsSettings(**{**complete, **change}))


def test_files_that_are_no_pem_or_no_pair_are_settings_errors(tmp_path: Path, certs: DevCerts) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_bytes(b"\xff not PEM")
    edge, cloud = certs.edge, certs.cloud
    for settings, words in (
        (TlsSettings(cert_file=garbage, key_file=edge.key_file), "holds no PEM certificate"),
        (TlsSettings(cert_file=edge.cert_file, key_file=garbage), "no unencrypted PEM private key"),
        (TlsSettings(cert_file=edge.cert_file, key_file=cloud.key_file), "is not the key of"),
        (server_tls(edge, garbage), "client_ca_file: .* holds no PEM certificate"),
    ):
        with pytest.raises(SettingsError, match=words):
            server_credentials(settings)
    with pytest.raises(SettingsError, match="holds no PEM certificate"):
        channel_credentials(ClientTlsSettings(ca_file=garbage))
    with pytest.raises(SettingsError, match="or neither"):
        channel_credentials(ClientTlsSettings(cert_file=edge.cert_file))


@pytest.mark.parametrize(
    ("address", "host", "loopback"),
    [
        ("127.0.0.1:1", "127.0.0.1", True),
        ("127.9.8.7:1", "127.9.8.7", True),
        ("localhost:1", "localhost", True),
        ("LOCALHOST:1", "LOCALHOST", True),
        ("[::1]:1", "::1", True),
        ("unix:/run/forebay.sock", None, True),
        ("dns:///localhost:1", None, True),
        ("ipv4:127.0.0.1:1", None, True),
        ("0.0.0.0:1", None, False),
        ("[::]:1", "::", False),
        ("10.0.0.1:1", "10.0.0.1", False),
        ("edge.example:1", "edge.example", False),
        ("localhost.example:1", "localhost.example", False),
        ("127.0.0.1.example:1", "127.0.0.1.example", False),
        ("dns:///edge.example:1", None, False),
    ],
)
def test_loopback_is_recognized_and_nothing_else(address: str, host: str | None, loopback: bool) -> None:
    assert is_loopback(address) is loopback
    assert host is None or host_of(address) == host


def test_plaintext_beyond_loopback_needs_the_switch() -> None:
    check_plaintext("127.0.0.1:1", allow_plaintext=False, key="tls")
    check_plaintext("0.0.0.0:1", allow_plaintext=True, key="tls")
    with pytest.raises(SettingsError, match=r"tls\.allow_plaintext = true") as caught:
        check_plaintext("0.0.0.0:1", allow_plaintext=False, key="tls")
    assert caught.value.key == "tls.allow_plaintext"


def test_a_client_speaks_tls_beyond_loopback_unless_switched_off(certs: DevCerts) -> None:
    assert uses_tls("cloud.example:443", ClientTlsSettings())
    assert not uses_tls("cloud.example:443", ClientTlsSettings(allow_plaintext=True))
    assert not uses_tls("127.0.0.1:1", ClientTlsSettings())
    assert uses_tls("127.0.0.1:1", client_tls(certs.ca))
    half = ClientTlsSettings(cert_file=certs.edge.cert_file, key_file=certs.edge.key_file)
    with pytest.raises(SettingsError, match="is plaintext"):
        uses_tls("127.0.0.1:1", half)
