"""The demo's verdict: everything answered, and both tiers spoke."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from deploy.demo import Outcome, load_prompts, summarize
from deploy.up import describe, show_summary


def outcome(tier: str | None, total_s: float = 1.0, *, error: str | None = None) -> Outcome:
    return Outcome(prompt="p", tier=tier, total_s=total_s, error=error, reason="confident")


def test_success_needs_both_tiers() -> None:
    assert summarize([outcome("edge"), outcome("cloud")]).failure is None


@pytest.mark.parametrize(
    ("outcomes", "failure"),
    [
        ([outcome("edge")], "the cloud answered none of the prompts"),
        ([outcome("cloud")], "the edge answered none of the prompts"),
        (
            [outcome("edge"), outcome("cloud"), outcome(None, error="UNAVAILABLE: gone")],
            "1 of 3 prompts got no answer",
        ),
        ([], "nothing was asked"),
    ],
)
def test_anything_less_is_a_failure(outcomes: list[Outcome], failure: str) -> None:
    assert summarize(outcomes).failure == failure


def test_shares_and_latencies_are_over_answered_prompts() -> None:
    times = [1.0, 2.0, 3.0, 4.0]
    summary = summarize(
        [*(outcome("edge", t) for t in times), outcome("cloud", 9.0), outcome(None, error="x")]
    )
    assert summary.edge_share == pytest.approx(0.8)
    edge, cloud = summary.latencies
    assert (edge.tier, edge.answers, edge.mean_s, edge.p50_s, edge.p95_s) == ("edge", 4, 2.5, 2.5, 4.0)
    assert (cloud.tier, cloud.p50_s, cloud.p95_s) == ("cloud", 9.0, 9.0)


def test_the_packaged_prompts_are_a_dozen_plus_hard_ones() -> None:
    prompts = load_prompts().prompts
    assert sum(not p.hard for p in prompts) >= 12
    assert sum(p.hard for p in prompts) >= 3
    assert len({p.text for p in prompts}) == len(prompts)


def test_a_missing_answer_is_described_with_its_error() -> None:
    assert describe(outcome(None, error="UNAVAILABLE: gone")) == "  -> no answer: UNAVAILABLE: gone"


def test_the_summary_is_printed_by_tier() -> None:
    console = Console(file=io.StringIO(), width=100)
    show_summary(summarize([outcome("edge", 0.5), outcome("cloud", 2.0)]), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "2 of 2 answered, 50% kept at the edge" in text
    assert "0.50" in text
    assert "2.00" in text
