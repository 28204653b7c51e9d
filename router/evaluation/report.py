"""Everything that a table of outcomes says about a router, in one value.

Three kinds of figures, and they are not mixed
- Of the whole table: accuracies, APGR, CPT, AUROC.
- Means over splits, each calibrated on `calibration_rows` rows: what one may expect of a threshold that was
  certified on so many rows (share kept, regret, cascade accuracy), how often it breaks its promise, and the
  naive one beside it.
- Means over random halves: ECE, fitted on one half and measured on the other.

The target of ECE is what confidence means here, that the edge's answer is as good as the cloud's (right, or
the cloud's is wrong too); AUROC is of right against wrong edge answers, as it is usually reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from router.calibration.binomial import rows_needed
from router.calibration.errors import TooFewRows
from router.calibration.threshold import DEFAULT_ALPHA, DEFAULT_DELTA, Threshold, certify
from router.evaluation import metrics
from router.evaluation.metrics import Bools, Floats
from router.evaluation.splits import SplitStudy, held_out_ece, study_splits

DEFAULT_CALIBRATION_ROWS = 500
DEFAULT_SPLITS = 500
# Fewer rows say nothing about a probability, whatever alpha and delta are.
_LEAST_ROWS = 20
_MOST_HALVES = 100
# Rows over all halves: two seconds of isotonic fits.
_ROWS_OF_HALVES = 2_000_000
_ROWS_OF_RESAMPLES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """A table. Columns are (n,): `confidence` in [0, 1], the others bool."""

    confidence: Floats
    edge_right: Bools
    cloud_right: Bools


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The figures. Shares and rates are in [0, 1].

    Attributes:
        rows: Of the table.
        edge_accuracy: Of the edge alone.
        cloud_accuracy: Of the cloud alone.
        oracle_accuracy: Where either is right.
        cascade_accuracy: At the certified thresholds; mean over splits.
        apgr: Average performance gap recovered; None where the cloud is not better.
        cpt50: Least share forwarded that recovers half of the gap; None where the cloud is not better.
        cpt80: The same for 80 %.
        cpt95: The same for 95 %.
        auroc: Of the confidence for a right edge answer; None where all are right or all are wrong.
        ece_before: Of the confidence as it is, on held-out halves.
        ece_after: After isotonic calibration on the other half.
        threshold: Median certified threshold over splits. None: most splits forward all.
        share_kept: At the certified thresholds; mean over splits.
        regret: True regret of the certified thresholds; mean over splits.
        violation_rate: Share of splits whose true regret is above alpha.
        naive_share_kept: Share kept by the threshold with the observed regret at alpha; mean over splits.
        naive_violation_rate: Its share of splits with a true regret above alpha.
    """

    rows: int
    edge_accuracy: float
    cloud_accuracy: float
    oracle_accuracy: float
    cascade_accuracy: float
    apgr: float | None
    cpt50: float | None
    cpt80: float | None
    cpt95: float | None
    auroc: float | None
    ece_before: float
    ece_after: float
    threshold: float | None
    share_kept: float
    regret: float
    violation_rate: float
    naive_share_kept: float
    naive_violation_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The report, and what stands beside it for people.

    Attributes:
        report: The figures.
        calibration_rows: Of each split.
        on_all_rows: Certified on the whole table: what one would deploy.
        intervals: Name of a figure to its 95 % bootstrap interval.
        held_out: The study again, with the regret measured on the rows left out. None when there are too few.
        notes: Sentences about what is odd about the table, or must be known to read the figures.
    """

    report: Report
    calibration_rows: int
    on_all_rows: Threshold
    intervals: dict[str, tuple[float, float]]
    held_out: SplitStudy | None
    notes: tuple[str, ...]


def evaluate_table(
    table: Outcomes,
    *,
    alpha: float = DEFAULT_ALPHA,
    delta: float = DEFAULT_DELTA,
    calibration_rows: int | None = None,
    splits: int = DEFAULT_SPLITS,
    seed: int = 0,
) -> Evaluation:
    """Judge the router that made the table.

    Args:
        table: Its rows; at least as many as alpha and delta need, and 20.
        alpha: Target regret, in (0, 1).
        delta: Probability with which a certificate may be wrong, in (0, 1).
        calibration_rows: Of each split. None: 500, or all where there are fewer.
        splits: How often to calibrate.
        seed: Of every random choice.

    Raises:
        TooFewRows: Of the table or for calibration; `minimum` are needed.
        ValueError: More calibration rows than the table has, or a number out of its range.
    """
    rows = len(table.confidence)
    least = max(_LEAST_ROWS, rows_needed(alpha=alpha, delta=delta))
    size = min(DEFAULT_CALIBRATION_ROWS, rows) if calibration_rows is None else calibration_rows
    for what, count in (("the table has", rows), ("calibration would have", size)):
        if count < least:
            raise TooFewRows(
                f"{what} {count} rows; a regret of {alpha:g} with confidence {1 - delta:g} needs at least "
                f"{least}",
                minimum=least,
            )
    if size > rows:
        raise ValueError(f"{size} rows for calibration are more than the {rows} of the table")
    columns = (table.confidence, table.edge_right, table.cloud_right)
    for_splits, for_left_out, for_halves, for_bootstrap = np.random.default_rng(seed).spawn(4)
    study = study_splits(
        *columns, alpha=alpha, delta=delta, calibration_rows=size, splits=splits, rng=for_splits
    )
    held_out = None
    if size < rows:
        held_out = study_splits(
            *columns,
            alpha=alpha,
            delta=delta,
            calibration_rows=size,
            splits=splits,
            rng=for_left_out,
            truth="held_out",
        )
    bad = metrics.regrets(table.edge_right, table.cloud_right)
    halves = max(5, min(_MOST_HALVES, _ROWS_OF_HALVES // rows))
    ece = held_out_ece(table.confidence, ~bad, halves=halves, rng=for_halves)
    on_all_rows = certify(table.confidence, bad, alpha=alpha, delta=delta)
    return Evaluation(
        report=_report(table, study, ece),
        calibration_rows=size,
        on_all_rows=on_all_rows,
        intervals=_intervals(table, study, for_bootstrap),
        held_out=held_out,
        notes=_notes(table, study, on_all_rows),
    )


def _report(table: Outcomes, study: SplitStudy, ece: tuple[float, float]) -> Report:
    curve = metrics.forward_curve(table.confidence, table.edge_right, table.cloud_right)
    median = float(np.median(study.certified.thresholds))
    return Report(
        rows=len(table.confidence),
        edge_accuracy=float(table.edge_right.mean()),
        cloud_accuracy=float(table.cloud_right.mean()),
        oracle_accuracy=float((table.edge_right | table.cloud_right).mean()),
        cascade_accuracy=float(study.certified.accuracy.mean()),
        apgr=curve.apgr(),
        cpt50=curve.cpt(0.5),
        cpt80=curve.cpt(0.8),
        cpt95=curve.cpt(0.95),
        auroc=metrics.auroc(table.confidence, table.edge_right),
        ece_before=ece[0],
        ece_after=ece[1],
        threshold=median if np.isfinite(median) else None,
        share_kept=float(study.certified.share_kept.mean()),
        regret=float(study.certified.regret.mean()),
        violation_rate=study.certified.violation_rate,
        naive_share_kept=float(study.naive.share_kept.mean()),
        naive_violation_rate=study.naive.violation_rate,
    )


def _intervals(
    table: Outcomes, study: SplitStudy, rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
    """Of accuracies by resampling rows; of what depends on the threshold by the splits, which resample
    too."""
    resamples = max(200, min(1000, _ROWS_OF_RESAMPLES // len(table.confidence)))
    found = metrics.bootstrap_means(
        {
            "edge_accuracy": table.edge_right,
            "cloud_accuracy": table.cloud_right,
            "oracle_accuracy": table.edge_right | table.cloud_right,
        },
        rng=rng,
        resamples=resamples,
    )
    for name, values in (
        ("cascade_accuracy", study.certified.accuracy),
        ("share_kept", study.certified.share_kept),
        ("regret", study.certified.regret),
        ("naive_share_kept", study.naive.share_kept),
    ):
        low, high = np.quantile(values, [0.025, 0.975])
        found[name] = (float(low), float(high))
    return found


def _notes(table: Outcomes, study: SplitStudy, on_all_rows: Threshold) -> tuple[str, ...]:
    notes = []
    if np.ptp(table.confidence) == 0:
        notes.append(
            "the confidence is constant: it tells no answer from another, so all are kept or all forwarded"
        )
    if table.edge_right.all():
        notes.append("every edge answer is right: nothing can be regretted, and AUROC does not exist")
    elif not table.edge_right.any():
        notes.append("every edge answer is wrong: AUROC does not exist")
    else:
        order = metrics.auroc(table.confidence, table.edge_right)
        if order is not None and order < 0.5:
            notes.append(f"the confidence orders answers worse than chance: AUROC {order:.2f}")
    if table.cloud_right.mean() <= table.edge_right.mean():
        notes.append("the cloud is not better than the edge: APGR and CPT do not exist")
    if on_all_rows.forwards_all:
        notes.append(on_all_rows.reason)
    forwarding = float(np.isinf(study.certified.thresholds).mean())
    if forwarding > 0 and not on_all_rows.forwards_all:
        notes.append(f"{forwarding:.0%} of the splits could certify nothing and forward all")
    return tuple(notes)
