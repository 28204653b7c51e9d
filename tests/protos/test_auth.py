"""API keys and certificates: who is let in as whom, with keys that are never kept or said."""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

import grpc
import grpc.aio
import pytest

from protos import auth
from protos.auth import (
    ANONYMOUS,
    ApiKey,
    Authenticator,
    AuthSettings,
    CallerIdentity,
    CallerKind,
    append_key,
    certificate_names,
    current_caller,
    generate_key,
    hash_key,
    presented_key,
)
from protos.errors import PermissionDenied, Unauthenticated
from protos.forebay.v1 import inference_pb2, inference_pb2_grpc
from protos.settings import SettingsError
from protos.status import from_rpc_error
from tests.fakes.scripted_inference import Context, ScriptedInference, serving

KEY = generate_key()
OTHER_KEY = generate_key()
SPIFFE = "spiffe://forebay.dev/edge"
WITH_CERTIFICATE = {"peer_spiffe_id": [SPIFFE.encode()], "x509_common_name": [b"forebay edge-client"]}


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def entry(name: str, key: str) -> ApiKey:
    return ApiKey(name=name, sha256=hash_key(key))


def authenticator(settings: AuthSettings, clock: Clock | None = None) -> Authenticator:
    return Authenticator(settings, clock=clock or Clock())


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def test_generated_keys_are_long_distinct_and_hash_to_settings() -> None:
    keys = {generate_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("fb_") and len(key) == 46 for key in keys)
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        ((("authorization", "Bearer k"),), "k"),
        ((("authorization", "bearer   k "),), "k"),
        ((("x-api-key", "k"),), "k"),
        ((("authorization", "Basic zzz"), ("x-api-key", "k")), "k"),
        ((("authorization", "Bearer "),), None),
        ((("authorization", "k"),), None),
        ((("authorization", b"\xff"),), None),
        ((), None),
        (None, None),
    ],
)
def test_keys_are_read_from_either_header(
    metadata: tuple[tuple[str, str | bytes], ...] | None, key: str | None
) -> None:
    assert presented_key(metadata) == key


def test_without_keys_everybody_is_anonymous_or_their_certificate() -> None:
    subject = authenticator(AuthSettings())
    assert not subject.requires_key
    assert subject.identify((), {}) == ANONYMOUS
    assert subject.identify((), WITH_CERTIFICATE) == CallerIdentity(
        kind=CallerKind.CERTIFICATE, name=SPIFFE, certificate_names=(SPIFFE, "forebay edge-client")
    )


def test_a_known_key_names_its_entry_and_others_are_refused() -> None:
    subject = authenticator(AuthSettings(keys=[entry("bot", KEY), entry("app", OTHER_KEY)]))
    assert subject.identify(bearer(KEY), {}) == CallerIdentity(kind=CallerKind.API_KEY, name="bot")
    assert subject.identify((("x-api-key", OTHER_KEY),), {}).name == "app"
    for wrong in (generate_key(), KEY[:-1], KEY + "x", hash_key(KEY), "", "\ud800", "x" * 10_000):
        with pytest.raises(Unauthenticated) as caught:
            subject.identify((("x-api-key", wrong),) if wrong != "\ud800" else bearer("é"), {})
        assert len(wrong) < 5 or wrong not in caught.value.message
    with pytest.raises(Unauthenticated, match="no API key"):
        subject.identify((), {})


def test_every_entry_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(left: str, right: str) -> bool:
        compared.append(left)
        return hmac.compare_digest(left, right)

    monkeypatch.setattr(auth, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare)}))
    entries = [entry("a", KEY), entry("b", OTHER_KEY), entry("c", generate_key())]
    subject = authenticator(AuthSettings(keys=entries))
    for key in (KEY, OTHER_KEY):
        compared.clear()
        subject.identify(bearer(key), {})
        assert compared == [known.sha256 for known in entries]


