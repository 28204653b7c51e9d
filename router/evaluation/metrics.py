"""What a router is worth on a table of outcomes.

Columns are arrays of one length n: `confidence` in any scale (ECE needs probabilities), `edge_right` and
`cloud_right` bool. Rows of equal confidence cannot be told apart, so curves are exact expectations over a
random order among them. Where a figure does not exist (APGR of a cloud that is no better, AUROC of one
class) it is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ECE_BINS = 10


def regrets(edge_right: Bools, cloud_right: Bools) -> Bools:
    """Rows in which keeping the edge's answer would be regretted: it is wrong and the cloud's is right."""
    return ~edge_right & cloud_right


def auroc(scores: Floats, positive: Bools) -> float | None:
    """P(score of a positive > score of a negative), ties counted half (Mann-Whitney)."""
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        return None
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2.0)[inverse]
    return float((ranks[positive].sum() - positives * (positives + 1) / 2.0) / (positives * negatives))


def expected_calibration_error(probabilities: Floats, happened: Bools, *, bins: int = ECE_BINS) -> float:
    """Mean over rows of |mean probability - share that happened| of the row's bin; bins of equal width.

    Guo et al. 2017. Biased upwards on few rows: a perfectly calibrated forecast does not get 0.
    """
    place = np.clip((probabilities * bins).astype(np.int64), 0, bins - 1)
    gap = np.bincount(place, weights=probabilities - happened, minlength=bins)
    return float(np.abs(gap).sum() / len(probabilities))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardCurve:
    """Accuracy of the cascade against the share forwarded, least confident first.

    Attributes:
        forwarded: (m,) from 0 to 1, one point per distinct confidence; linear between them.
        accuracy: (m,) of edge and cloud together.
    """

    forwarded: Floats
    accuracy: Floats

    @property
    def edge_accuracy(self) -> float:
        return float(self.accuracy[0])

    @property
    def cloud_accuracy(self) -> float:
        return float(self.accuracy[-1])

    def apgr(self) -> float | None:
        """Average performance gap recovered (RouteLLM, Ong et al. 2024): the mean over all shares forwarded.

        0.5 is a random router. None where the cloud is not better than the edge.
        """
        gap = self.cloud_accuracy - self.edge_accuracy
        if gap <= 0:
            return None
        area = float(np.trapezoid(self.accuracy, self.forwarded))
        return (area - self.edge_accuracy) / gap

    def cpt(self, recovered: float) -> float | None:
        """Call-performance threshold: the least share forwarded that recovers this part of the gap.

        Args:
            recovered: In (0, 1], such as 0.8 for CPT80.
        """
        gap = self.cloud_accuracy - self.edge_accuracy
        if gap <= 0:
            return None
        wanted = self.edge_accuracy + recovered * gap
        reached = np.flatnonzero(self.accuracy >= wanted - 1e-12)
        after = int(reached[0])
        if after == 0:
            return 0.0
        low, high = self.accuracy[after - 1], self.accuracy[after]
        part = (wanted - low) / (high - low)
        step = self.forwarded[after] - self.forwarded[after - 1]
        return float(min(1.0, self.forwarded[after - 1] + part * step))


def forward_curve(confidence: Floats, edge_right: Bools, cloud_right: Bools) -> ForwardCurve:
    """The curve of a table with at least one row."""
    rows = len(confidence)
    _, inverse, counts = np.unique(confidence, return_inverse=True, return_counts=True)
    gains = np.bincount(inverse, weights=cloud_right.astype(np.float64) - edge_right)
    return ForwardCurve(
        forwarded=np.concatenate(([0.0], np.cumsum(counts) / rows)),
        accuracy=float(edge_right.mean()) + np.concatenate(([0.0], np.cumsum(gains) / rows)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AtThreshold:
    """A cascade that keeps what reaches the threshold. All are shares of all rows."""

    share_kept: float
    accuracy: float
    regret: float


def at_threshold(confidence: Floats, edge_right: Bools, cloud_right: Bools, threshold: float) -> AtThreshold:
    """The cascade at one threshold; infinity forwards all."""
    kept = confidence >= threshold
    return AtThreshold(
        share_kept=float(kept.mean()),
        accuracy=float(np.where(kept, edge_right, cloud_right).mean()),
        regret=float((kept & regrets(edge_right, cloud_right)).mean()),
    )


def bootstrap_means(
    columns: Mapping[str, NDArray[np.float64] | Bools],
    *,
    rng: np.random.Generator,
    level: float = 0.95,
    resamples: int = 1000,
) -> dict[str, tuple[float, float]]:
    """Percentile bootstrap intervals of the columns' means, all over the same resampled rows.

    Args:
        columns: Name to (n,).
        level: Of the intervals, such as 0.95.
    """
    table = np.column_stack([np.asarray(column, dtype=np.float64) for column in columns.values()])
    rows = len(table)
    means = np.empty((resamples, table.shape[1]))
    for k in range(resamples):
        counts = np.bincount(rng.integers(0, rows, size=rows), minlength=rows)
        means[k] = counts @ table / rows
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(columns)}
