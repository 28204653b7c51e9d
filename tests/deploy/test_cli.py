"""Every command answers in sentences and exit codes, without tracebacks."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloud.authoring.errors import BuildCancelled, DiskFull
from deploy import cli, command, models
from deploy.command import CommandError, explain
from protos.auth import hash_key
from tests.fakes.inference_server import scripted_edge

run = CliRunner()


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith(("FOREBAY_EDGE", "FOREBAY_CLOUD"))]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["models", "build", "--pair", "huge"], 2, "there is no pair 'huge'; there are: qwen, smol"),
        (["models", "build", "--variants", "int3"], 2, "there is no variant 'int3'"),
        (["models", "build", "--variants", ","], 2, "name at least one variant"),
        (["cloud", "serve", "--config", "/nowhere/c.toml"], 2, "there is no such settings file"),
        (["edge", "serve", "--config", "/nowhere/e.toml"], 2, "there is no such settings file"),
        (["config", "check", "--role", "cloud", "--config", "/nowhere"], 2, "there is no such settings file"),
        (["ask", "hi", "--address", "127.0.0.1:1", "--timeout-s", "5"], 1, "UNAVAILABLE"),
        (["ask", "hi", "--ca", "/nowhere/ca.pem"], 2, "cannot read /nowhere/ca.pem"),
        (["ask", "hi", "--tier", "moon"], 2, "moon"),
        (["ask", "hi", "--max-tokens", "0"], 2, "max-tokens"),
        (["config", "show", "--role", "fog"], 2, "fog"),
    ],
)
def test_a_problem_is_a_sentence_and_a_code(arguments: list[str], code: int, sentence: str) -> None:
    result = run.invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiskFull("no space"), 1),
        (BuildCancelled("stopped"), 130),
        (CommandError("cannot"), 1),
        (command.UsageProblem("wrong"), 2),
        (ModuleNotFoundError("No module named 'httpx'", name="httpx"), 1),
        (FileNotFoundError(2, "No such file or directory", "x"), 1),
    ],
)
def test_known_errors_are_explained(error: Exception, code: int) -> None:
    said = explain(error)
    assert said is not None
    assert said[1] == code


def test_a_bug_is_not_hidden() -> None:
    assert explain(ValueError("ours")) is None
    assert explain(ModuleNotFoundError("No module named 'edge.x'", name="edge.x")) is None


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_args: object, **_options: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "build_release", interrupted)
    result = run.invoke(cli.app, ["models", "build"])
    assert result.exit_code == 130
    assert "interrupted" in result.output


async def test_ask_streams_the_answer_and_says_where_it_came_from() -> None:
    async with scripted_edge(lambda _r: ["Good ", "day"]) as (address, _):
        result = await asyncio.to_thread(run.invoke, cli.app, ["ask", "hello", "--address", address])
    assert result.exit_code == 0
    assert result.stdout == "Good day\n"
    assert "edge (confident), confidence 0.75, support-bot@1" in result.stderr


def test_a_new_key_is_shown_once_and_kept_as_its_digest(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    result = run.invoke(cli.app, ["keys", "api", "new", "--name", "bot", "--file", str(file)])
    key = result.stdout.strip()
    assert result.exit_code == 0
    assert hash_key(key) in file.read_text()
    assert key not in file.read_text()


def test_development_certificates_are_never_overwritten(tmp_path: Path) -> None:
    directory = tmp_path / "certs"
    assert run.invoke(cli.app, ["certs", "dev", str(directory)]).exit_code == 0
    before = (directory / "ca.pem").read_bytes()
    assert run.invoke(cli.app, ["certs", "dev", str(directory)]).exit_code == 1
    assert (directory / "ca.pem").read_bytes() == before


@pytest.mark.parametrize("role", ["edge", "cloud"])
def test_the_shown_configuration_can_be_used(role: str, tmp_path: Path) -> None:
    shown = run.invoke(cli.app, ["config", "show", "--role", role])
    assert shown.exit_code == 0, shown.output
    file = tmp_path / "shown.toml"
    file.write_text(shown.stdout)
    checked = run.invoke(cli.app, ["config", "check", "--role", role, "--config", str(file)])
    assert checked.exit_code == 0, checked.output


def test_the_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from deploy.cli import app; from typer.testing import CliRunner;"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0;"
        "heavy = {'torch', 'transformers', 'onnxruntime', 'vllm', 'httpx', 'grpc', 'numpy'};"
        "heavy &= set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