def test_a_certificate_stands_in_for_a_key_only_when_it_may() -> None:
    keys = [entry("bot", KEY)]
    with pytest.raises(Unauthenticated):
        authenticator(AuthSettings(keys=keys)).identify((), WITH_CERTIFICATE)
    lenient = authenticator(AuthSettings(keys=keys, accept_certificates=True))
    assert lenient.identify((), WITH_CERTIFICATE).kind is CallerKind.CERTIFICATE
    with pytest.raises(Unauthenticated):
        lenient.identify(bearer("wrong"), WITH_CERTIFICATE)
    with pytest.raises(Unauthenticated):
        lenient.identify((), {})


def test_only_allowed_certificates_may_call() -> None:
    subject = authenticator(AuthSettings(allowed_certificates=[SPIFFE]))
    assert subject.identify((), WITH_CERTIFICATE).name == SPIFFE
    for stranger in ({}, {"peer_spiffe_id": [b"spiffe://forebay.dev/edge2"]}):
        with pytest.raises(PermissionDenied):
            subject.identify((), stranger)


def test_certificate_names_have_the_spiffe_id_first_and_once() -> None:
    context = {
        "x509_common_name": [b"cn"],
        "x509_subject_alternative_name": [b"localhost", SPIFFE.encode()],
        "peer_spiffe_id": [SPIFFE.encode()],
    }
    assert certificate_names(context) == (SPIFFE, "localhost", "cn")


def touch(path: Path, step: int) -> None:
    os.utime(path, ns=(step * 10**9, step * 10**9))


def test_the_keys_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.toml"
    append_key(path, "bot", KEY)
    touch(path, 1)
    clock = Clock()
    subject = authenticator(AuthSettings(keys_file=path), clock)
    assert subject.identify(bearer(KEY), {}).name == "bot"
    append_key(path, "app", OTHER_KEY)
    touch(path, 2)
    with pytest.raises(Unauthenticated):
        subject.identify(bearer(OTHER_KEY), {})
    clock.now_s += 1.0
    assert subject.identify(bearer(OTHER_KEY), {}).name == "app"

    path.write_text("[[keys]]\nname = 'half'")
    touch(path, 3)
    clock.now_s += 1.0
    with caplog.at_level(logging.ERROR, logger="protos.auth"):
        assert subject.identify(bearer(KEY), {}).name == "bot"
    assert "keys[0].sha256 is required" in caplog.text

    path.write_text("")
    touch(path, 4)
    clock.now_s += 1.0
    with pytest.raises(Unauthenticated):
        subject.identify(bearer(KEY), {})


def test_a_keys_file_keeps_hashes_only_and_is_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    append_key(path, "bot", KEY)
    assert KEY not in path.read_text()
    assert hash_key(KEY) in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    for name, words in (("bot", "already"), ('b"t', "letters"), ("", "letters"), ("x" * 65, "letters")):
        with pytest.raises(SettingsError, match=words):
            append_key(path, name, OTHER_KEY)


def test_unusable_keys_are_settings_errors(tmp_path: Path) -> None:
    for settings, words in (
        (AuthSettings(keys=[entry("a", KEY), entry("a", OTHER_KEY)]), "have the name a"),
        (AuthSettings(keys=[entry("a", KEY), entry("b", KEY)]), "have the sha256"),
        (AuthSettings(keys_file=tmp_path / "none.toml"), "no such settings file"),
    ):
        with pytest.raises(SettingsError, match=words):
            authenticator(settings)


async def test_keys_work_on_the_wire_and_health_stays_open() -> None:
    async def who(request: inference_pb2.GenerateRequest, context: Context) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(text=current_caller().name)

    settings = AuthSettings(keys=[entry("bot", KEY)])
    async with (
        serving(ScriptedInference(who), auth=settings) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(prompt="x")
        assert (await stub.Generate(request, timeout=10, metadata=bearer(KEY))).text == "bot"
        for metadata in ((), bearer("fb_wrong")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request, timeout=10, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert type(from_rpc_error(caught.value)) is Unauthenticated
