"""Every setting of the edge node, with unit and default. One TOML file, environment overrides.

`protos.settings.load_settings` reads it; the environment's prefix is `FOREBAY_EDGE__`. This module holds
values only: what they mean together is checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from protos.auth import AuthSettings
from protos.limits import DEFAULT_DEADLINE_S, MAX_MESSAGE_BYTES
from protos.settings import load_settings
from protos.tls import ClientTlsSettings, TlsSettings

ENV_PREFIX = "FOREBAY_EDGE"
DEFAULT_LISTEN = "127.0.0.1:7050"


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gRPC server."""

    listen: Annotated[
        str, Meta(description="host:port. Port 0 takes a free one. Plaintext is refused off loopback.")
    ] = DEFAULT_LISTEN
    max_message_bytes: Annotated[
        int, Meta(gt=0, description="Largest gRPC message in either direction, in bytes.")
    ] = MAX_MESSAGE_BYTES
    default_deadline_s: Annotated[
        float, Meta(gt=0, description="For calls that bring no deadline, in seconds.")
    ] = DEFAULT_DEADLINE_S
    max_concurrent_calls: Annotated[
        int, Meta(ge=1, le=65536, description="Most calls at once, waiting ones included.")
    ] = 1024
    drain_grace_s: Annotated[
        float, Meta(ge=0, description="After SIGTERM, how long running requests may take to end, in seconds.")
    ] = 10.0
    reflection: Annotated[bool, Meta(description="Whether the server describes itself to grpcurl.")] = True
    flush_interval_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=1000,
            description="The first text of a stream is sent at once; later ones are joined for at most this "
            "long, in milliseconds. A message per token costs the model's threads their processor.",
        ),
    ] = 15.0


class ReleaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which release is served."""

    store: Annotated[Path, Meta(description="Directory of releases, <store>/<line>/<version>/.")] = Path(
        "~/.cache/forebay/releases"
    )
    line: Annotated[str, Meta(description="The model line, such as support-bot.")] = "support-bot"
    version: Annotated[int, Meta(ge=0, description="The release's version. 0: the newest in the store.")] = 0
    variant: Annotated[
        str, Meta(description="The quantization to serve, such as int4 or int8. Empty: the release's first.")
    ] = ""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine process."""

    threads: Annotated[int, Meta(ge=0, le=1024, description="Threads of one step. 0: one for each core.")] = 0
    device: Annotated[str, Meta(description="cpu, or cuda where the runtime has it.")] = "cpu"
    max_batch: Annotated[int, Meta(ge=1, le=1024, description="Most requests decoded in one step.")] = 16
    max_waiting: Annotated[
        int, Meta(ge=0, le=65536, description="Most requests that wait for a place; more are forwarded.")
    ] = 32
    context_tokens: Annotated[
        int, Meta(ge=0, description="Most tokens of prompt and answer together. 0: the release's.")
    ] = 0
    kv_tokens: Annotated[
        int,
        Meta(ge=0, description="KV memory over all requests, in tokens. 0: max_batch whole contexts."),
    ] = 0
    start_timeout_s: Annotated[float, Meta(gt=0, description="To load the model, in seconds.")] = 120.0
    hang_timeout_s: Annotated[
        float, Meta(gt=0, description="A worker silent for this long is replaced, in seconds.")
    ] = 30.0


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How confidence is read while an answer forms. The thresholds are the release's."""

    quantile: Annotated[
        float, Meta(gt=0, lt=1, description="Which quantile of token log-probabilities is the signal.")
    ] = 0.1
    hold_back_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="A stream shows nothing before this many tokens.")
    ] = 8
    early_exit_tokens: Annotated[
        int, Meta(ge=1, le=4096, description="The edge is not given up before this many tokens.")
    ] = 8
    early_exit_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="Confidence under this share of the threshold ends the edge's try."),
    ] = 0.5
    classify_threshold: Annotated[
        float, Meta(ge=0, le=1, description="Probability of the best label under which it is forwarded.")
    ] = 0.6


class CloudSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The way to the cloud tier."""

    address: Annotated[str, Meta(description="host:port of the cloud server. Empty: no cloud.")] = ""
    deadline_margin_s: Annotated[
        float,
        Meta(ge=0, description="Kept of a request's time for answering on the edge after all, in seconds."),
    ] = 0.5
    attempts: Annotated[
        int, Meta(ge=1, le=10, description="Most tries of a request, all before its first token.")
    ] = 2
    first_backoff_s: Annotated[float, Meta(ge=0, description="Pause before the second try, in seconds.")] = (
        0.1
    )
    breaker_failures: Annotated[
        int, Meta(ge=1, description="Failures in a row after which the cloud is left alone for a while.")
    ] = 5
    breaker_pause_s: Annotated[float, Meta(gt=0, description="The first such while, in seconds.")] = 1.0
    breaker_longest_pause_s: Annotated[
        float, Meta(gt=0, description="The while doubles up to this, in seconds.")
    ] = 30.0
    tls: ClientTlsSettings = ClientTlsSettings()


class EdgeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The edge node."""

    server: ServerSettings = ServerSettings()
    release: ReleaseSettings = ReleaseSettings()
    engine: EngineSettings = EngineSettings()
    router: RouterSettings = RouterSettings()
    cloud: CloudSettings = CloudSettings()
    tls: TlsSettings = TlsSettings()
    auth: AuthSettings = AuthSettings()


def load(path: Path | None, *, env: Mapping[str, str]) -> EdgeSettings:
    """Read the edge's settings.

    Raises:
        SettingsError: A key, a value or the file is wrong.
    """
    return load_settings(EdgeSettings, path, env=env, env_prefix=ENV_PREFIX)
