"""What can be wrong with calibration data or a calibration file.

    CalibrationError
    ├── CalibrationUnusable   not JSON, a wrong field, an unknown schema
    ├── CalibrationMismatch   belongs to another release or variant
    ├── TooFewRows            `minimum` rows are needed
    └── BadSignal             a signal is missing, NaN or infinite; `name` says which

The router imports nothing of ours, so these are not part of the wire's error tree; who loads a calibration
says what they mean there.
"""

from __future__ import annotations


class CalibrationError(ValueError):
    """Base. The message is one sentence that says what is wrong and what to do."""


class CalibrationUnusable(CalibrationError):
    """The file cannot be read as a calibration of a schema that this version knows."""


class CalibrationMismatch(CalibrationError):
    """The calibration was made for another release or variant. Its threshold guarantees nothing here."""


class TooFewRows(CalibrationError):
    """Fewer rows than the statement needs. `minimum` is how many it needs."""

    def __init__(self, message: str, *, minimum: int) -> None:
        super().__init__(message)
        self.minimum = minimum


class BadSignal(CalibrationError):
    """A signal that the calibration uses is missing or not a finite number."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name
