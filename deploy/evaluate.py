"""`forebay evaluate`: judges a router on a table of outcomes, without any model.

Figures go to stdout, what was assumed and what is odd to stderr, so that `--json` can be piped.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from router.evaluation.report import Evaluation

_PER_CENT = {
    "edge_accuracy": "accuracy of the edge",
    "cloud_accuracy": "accuracy of the cloud",
    "oracle_accuracy": "accuracy of the better of the two",
}


def evaluate(
    table: Annotated[Path, typer.Argument(help="CSV, or JSON lines; one row per request.")],
    confidence: Annotated[
        str | None, typer.Option(help="Column with the edge's confidence, 0 to 1. Default: confidence.")
    ] = None,
    edge_correct: Annotated[
        str | None, typer.Option(help="Column that is 1 where the edge is right. Default: edge_correct.")
    ] = None,
    cloud_correct: Annotated[
        str | None,
        typer.Option(help="Column that is 1 where the cloud is right. Default: cloud_correct; 1 if absent."),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Largest regret: kept, wrong, and the cloud is right.")] = 0.05,
    delta: Annotated[float, typer.Option(help="Probability with which a certificate may be wrong.")] = 0.1,
    calibration_rows: Annotated[
        int | None, typer.Option(help="Rows of each calibration. Default: 500, or all.")
    ] = None,
    splits: Annotated[int, typer.Option(min=1, max=100_000, help="How often to calibrate.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of every random choice.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Judge a router offline: accuracy, share kept at a certified threshold, and how often it breaks."""
    import msgspec

    from deploy.command import UsageProblem
    from deploy.tables import read_table
    from router.calibration.errors import CalibrationError
    from router.evaluation.report import evaluate_table

    for name, value in (("alpha", alpha), ("delta", delta)):
        if not 0.0 < value < 1.0:
            raise UsageProblem(f"--{name} is {value}; it must be between 0 and 1")
    loaded = read_table(table, confidence=confidence, edge_correct=edge_correct, cloud_correct=cloud_correct)
    try:
        result = evaluate_table(
            loaded.outcomes,
            alpha=alpha,
            delta=delta,
            calibration_rows=calibration_rows,
            splits=splits,
            seed=seed,
        )
    except (CalibrationError, ValueError) as error:
        raise UsageProblem(str(error)) from error
    for note in (*loaded.notes, *result.notes):
        typer.echo(f"note: {note}", err=True)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(result.report), indent=2).decode())
        return
    from rich.console import Console

    Console().print(_rendered(result, alpha=alpha, delta=delta, splits=splits))


def _rendered(result: Evaluation, *, alpha: float, delta: float, splits: int) -> Table:
    from rich.table import Table

    report = result.report
    table = Table(title=f"{report.rows:,} rows, regret at most {alpha:g} with confidence {1 - delta:g}")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("95 % interval", justify="right")

    def share(label: str, name: str) -> None:
        value = getattr(report, name)
        span = result.intervals.get(name)
        table.add_row(label, f"{value:.1%}", "" if span is None else f"{span[0]:.1%} to {span[1]:.1%}")

    for name, label in _PER_CENT.items():
        share(label, name)
    for label, number in (
        ("APGR", report.apgr),
        ("CPT 50 %", report.cpt50),
        ("CPT 80 %", report.cpt80),
        ("CPT 95 %", report.cpt95),
        ("AUROC", report.auroc),
        ("ECE before calibration", report.ece_before),
        ("ECE after, on held-out halves", report.ece_after),
    ):
        table.add_row(label, "none" if number is None else f"{number:.3f}", "")
    table.add_section()
    table.add_row(f"[bold]certified on {result.calibration_rows:,} rows, {splits:,} times", "", "")
    table.add_row("median threshold", _threshold(report.threshold), "")
    share("accuracy of the cascade", "cascade_accuracy")
    share("share kept at the edge", "share_kept")
    share("regret", "regret")
    table.add_row("splits with regret over the target", f"{report.violation_rate:.1%}", "")
    if result.held_out is not None:
        label = "  measured on the rows left out"
        table.add_row(label, f"{result.held_out.certified.violation_rate:.1%}", "")
    table.add_section()
    table.add_row("[bold]naive: observed regret at the target", "", "")
    share("share kept at the edge", "naive_share_kept")
    table.add_row("splits with regret over the target", f"{report.naive_violation_rate:.1%}", "")
    table.add_section()
    table.add_row("[bold]certified on all rows", "", "")
    table.add_row("threshold", _threshold(result.on_all_rows.value), "")
    table.add_row("share kept at the edge", f"{result.on_all_rows.share_kept:.1%}", "")
    return table


def _threshold(value: float | None) -> str:
    return "forward all" if value is None else f"{value:.4f}"
