"""The cloud's settings: documented to the last key, overridable, strict."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud.settings import CloudSettings, load
from protos.settings import SettingsError, describe, undocumented


def test_every_key_is_documented_and_the_reference_is_a_valid_file(tmp_path: Path) -> None:
    assert undocumented(CloudSettings) == []
    path = tmp_path / "cloud.toml"
    path.write_text(describe(CloudSettings))
    loaded = load(path, env={})
    assert loaded.vllm.tensor_parallel_size == CloudSettings().vllm.tensor_parallel_size
    assert loaded.admission == CloudSettings().admission


def test_the_environment_wins(tmp_path: Path) -> None:
    path = tmp_path / "cloud.toml"
    path.write_text("[vllm]\ntensor_parallel_size = 1\n")
    env = {"FOREBAY_CLOUD__VLLM__TENSOR_PARALLEL_SIZE": "2", "FOREBAY_CLOUD__ENGINE__URL": "http://e:8000"}
    settings = load(path, env=env)
    assert settings.vllm.tensor_parallel_size == 2
    assert settings.engine.url == "http://e:8000"


@pytest.mark.parametrize(
    "text", ["[vllm]\ntensor_paralel_size = 2\n", "[admission]\nmax_running = 0\n", "[server]\nlisten = 7\n"]
)
def test_a_wrong_key_or_value_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cloud.toml"
    path.write_text(text)
    with pytest.raises(SettingsError):
        load(path, env={})
