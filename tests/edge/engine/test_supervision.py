"""Pauses before restarts."""

from __future__ import annotations

import pytest

from edge.engine.supervision import EngineStartError, Supervision


def test_pauses_double_up_to_the_bound() -> None:
    watch = Supervision(backoff_least_s=0.5, backoff_most_s=3.0)
    assert [watch.backoff_s(n, 0.0) for n in (1, 2, 3, 4, 1000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_jitter_takes_up_to_half_away() -> None:
    watch = Supervision(backoff_least_s=1.0)
    assert watch.backoff_s(1, 0.999) == pytest.approx(0.5, abs=0.001)


def test_several_heartbeats_fit_before_a_worker_counts_as_hung() -> None:
    for hang_timeout_s in (0.5, 30.0, 600.0):
        assert Supervision(hang_timeout_s=hang_timeout_s).heartbeat_s <= hang_timeout_s / 5


def test_a_start_error_shows_what_the_worker_wrote() -> None:
    assert str(EngineStartError("it ended", log_tail="Traceback")) == "it ended\nTraceback"
