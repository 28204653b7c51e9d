"""What vLLM is started with, and what is refused before a slow start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloud.settings import VllmSettings
from cloud.vllm.command import (
    ModelShape,
    VllmCommand,
    bind_cores,
    build_command,
    check_parallelism,
    read_model_shape,
)
from protos.settings import SettingsError


def build(settings: VllmSettings, **changes: Any) -> VllmCommand:
    facts: dict[str, Any] = {
        "python": "py",
        "model_dir": Path("/m"),
        "served_name": "bot@1",
        "socket_path": Path("/s/v.sock"),
        "max_running": 8,
        "device": "cpu",
        "cores": [0, 1],
        "environment": {"PATH": "/bin"},
    }
    return build_command(settings, **{**facts, **changes})


def flag(command: VllmCommand, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def test_the_cpu_wheel_is_started_by_its_module_on_a_socket_and_never_on_a_port() -> None:
    command = build(VllmSettings(tensor_parallel_size=2, cpu_kv_cache_gib=1, enforce_eager=True))
    assert command.argv[:3] == ("py", "-m", "vllm.entrypoints.openai.api_server")
    assert flag(command, "--uds") == "/s/v.sock"
    assert "--port" not in command.argv
    assert flag(command, "--tensor-parallel-size") == "2"
    assert flag(command, "--served-model-name") == "bot@1"
    assert flag(command, "--max-num-seqs") == "8"
    assert "--enforce-eager" in command.argv
    assert command.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_a_gpu_is_served_by_vllm_serve_without_the_cpus_variables() -> None:
    command = build(VllmSettings(gpu_memory_utilization=0.5), device="cuda")
    assert command.argv[1:5] == ("-m", "vllm.entrypoints.cli.main", "serve", "/m")
    assert flag(command, "--gpu-memory-utilization") == "0.5"
    assert not any(name.startswith("VLLM_CPU") for name in command.environment)


def test_the_child_inherits_the_environment_but_calls_nobody() -> None:
    environment = build(VllmSettings()).environment
    assert environment["PATH"] == "/bin"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"


def test_extra_arguments_come_last_so_that_they_win() -> None:
    assert build(VllmSettings(extra_args=["--dtype", "float16"])).argv[-2:] == ("--dtype", "float16")


def test_a_socket_path_that_the_system_would_cut_is_refused() -> None:
    with pytest.raises(SettingsError, match="TMPDIR"):
        build(VllmSettings(), socket_path=Path("/" + "x" * 120))


@pytest.mark.parametrize(
    ("cores", "ranks", "bound"),
    [
        ([0, 1], 2, "0|1"),
        ([3, 2, 1, 0], 2, "0,1|2,3"),
        ([0, 1, 2], 2, "0|1"),
        ([5], 1, "5"),
        ([0], 2, "nobind"),
    ],
)
def test_cores_are_split_evenly_over_ranks(cores: list[int], ranks: int, bound: str) -> None:
    assert bind_cores(cores, ranks) == bound


SMOLLM2 = ModelShape(attention_heads=9, kv_heads=3, layers=30, context_tokens=8192)
QWEN = ModelShape(attention_heads=14, kv_heads=2, layers=24, context_tokens=32768)


@pytest.mark.parametrize(("shape", "size"), [(QWEN, 1), (QWEN, 2), (QWEN, 14), (SMOLLM2, 3), (SMOLLM2, 9)])
def test_a_size_that_divides_the_heads_is_taken(shape: ModelShape, size: int) -> None:
    check_parallelism(shape, VllmSettings(tensor_parallel_size=size))


@pytest.mark.parametrize(("shape", "size"), [(SMOLLM2, 2), (QWEN, 4), (QWEN, 7)])
def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do(
    shape: ModelShape, size: int
) -> None:
    with pytest.raises(SettingsError, match="it may be 1, ") as caught:
        check_parallelism(shape, VllmSettings(tensor_parallel_size=size))
    assert caught.value.key == "vllm.tensor_parallel_size"


def test_more_stages_than_layers_and_more_context_than_trained_are_refused() -> None:
    with pytest.raises(SettingsError, match="24 layers"):
        check_parallelism(QWEN, VllmSettings(pipeline_parallel_size=25))
    with pytest.raises(SettingsError, match="32768 tokens"):
        check_parallelism(QWEN, VllmSettings(max_model_len=40000))


@pytest.mark.parametrize("nested", [False, True])
def test_the_shape_is_read_from_either_level_of_config_json(tmp_path: Path, nested: bool) -> None:
    shape = {"num_attention_heads": 8, "num_hidden_layers": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": shape} if nested else shape))
    assert read_model_shape(tmp_path) == ModelShape(
        attention_heads=8, kv_heads=8, layers=2, context_tokens=64
    )


@pytest.mark.parametrize("content", [None, "{", "{}", "[]", '{"num_attention_heads": "8"}'])
def test_a_config_that_says_nothing_usable_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SettingsError, match=r"config\.json"):
        read_model_shape(tmp_path)
