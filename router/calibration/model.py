"""A calibration: what turns an answer's signals into its confidence, and the thresholds that go with it.

One per release *and variant*: another quantization is another model, and its thresholds guarantee nothing for
this one. It is plain JSON with a version, evaluated with numpy alone. It has one head for each thing that is
decided differently: `generate` and `classify` see different signals.

Invariants
- A head's confidence is a non-decreasing function of one score, so its thresholds mean the same kept sets
  whichever of the two they are written in.
- Signals that are missing or not finite are refused by `evaluate`; they never become a number.

Not here: fitting (`router.calibration.fit`), reading files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from router.calibration.errors import BadSignal, CalibrationMismatch, CalibrationUnusable
from router.calibration.isotonic import IsotonicCurve
from router.calibration.logistic import LogisticScore
from router.calibration.threshold import Threshold

SCHEMA_VERSION = 1
GENERATE = "generate"
CLASSIFY = "classify"

Columns = Mapping[str, NDArray[np.float64]]


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signals to confidence, and the thresholds for it.

    Attributes:
        signals: The names of the signals that are used, in order.
        logistic: Makes one score of them. None: the only signal is the score, higher being surer.
        curve: From the score to the confidence. None: the logistic score is the confidence.
        threshold: For requests without a task key.
        tasks: Task key to its own threshold. A key that is not among them is forwarded, if there are any.
        fitted_rows: Rows from which the score was learned; 0 when its order was fixed beforehand.
        calibrated_rows: Rows behind the curve and the thresholds.
    """

    signals: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    threshold: Threshold
    logistic: LogisticScore | None = None
    curve: IsotonicCurve | None = None
    tasks: dict[str, Threshold] = {}
    fitted_rows: int = 0
    calibrated_rows: int = 0

    def __post_init__(self) -> None:
        if self.logistic is None and (self.curve is None or len(self.signals) != 1):
            raise CalibrationUnusable("a head without a logistic score needs one signal and a curve")
        if self.logistic is not None and len(self.logistic.weights) != len(self.signals):
            raise CalibrationUnusable(
                f"the logistic score has {len(self.logistic.weights)} weights for {len(self.signals)} signals"
            )

    def evaluate(self, signals: Mapping[str, float]) -> float:
        """The confidence of one answer, in [0, 1].

        Raises:
            BadSignal: One that the head uses is missing or not finite.
        """
        row = np.empty((1, len(self.signals)))
        for place, name in enumerate(self.signals):
            value = signals.get(name)
            if value is None:
                raise BadSignal(f"the signal {name} is missing", name=name)
            if not math.isfinite(value):
                raise BadSignal(f"the signal {name} is {value}; it must be a finite number", name=name)
            row[0, place] = value
        return float(self._confidence(row)[0])

    def evaluate_columns(self, signals: Columns) -> NDArray[np.float64]:
        """The confidences (n,) of a table of signals.

        Raises:
            BadSignal: A column that the head uses is missing or has values that are not finite.
        """
        missing = next((name for name in self.signals if name not in signals), None)
        if missing is not None:
            raise BadSignal(f"the signal {missing} is missing", name=missing)
        for name in self.signals:
            if not np.isfinite(signals[name]).all():
                raise BadSignal(f"the signal {name} has values that are not finite numbers", name=name)
        return self._confidence(np.column_stack([signals[name] for name in self.signals]))

    def threshold_for(self, task: str | None) -> Threshold:
        """The threshold of a task key; that of all tasks together without a key."""
        if task is None or not self.tasks:
            return self.threshold
        known = self.tasks.get(task)
        if known is not None:
            return known
        return Threshold(
            policy=self.threshold.policy,
            value=None,
            reason="forward all: calibration has not seen this task key",
            alpha=self.threshold.alpha,
            delta=self.threshold.delta,
        )

    def _confidence(self, rows: NDArray[np.float64]) -> NDArray[np.float64]:
        score = rows[:, 0] if self.logistic is None else self.logistic(rows)
        return score if self.curve is None else self.curve(score)


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The calibration of one variant of one release.

    Attributes:
        schema: Of this file.
        release: Such as `support-bot@7`.
        variant: Such as `int4`.
        heads: `generate`, `classify`, or both.
        scorer: How answers were judged in calibration, such as `numeric`.
    """

    release: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9-]+@[1-9][0-9]*$")]
    variant: Annotated[str, msgspec.Meta(min_length=1, max_length=63)]
    heads: Annotated[dict[Literal["generate", "classify"], Head], msgspec.Meta(min_length=1)]
    scorer: str = ""
    schema: Literal[1] = 1

    def check(self, *, release: str, variant: str) -> None:
        """Refuse to serve what it was not made for.

        Raises:
            CalibrationMismatch: It belongs to another release or variant.
        """
        if (self.release, self.variant) != (release, variant):
            raise CalibrationMismatch(
                f"this calibration belongs to {self.release} {self.variant} and cannot be used for "
                f"{release} {variant}: calibrate that one"
            )


def encode_calibration(calibration: Calibration) -> bytes:
    """As indented JSON, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"


def decode_calibration(raw: bytes) -> Calibration:
    """Parse and check.

    Raises:
        CalibrationUnusable: Not JSON, a wrong or unknown field, or a schema that this version does not know.
    """
    try:
        return msgspec.json.decode(raw, type=Calibration)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CalibrationUnusable(f"this is no calibration of schema {SCHEMA_VERSION}: {error}") from error
