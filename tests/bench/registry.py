"""What a benchmark is, and the file its results go to.

To add one, write `tests/bench/bench_<topic>.py` with a dictionary `BENCHES` of name → function. A function
takes nothing, measures, and returns rows; it raises when it cannot measure. `run.py` finds the module.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure.

    Attributes:
        value: Ours.
        unit: Of `value` and `peer`.
        peer: The same figure of what we compare with, measured in the same run. None: there is no peer.
    """

    value: float
    unit: str
    peer: float | None = None

    @property
    def ratio(self) -> float | None:
        """Ours over the peer's."""
        return None if not self.peer else self.value / self.peer


Bench = Callable[[], Mapping[str, Row]]


class BenchError(Exception):
    """A benchmark is registered twice or wrongly, is unknown, or gave something that is not a result."""


def discover(directory: Path) -> dict[str, Bench]:
    """Every benchmark of the modules `bench_*.py` in a directory, by name, in the order of the files.

    Raises:
        BenchError: A module without `BENCHES`, or one name twice.
    """
    found: dict[str, Bench] = {}
    for path in sorted(directory.glob("bench_*.py")):
        spec = importlib.util.spec_from_file_location(f"tests.bench.{path.stem}", path)
        if spec is None or spec.loader is None:
            raise BenchError(f"{path.name} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up by name
        spec.loader.exec_module(module)
        benches: dict[str, Bench] | None = getattr(module, "BENCHES", None)
        if benches is None:
            raise BenchError(f"{path.name} has no dictionary BENCHES")
        if twice := found.keys() & benches.keys():
            raise BenchError(f"{path.name} registers again: {', '.join(sorted(twice))}")
        found |= benches
    return found


def select(benches: Mapping[str, Bench], only: str) -> dict[str, Bench]:
    """Those named in `only`, separated by commas; all when it is empty.

    Raises:
        BenchError: An unknown name. The message lists the known ones.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    if unknown := [name for name in names if name not in benches]:
        raise BenchError(f"no benchmark {', '.join(unknown)}; there are {', '.join(benches) or 'none'}")
    return {name: benches[name] for name in names} if names else dict(benches)


def check(name: str, rows: Mapping[str, Row]) -> None:
    """Refuse an empty or non-finite result: it would read as a figure.

    Raises:
        BenchError: Names the row.
    """
    if not rows:
        raise BenchError(f"{name} gave no rows")
    for label, row in rows.items():
        if not math.isfinite(row.value) or (row.peer is not None and not math.isfinite(row.peer)):
            raise BenchError(f"{name} gave {label} = {row.value} (peer {row.peer})")


def merge(path: Path, rows: Mapping[str, Row]) -> None:
    """Put rows into a results file and keep the others that it holds. Never leaves half a file."""
    held: dict[str, object] = json.loads(path.read_text()) if path.exists() else {}
    held |= {name: asdict(row) | {"ratio": row.ratio} for name, row in rows.items()}
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(dict(sorted(held.items())), indent=2) + "\n")
    unfinished.replace(path)
