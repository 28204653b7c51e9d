"""Run benchmarks: `python tests/bench/run.py [ONLY=name,name]`, or `make bench`.

Prints a table, merges the figures into `bench.json` at the root of the repository, and exits 1 when one of
them failed (the others still run and count), 2 for a wrong command line.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:  # started as a script, the path begins with this folder instead
    sys.path.insert(0, str(ROOT))

from tests.bench.registry import BenchError, Row, check, discover, merge, select  # noqa: E402


def main(arguments: list[str]) -> int:
    """Run what `arguments` ask for; returns the exit status."""
    console = Console()
    try:
        only = _only(arguments)
        chosen = select(discover(Path(__file__).parent), only)
    except BenchError as error:
        console.print(f"[red]{error}")
        return 2
    table = Table("figure", "value", "unit", "peer", "ratio", title="benchmarks")
    failed: list[str] = []
    for name, bench in chosen.items():
        started = time.perf_counter()
        console.print(f"{name} …")
        try:
            rows = bench()
            check(name, rows)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        merge(ROOT / "bench.json", rows)
        for label, row in rows.items():
            table.add_row(label, *_cells(row))
        console.print(f"{name}: {time.perf_counter() - started:.0f} s")
    console.print(table)
    if failed:
        console.print(f"[red]failed: {', '.join(failed)}")
    return 1 if failed else 0


def _only(arguments: list[str]) -> str:
    if not arguments:
        return ""
    if len(arguments) == 1 and arguments[0].startswith("ONLY="):
        return arguments[0].removeprefix("ONLY=")
    raise BenchError(f"expected ONLY=name,name, not {' '.join(arguments)}")


def _cells(row: Row) -> tuple[str, str, str, str]:
    peer = "" if row.peer is None else f"{row.peer:.4g}"
    return f"{row.value:.4g}", row.unit, peer, "" if row.ratio is None else f"{row.ratio:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
