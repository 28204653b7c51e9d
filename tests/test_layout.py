"""What the repository and its distribution are made of."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("edge", "cloud", "router", "protos", "deploy")
GENERATED = ("common_pb2", "inference_pb2", "inference_pb2_grpc", "cloud_pb2", "cloud_pb2_grpc")
LARGEST_TRACKED_BYTES = 2 * 1024 * 1024


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_comes_from_the_distribution_forebay(package: str) -> None:
    assert set(importlib.metadata.packages_distributions()[package]) == {"forebay"}
    module = importlib.import_module(package)
    assert [Path(place).resolve() for place in module.__path__] == [ROOT / package]


def test_the_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("module", GENERATED)
def test_the_generated_code_is_there_and_imports(module: str) -> None:
    assert (ROOT / "protos/forebay/v1" / f"{module}.py").is_file()
    importlib.import_module(f"protos.forebay.v1.{module}")


def _tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)  # noqa: S607
    return [name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_is_large() -> None:
    tracked = _tracked()
    assert tracked
    assert not [name for name in tracked if (ROOT / name).stat().st_size > LARGEST_TRACKED_BYTES]


def test_every_module_has_its_line_in_the_architecture_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = [
        name
        for name in _tracked()
        if name.endswith(".py")
        and name.startswith(tuple(f"{package}/" for package in PACKAGES))
        and not name.endswith("__init__.py")
        and "_pb2" not in name
    ]
    assert modules
    assert [module for module in modules if f"`{module}`" not in page] == []
