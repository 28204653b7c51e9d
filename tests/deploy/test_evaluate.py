"""`forebay evaluate`: figures of the sample tables, and a sentence for every bad one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import cli, tables
from deploy.tables import BadCell, MislabelledColumn, MissingColumn, TableError, read_table

SAMPLES = Path(__file__).resolve().parents[1] / "data"
KEYS = [
    "rows",
    "edge_accuracy",
    "cloud_accuracy",
    "oracle_accuracy",
    "cascade_accuracy",
    "apgr",
    "cpt50",
    "cpt80",
    "cpt95",
    "auroc",
    "ece_before",
    "ece_after",
    "threshold",
    "share_kept",
    "regret",
    "violation_rate",
    "naive_share_kept",
    "naive_violation_rate",
]
BANKING = SAMPLES / "banking77_qwen_pair.csv"
MMLU = SAMPLES / "agreement_qwen7b_qwen72b_mmlu.csv"
COSMOS = SAMPLES / "agreement_qwen7b_qwen72b_cosmosqa.csv"

run = CliRunner()


def figures(*arguments: str) -> dict[str, float]:
    result = run.invoke(cli.app, ["evaluate", *arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def written(tmp_path: Path, text: str, name: str = "table.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def csv_of(rows: int, *, header: str = "confidence,edge_correct,cloud_correct") -> str:
    lines = [f"{0.5 + row % 50 / 100},{row % 3 and 1},{1}" for row in range(rows)]
    return "\n".join([header, *lines]) + "\n"


@pytest.mark.parametrize("sample", [BANKING, MMLU, COSMOS], ids=["banking77", "mmlu", "cosmosqa"])
def test_every_sample_meets_the_guarantee_near_the_naive_share_and_is_calibrated(sample: Path) -> None:
    found = figures(str(sample))
    assert list(found) == KEYS
    assert found["violation_rate"] <= 0.1 + 3 * math.sqrt(0.1 * 0.9 / 500)
    assert found["naive_violation_rate"] > 0.25
    assert found["naive_share_kept"] - found["share_kept"] <= 0.08
    assert found["ece_after"] <= 0.06


def test_known_figures_of_banking77() -> None:
    found = figures(str(BANKING), "--splits", "20")
    assert found["rows"] == 700
    assert found["edge_accuracy"] == pytest.approx(0.601, abs=5e-4)
    assert found["cloud_accuracy"] == pytest.approx(0.661, abs=5e-4)
    assert found["oracle_accuracy"] == pytest.approx(0.761, abs=5e-4)
    assert found["auroc"] == pytest.approx(0.744, abs=5e-4)


def test_named_columns_and_a_missing_cloud_column() -> None:
    found = figures(str(MMLU), "--confidence", "margin", "--edge-correct", "agree", "--splits", "20")
    assert found["cloud_accuracy"] == 1.0


def test_csv_and_json_lines_give_the_same_figures(tmp_path: Path) -> None:
    rows = BANKING.read_text().splitlines()
    header = rows[0].split(",")
    lines = []
    for row in rows[1:]:
        facts = dict(zip(header, row.split(","), strict=True))
        record: dict[str, object] = {"confidence": float(facts["confidence"])}
        record["edge_correct"] = facts["edge_correct"] == "1"
        record["cloud_correct"] = int(facts["cloud_correct"])
        lines.append(json.dumps(record))
    as_json = written(tmp_path, "\n".join(lines), "table.jsonl")
    assert figures(str(as_json), "--splits", "20") == figures(str(BANKING), "--splits", "20")


def test_options_reach_the_study() -> None:
    loose = figures(
        str(BANKING), "--alpha", "0.1", "--splits", "50", "--calibration-rows", "300", "--seed", "3"
    )
    strict = figures(
        str(BANKING), "--alpha", "0.03", "--splits", "50", "--calibration-rows", "300", "--seed", "3"
    )
    assert loose["share_kept"] > strict["share_kept"] + 0.1
    surer = figures(
        str(BANKING), "--delta", "0.01", "--splits", "50", "--calibration-rows", "300", "--seed", "3"
    )
    assert surer["regret"] < loose["regret"]


def test_the_table_for_people_says_what_was_done() -> None:
    result = run.invoke(cli.app, ["evaluate", str(MMLU), "--splits", "20"])
    assert result.exit_code == 0
    for phrase in ("share kept at the edge", "certified on all rows", "splits with regret over the target"):
        assert phrase in result.stdout
    assert "the cloud counts as always right" in result.stderr


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (csv_of(44), "needs at least 45"),
        ("confidence,edge_correct\n", "has no rows"),
        ("", "has no rows"),
        (csv_of(60, header="confidense,edge_correct,cloud_correct"), "did you mean 'confidense'?"),
        (csv_of(60, header="confidence,edge_corect,cloud_correct"), "did you mean 'edge_corect'?"),
        (csv_of(60, header="confidence,confidence,cloud_correct"), "two columns named 'confidence'"),
        (csv_of(60) + "nan,1,1\n", "line 62, column confidence: nan is not a finite number"),
        (csv_of(60) + "inf,1,1\n", "not a finite number"),
        (csv_of(60) + "high,1,1\n", "'high' is no number"),
        (csv_of(60) + ",1,1\n", "line 62, column confidence: the cell is empty"),
        (csv_of(60) + "0.5,yes,1\n", "'yes' is neither 0 nor 1"),
        (csv_of(60) + "0.5,nan,1\n", "neither 0 nor 1"),
        (csv_of(60) + "0.5,2,1\n", "the column edge_correct holds 2"),
        (csv_of(60) + "0.5,1,0.7\n", "the column cloud_correct holds 0.7"),
        (csv_of(60) + "1.5,1,1\n", "a confidence is between 0 and 1"),
        (csv_of(60) + "-3.2,1,1\n", "a confidence is between 0 and 1"),
        (csv_of(60) + "0.5,1\n", "line 62 has 2 cells; the header has 3"),
        (csv_of(60) + '"0.5,1,1\n', "is no CSV"),
    ],
)
def test_a_bad_csv_ends_in_a_sentence_and_code_2(tmp_path: Path, text: str, sentence: str) -> None:
    result = run.invoke(cli.app, ["evaluate", str(written(tmp_path, text))])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"confidence": 0.5, "edge_correct": null}', "line 2, column edge_correct: the cell is empty"),
        ('{"confidence": 0.5}', "line 2, column edge_correct: the cell is empty"),
        ("[1, 2]", "line 2 is no JSON object"),
        ("{", "line 2 is no JSON object"),
        ('{"confidence": {"a": 1}, "edge_correct": 1}', "is no number"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: str, sentence: str) -> None:
    path = written(tmp_path, '{"confidence": 0.7, "edge_correct": 1}\n' + line, "table.jsonl")
    with pytest.raises(TableError, match=sentence.replace("[", r"\[")):
        read_table(path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--edge-correct", "margin"], "a correctness is 0 or 1"),
        (["--confidence", "edge_correct"], "cannot be the confidence and a correctness at once"),
        (["--confidence", "id"], "a confidence is between 0 and 1"),
        (["--cloud-correct", "cloud"], "there is no column 'cloud'; did you mean 'cloud_correct'?"),
        (["--alpha", "0"], "--alpha is 0.0; it must be between 0 and 1"),
        (["--delta", "1"], "--delta is 1.0"),
        (["--alpha", "nan"], "--alpha is nan"),
        (["--calibration-rows", "701"], "more than the 700 of the table"),
        (["--calibration-rows", "10"], "needs at least 45"),
        (["--alpha", "0.001"], "needs at least 2302"),
    ],
)
def test_a_wrong_option_ends_in_a_sentence_and_code_2(arguments: list[str], sentence: str) -> None:
    result = run.invoke(cli.app, ["evaluate", str(BANKING), *arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_correctness_under_another_name_is_not_taken_for_a_perfect_confidence(tmp_path: Path) -> None:
    text = "score,edge_correct\n" + "".join(f"{row % 2},{row % 2}\n" for row in range(60))
    with pytest.raises(MislabelledColumn, match="not a confidence"):
        read_table(written(tmp_path, text), confidence="score")


def test_errors_have_their_types(tmp_path: Path) -> None:
    path = written(tmp_path, csv_of(60) + "x,1,1\n")
    with pytest.raises(BadCell):
        read_table(path)
    with pytest.raises(MissingColumn):
        read_table(path, confidence="nowhere")


def test_a_table_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"confidence,edge_correct\n0.5,\xff\n")
    with pytest.raises(TableError, match="not UTF-8"):
        read_table(path)


def test_a_file_beyond_the_bound_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MOST_BYTES", 100)
    with pytest.raises(TableError, match="at most 100 are read"):
        read_table(written(tmp_path, csv_of(60)))


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(b"\xef\xbb\xbf" + csv_of(60).replace("\n", "\r\n").encode())
    assert len(read_table(path).outcomes.confidence) == 60


def test_a_missing_file_is_one_sentence() -> None:
    result = run.invoke(cli.app, ["evaluate", "nowhere.csv"])
    assert result.exit_code == 1
    assert "No such file or directory: nowhere.csv" in result.stderr


def test_a_constant_confidence_forwards_all_loudly(tmp_path: Path) -> None:
    text = "confidence,edge_correct\n" + "".join(f"0.8,{row % 2}\n" for row in range(100))
    result = run.invoke(cli.app, ["evaluate", str(written(tmp_path, text)), "--splits", "20"])
    assert result.exit_code == 0
    assert "forward all" in result.stdout
    assert "the confidence is constant" in result.stderr
