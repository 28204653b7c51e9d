"""What the all-in-one writes is what the servers read."""

from __future__ import annotations

import tomllib
from pathlib import Path

from cloud.authoring.home import Home
from cloud.settings import load as load_cloud
from deploy.configs import to_toml
from deploy.up import prepare


def test_the_generated_edge_configuration_loads(tmp_path: Path) -> None:
    from edge.settings import load as load_edge

    stack = prepare("smol", variant="int8", home=Home(tmp_path))
    load_edge(stack.run_directory / "edge.toml", env={})


def test_the_generated_cloud_configuration_loads(tmp_path: Path) -> None:
    stack = prepare("smol", variant="int8", home=Home(tmp_path))
    cloud = load_cloud(stack.run_directory / "cloud.toml", env={})
    assert cloud.server.listen == stack.cloud.address
    assert cloud.release.store == tmp_path / "releases"
    assert stack.edge.address != stack.cloud.address


def test_old_runs_are_deleted(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / "run" / f"2020010{number}").mkdir(parents=True)
    stack = prepare("smol", variant="int8", home=Home(tmp_path))
    assert len(list((tmp_path / "run").iterdir())) == 5
    assert stack.run_directory.is_dir()


def test_any_text_survives_as_toml() -> None:
    values = {"a": 'quote " backslash \\ line \n tab \t bell \x07 del \x7f ü', "b": True, "c": 1.5, "d": 3}
    assert tomllib.loads(to_toml({"table": values})) == {"table": values}
