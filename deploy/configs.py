"""The configurations that the local all-in-one gives its two servers: plaintext on loopback, as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

EDGE_PORT = 7050
CLOUD_PORT = 7060

Table = Mapping[str, str | int | float | bool]


def cloud_config(*, address: str, store: Path, line: str, run_directory: Path, tensor_parallel: int) -> str:
    """TOML of the cloud server, for `cloud.settings.CloudSettings`."""
    return to_toml(
        {
            "server": {"listen": address, "drain_grace_s": 3.0},
            "release": {"store": str(store), "line": line},
            "vllm": {
                "tensor_parallel_size": tensor_parallel,
                # Without compilation vLLM starts in half the time; a demo is shorter than what that costs.
                "enforce_eager": True,
                "max_model_len": 2048,
                "cpu_kv_cache_gib": 1,
                "log_dir": str(run_directory),
                "stop_grace_s": 5.0,
            },
        }
    )


def edge_config(*, address: str, store: Path, line: str, variant: str, cloud_address: str) -> str:
    """TOML of the edge server, for `edge.settings.EdgeSettings`."""
    return to_toml(
        {
            "server": {"listen": address, "drain_grace_s": 3.0},
            "release": {"store": str(store), "line": line, "variant": variant},
            "cloud": {"address": cloud_address},
        }
    )


def to_toml(tables: Mapping[str, Table]) -> str:
    """Tables of plain values as TOML. JSON's strings, numbers and booleans are TOML's, DEL aside."""
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        for key, value in table.items():
            written = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
            lines.append(f"{key} = {written}")
        lines.append("")
    return "\n".join(lines)
