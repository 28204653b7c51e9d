"""A calibrated head as the router's confidence model."""

from __future__ import annotations

import dataclasses

from router.calibration.errors import BadSignal
from router.calibration.model import Head
from router.signals import Signals


class CalibratedConfidence:
    """The probability that the edge's answer is as good as the cloud's.

    Args:
        head: Its signals must all be fields of `Signals`; a boolean one counts as 0 or 1.

    Raises:
        BadSignal: The head uses a signal that this version of the router does not measure.
    """

    def __init__(self, head: Head) -> None:
        known = {field.name for field in dataclasses.fields(Signals)}
        strange = next((name for name in head.signals if name not in known), None)
        if strange is not None:
            raise BadSignal(
                f"the calibration uses the signal {strange}, which this version does not measure",
                name=strange,
            )
        self._head = head

    def confidence(self, signals: Signals) -> float:
        """In [0, 1]; 0 without tokens or where a signal is not finite: nothing to be sure of."""
        if signals.tokens == 0:
            return 0.0
        try:
            return self._head.evaluate({name: float(getattr(signals, name)) for name in self._head.signals})
        except BadSignal:
            return 0.0
