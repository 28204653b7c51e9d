"""Reading a table of outcomes: CSV, or JSON lines. Refuses what cannot be meant, with row and column.

A table has one row per request: the edge's confidence, whether the edge was right, and whether the cloud
was. What the figures mean is for `router.evaluation`.
"""

from __future__ import annotations

import csv
import difflib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.command import UsageProblem
from router.evaluation.report import Outcomes

# A million rows or so; more says nothing that a sample does not.
MOST_BYTES = 512 * 1024 * 1024
_CONFIDENCE = ("confidence",)
_EDGE_CORRECT = ("edge_correct", "agree")
_CLOUD_CORRECT = ("cloud_correct",)
_JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
_TRUTH = {"0": False, "1": True, "0.0": False, "1.0": True, "false": False, "true": True}

Row = Mapping[str, object]


class TableError(UsageProblem):
    """The table cannot be read, or cannot be what it is said to be."""


class MissingColumn(TableError):
    """No such column. The message names the nearest one."""


class BadCell(TableError):
    """A cell is empty, or no number of the kind that its column needs. The message says where."""


class MislabelledColumn(TableError):
    """A column holds something else than it is said to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTable:
    """Outcomes, and which columns they came from.

    Attributes:
        outcomes: The columns.
        notes: Sentences about what was assumed.
    """

    outcomes: Outcomes
    notes: tuple[str, ...]


def read_table(
    path: Path,
    *,
    confidence: str | None = None,
    edge_correct: str | None = None,
    cloud_correct: str | None = None,
) -> LoadedTable:
    """Read and check.

    Args:
        path: `.csv`, or `.jsonl`, `.ndjson` or `.json` with one object a line; anything else is told by its
            first character.
        confidence: Its column. None: `confidence`.
        edge_correct: Its column. None: `edge_correct`, or `agree` where there is no such column.
        cloud_correct: Its column. None: `cloud_correct`; where there is none the cloud is always right.

    Raises:
        TableError: Or one of its kinds.
        OSError: The file cannot be read.
    """
    columns, rows = _rows(path)
    if not rows:
        raise TableError(f"{path.name} has no rows")
    notes: list[str] = []
    score_name = _column(columns, confidence, _CONFIDENCE, "--confidence")
    edge_name = _column(columns, edge_correct, _EDGE_CORRECT, "--edge-correct")
    if edge_correct is None and edge_name != _EDGE_CORRECT[0]:
        notes.append(f"the column {edge_name} is taken for whether the edge is right")
    cloud_name = None
    if cloud_correct is not None or _CLOUD_CORRECT[0] in columns:
        cloud_name = _column(columns, cloud_correct, _CLOUD_CORRECT, "--cloud-correct")
    else:
        notes.append("there is no column cloud_correct: the cloud counts as always right")
    if score_name in (edge_name, cloud_name):
        raise MislabelledColumn(f"the column {score_name} cannot be the confidence and a correctness at once")
    edge_right = _truths(rows, edge_name)
    cloud_right = np.ones(len(rows), dtype=bool) if cloud_name is None else _truths(rows, cloud_name)
    score = _confidences(rows, score_name)
    _refuse_leaks(score, score_name, {edge_name: edge_right, cloud_name: cloud_right})
    return LoadedTable(
        outcomes=Outcomes(confidence=score, edge_right=edge_right, cloud_right=cloud_right),
        notes=tuple(notes),
    )


def _rows(path: Path) -> tuple[Sequence[str], list[tuple[int, Row]]]:
    """Column names, and rows with their line numbers."""
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise TableError(f"{path.name} has {size:,} bytes; at most {MOST_BYTES:,} are read: take a sample")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TableError(f"{path.name} is not UTF-8 (byte {error.start})") from error
    is_json = path.suffix.lower() in _JSON_SUFFIXES or (
        path.suffix.lower() != ".csv" and text.lstrip().startswith("{")
    )
    rows = list(_json_rows(text, path.name) if is_json else _csv_rows(text, path.name))
    return list(dict.fromkeys(name for _, row in rows for name in row)), rows


def _csv_rows(text: str, name: str) -> Iterator[tuple[int, Row]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [column.strip() for column in next(reader, [])]
        if len(set(header)) != len(header):
            double = next(column for column in header if header.count(column) > 1)
            raise TableError(f"{name} has two columns named {double!r}")
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(header):
                raise TableError(
                    f"{name} line {reader.line_num} has {len(cells)} cells; the header has {len(header)}"
                )
            yield reader.line_num, dict(zip(header, cells, strict=True))
    except csv.Error as error:
        raise TableError(f"{name} line {reader.line_num} is no CSV: {error}") from error


def _json_rows(text: str, name: str) -> Iterator[tuple[int, Row]]:
    decoder = msgspec.json.Decoder(dict[str, object])
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield number, decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise TableError(f"{name} line {number} is no JSON object: {error}") from error


def _column(columns: Sequence[str], asked: str | None, known: Sequence[str], option: str) -> str:
    wanted = (asked,) if asked is not None else known
    found = next((name for name in wanted if name in columns), None)
    if found is not None:
        return found
    nearest = difflib.get_close_matches(wanted[0], columns, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    has = ", ".join(columns[:12]) + (", ..." if len(columns) > 12 else "")
    raise MissingColumn(f"there is no column {wanted[0]!r}{hint} Name it with {option}. The table has: {has}")


def _truths(rows: list[tuple[int, Row]], name: str) -> NDArray[np.bool_]:
    found = np.empty(len(rows), dtype=bool)
    for place, (line, row) in enumerate(rows):
        text = _cell(row, name, line).lower()
        truth = _TRUTH.get(text)
        if truth is None:
            number = _number(text)
            if number is None or math.isnan(number):
                raise BadCell(f"line {line}, column {name}: {text!r} is neither 0 nor 1")
            raise MislabelledColumn(
                f"the column {name} holds {text} in line {line}; a correctness is 0 or 1. "
                "Is it another column that says whether the answer is right?"
            )
        found[place] = truth
    return found


def _confidences(rows: list[tuple[int, Row]], name: str) -> NDArray[np.float64]:
    found = np.empty(len(rows))
    for place, (line, row) in enumerate(rows):
        text = _cell(row, name, line)
        number = _number(text)
        if number is None:
            raise BadCell(f"line {line}, column {name}: {text!r} is no number")
        if not math.isfinite(number):
            raise BadCell(f"line {line}, column {name}: {text} is not a finite number")
        if not 0.0 <= number <= 1.0:
            raise MislabelledColumn(
                f"the column {name} holds {text} in line {line}; a confidence is between 0 and 1"
            )
        found[place] = number
    return found


def _refuse_leaks(
    score: NDArray[np.float64], name: str, truths: Mapping[str | None, NDArray[np.bool_]]
) -> None:
    """A confidence that *is* the truth under another name would look like a perfect router."""
    if not np.isin(score, (0.0, 1.0)).all() or np.ptp(score) == 0:
        return
    for other, truth in truths.items():
        if np.array_equal(score > 0.5, truth):
            raise MislabelledColumn(
                f"the column {name} equals {other}: it is a correctness, not a confidence"
            )


def _cell(row: Row, name: str, line: int) -> str:
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise BadCell(f"line {line}, column {name}: the cell is empty")
    return str(value).strip()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
