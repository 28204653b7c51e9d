"""The distribution: what it installs, and what the repository holds."""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path

import pytest

import cloud
import edge
import protos
import router

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("package", [edge, cloud, router, protos])
def test_the_packages_come_from_our_distribution(package: object) -> None:
    file = Path(str(package.__file__)).resolve()  # type: ignore[attr-defined]
    assert file.is_relative_to(ROOT)
    names = importlib.metadata.packages_distributions()
    name = file.parent.name
    # An editable install maps names by a finder of its own; a plain one lists them.
    owners = set(names.get(name, ["forebay"]))
    assert owners == {"forebay"}, f"{name} also comes from {owners}"
    assert importlib.metadata.version("forebay")


def test_the_forebay_command_is_ours() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="forebay")
    assert command.value == "deploy.cli:main"


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_weights_are_tracked() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)  # noqa: S607
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    assert not [path for path in paths if path.is_file() and path.stat().st_size > 2_000_000]


def test_every_module_has_its_line_in_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [
        path.relative_to(ROOT).as_posix()
        for part in ("protos", "router", "edge", "cloud", "deploy")
        for path in (ROOT / part).rglob("*.py")
        if path.name != "__init__.py" and "_pb2" not in path.name
    ]
    assert [module for module in modules if f"`{module}`" not in page] == []
