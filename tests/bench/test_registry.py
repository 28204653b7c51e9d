"""The benchmark runner: discovery, selection, results, exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.registry import BenchError, Row, check, discover, merge, select


def _write(directory: Path, stem: str, body: str) -> None:
    (directory / f"bench_{stem}.py").write_text(body)


def test_every_bench_module_of_a_directory_is_found(tmp_path: Path) -> None:
    _write(tmp_path, "a", "BENCHES = {'one': dict, 'two': dict}")
    _write(tmp_path, "b", "BENCHES = {'three': dict}")
    (tmp_path / "helper.py").write_text("raise RuntimeError")
    assert list(discover(tmp_path)) == ["one", "two", "three"]


def test_a_name_registered_twice_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "a", "BENCHES = {'one': dict}")
    _write(tmp_path, "b", "BENCHES = {'one': dict}")
    with pytest.raises(BenchError, match=r"bench_b\.py registers again: one"):
        discover(tmp_path)


def test_a_module_without_benches_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, "a", "")
    with pytest.raises(BenchError, match=r"bench_a\.py has no dictionary BENCHES"):
        discover(tmp_path)


def test_the_benchmarks_of_this_repository_can_be_discovered_without_models() -> None:
    assert "variant_quality" in discover(Path(__file__).parent)


def test_only_the_named_benchmarks_are_chosen_in_the_order_given() -> None:
    benches = {"a": dict, "b": dict, "c": dict}
    assert list(select(benches, "c, a")) == ["c", "a"]
    assert list(select(benches, "")) == ["a", "b", "c"]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BenchError, match="no benchmark x; there are a, b"):
        select({"a": dict, "b": dict}, "a,x")


def test_results_keep_what_other_benchmarks_wrote(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    merge(path, {"a": Row(value=3.0, unit="s", peer=2.0), "b": Row(value=1.0, unit="s")})
    merge(path, {"b": Row(value=5.0, unit="s")})
    assert json.loads(path.read_text()) == {
        "a": {"value": 3.0, "unit": "s", "peer": 2.0, "ratio": 1.5},
        "b": {"value": 5.0, "unit": "s", "peer": None, "ratio": None},
    }
    assert list(tmp_path.iterdir()) == [path]


def test_a_result_that_is_no_number_is_refused() -> None:
    with pytest.raises(BenchError, match="gave no rows"):
        check("a", {})
    with pytest.raises(BenchError, match="x = nan"):
        check("a", {"x": Row(value=float("nan"), unit="s")})
