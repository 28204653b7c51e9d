"""When text may be shown, and when the edge should stop: streaming without ever taking a word back.

The gate sees the running confidence after each step. It holds text back until enough tokens are confident,
then lets it through, holds again while the confidence is under the threshold, and says to leave once it
falls under a lower bar. What was shown stays; who continues from there is the caller's business. Pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GateAction(enum.Enum):
    """What to do with the text so far."""

    HOLD = "hold"
    SHOW = "show"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """How careful the gate is.

    Attributes:
        hold_back_tokens: Nothing is shown before this many tokens.
        min_tokens: The edge is not given up before this many tokens.
        early_exit_ratio: The lower bar, as a share of the threshold. 0: never leave early.
    """

    hold_back_tokens: int = 8
    min_tokens: int = 8
    early_exit_ratio: float = 0.5


def gate(*, tokens: int, confidence: float, threshold: float, settings: GateSettings) -> GateAction:
    """The action after `tokens` tokens with this running confidence."""
    if tokens >= settings.min_tokens and confidence < threshold * settings.early_exit_ratio:
        return GateAction.LEAVE
    if tokens >= settings.hold_back_tokens and confidence >= threshold:
        return GateAction.SHOW
    return GateAction.HOLD
