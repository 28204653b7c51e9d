"""Continuous batching over a model whose logits tell every mistake with rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.engine.core import CoreEvent, CoreLimits, EngineCore
from edge.engine.model import Float32, Int64
from edge.engine.protocol import EngineRequest, Finished, LabelRequest, LabelResult, Started, Tokens
from protos.errors import (
    ContextTooLong,
    DeadlineExpired,
    ForebayError,
    InternalFault,
    InvalidArgument,
    Overloaded,
)
from protos.values import FinishReason, SamplingParams
from tests.fakes.history_model import HistoryModel
from tests.fakes.letters import ByteTokenizer
from tests.fakes.ticking import Clock

EOS = frozenset({0, 1})
ROWS = 4
CONTEXT = 96


class WatchedModel(HistoryModel):
    """Counts what runs, takes time when told to, and can break one answer."""

    def __init__(self, clock: Clock, *, prefill_s: float = 0.0, rows: int = ROWS) -> None:
        super().__init__(max_rows=rows, context_tokens=CONTEXT)
        self.clock, self.prefill_s = clock, prefill_s
        self.steps: list[str] = []
        self.poison: int | None = None

    def prefill(self, row: int, tokens: Int64, start: int, *, all_logits: bool = False) -> Float32:
        self.clock.now += self.prefill_s
        self.steps.append(f"prefill {len(tokens)}")
        return super().prefill(row, tokens, start, all_logits=all_logits)

    def decode(self, tokens: Int64, lengths: Int64) -> Float32:
        self.steps.append(f"decode {len(tokens)}")
        logits = super().decode(tokens, lengths)
        if self.poison is not None:
            logits[self.poison] = np.nan
        return logits


@dataclass
class Bench:
    """A core with what happened, by request."""

    prefill_s: float = 0.0
    rows: int = ROWS
    capacity: int = 1000
    max_waiting: int = 1000
    clock: Clock = field(default_factory=Clock)
    seen: dict[str, list[CoreEvent]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = WatchedModel(self.clock, prefill_s=self.prefill_s, rows=self.rows)
        limits = CoreLimits(kv_capacity_tokens=self.capacity, max_waiting=self.max_waiting)
        self.core = EngineCore(
            self.model, tokenizer=ByteTokenizer(), eos_token_ids=EOS, limits=limits, clock=self.clock
        )

    def step(self) -> list[tuple[str, CoreEvent]]:
        events = self.core.step()
        for request_id, event in events:
            self.seen.setdefault(request_id, []).append(event)
        return events

    def run(self, most_steps: int = 100_000) -> None:
        for _ in range(most_steps):
            if not self.core.has_work:
                return
            self.step()
        pytest.fail("the core does not come to an end")

    def tokens(self, request_id: str) -> list[int]:
        events = self.seen.get(request_id, [])
        return [stat.token_id for event in events if isinstance(event, Tokens) for stat in event.stats]


def _request(
    request_id: str = "r",
    prompt: tuple[int, ...] = (5, 6, 7),
    *,
    deadline_s: float | None = None,
    prompt_stats: bool = False,
    **sampling: object,
) -> EngineRequest:
    params = SamplingParams(**({"max_tokens": 12} | sampling))  # type: ignore[arg-type]
    return EngineRequest(
        request_id=request_id,
        prompt_tokens=prompt,
        sampling=params,
        deadline_s=deadline_s,
        prompt_stats=prompt_stats,
    )


def _label_request(request_id: str, context: tuple[int, ...] = (3, 4, 5)) -> LabelRequest:
    return LabelRequest(
        request_id=request_id,
        context_tokens=context,
        prior_tokens=(4, 5),
        labels=("a", "b", "c"),
        label_tokens=((7,), (8, 9, 10), (11, 12)),
    )


def _alone(request: EngineRequest) -> tuple[list[int], FinishReason]:
    bench = Bench()
    bench.core.submit(request)
    bench.run()
    last = bench.seen[request.request_id][-1]
    assert isinstance(last, Finished)
    return bench.tokens(request.request_id), last.reason


def _random_request(generator: np.random.Generator, index: int) -> EngineRequest:
    sampled = bool(generator.random() < 0.5)
    return _request(
        str(index),
        tuple(generator.integers(2, 97, int(generator.integers(1, 60))).tolist()),
        max_tokens=int(generator.integers(1, 30)),
        temperature=float(generator.uniform(0.2, 1.5)) if sampled else 0.0,
        top_k=int(generator.integers(0, 20)),
        top_p=float(generator.uniform(0.3, 1.0)),
        seed=index,
        repetition_penalty=float(generator.choice([1.0, 1.3])),
        prompt_stats=bool(generator.random() < 0.2),
    )


def test_two_hundred_requests_that_join_and_leave_get_the_tokens_they_get_alone() -> None:
    generator = np.random.default_rng(42)
    bench = Bench(capacity=250, prefill_s=0.02)
    requests = [_random_request(generator, index) for index in range(200)]
    cancelled: set[str] = set()
    labels: set[str] = set()
    waiting = list(requests)
    while waiting or bench.core.has_work:
        for _ in range(int(generator.integers(0, 3))):
            if waiting:
                bench.core.submit(waiting.pop(0))
        if generator.random() < 0.05 and waiting:
            labels.add(f"labels {len(labels)}")
            bench.core.submit_labels(_label_request(f"labels {len(labels) - 1}"))
        if generator.random() < 0.08:
            chosen = str(generator.integers(0, 200))
            if bench.core.cancel(chosen):
                cancelled.add(chosen)
        bench.step()
        assert bench.core.stats().kv_reserved_tokens <= 250
    assert len(cancelled) > 10
    assert len(labels) > 5
    for request in requests:
        expected, reason = _alone(request)
        got = bench.tokens(request.request_id)
        if request.request_id in cancelled:
            assert got == expected[: len(got)]
            assert not any(isinstance(e, Finished) for e in bench.seen.get(request.request_id, []))
            continue
        assert got == expected
        ends = [e for e in bench.seen[request.request_id] if isinstance(e, Finished | ForebayError)]
        assert ends == [bench.seen[request.request_id][-1]]
        assert isinstance(ends[0], Finished)
        assert ends[0].reason is reason
    alone = Bench()
    alone.core.submit_labels(_label_request("l"))
    alone.run()
    (result,) = alone.seen["l"]
    for request_id in labels:
        (got_labels,) = bench.seen[request_id]
        assert isinstance(got_labels, LabelResult)
        assert isinstance(result, LabelResult)
        assert got_labels.scores == result.scores
    _is_empty(bench)


def _is_empty(bench: Bench) -> None:
    stats = bench.core.stats()
    assert (stats.running, stats.waiting, stats.kv_reserved_tokens) == (0, 0, 0)
    assert (bench.model.kv == -1).all()


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_order_of_arrivals_cancellations_and_steps_ends_every_request_once(data: st.DataObject) -> None:
    bench = Bench(rows=3, capacity=120, prefill_s=data.draw(st.sampled_from([0.0, 0.06])))
    live: dict[str, EngineRequest] = {}
    submitted: dict[str, EngineRequest] = {}
    cancelled: set[str] = set()
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["submit", "cancel", "step", "step"]))
        if action == "submit":
            prompt = data.draw(st.lists(st.integers(2, 96), min_size=1, max_size=40))
            request = _request(str(len(submitted)), tuple(prompt), max_tokens=data.draw(st.integers(1, 8)))
            bench.core.submit(request)
            live[request.request_id] = submitted[request.request_id] = request
        elif action == "cancel" and live:
            chosen = data.draw(st.sampled_from(sorted(live)))
            if bench.core.cancel(chosen):
                cancelled.add(chosen)
            live.pop(chosen)
        else:
            bench.step()
    bench.run()
    for request_id, request in submitted.items():
        events = bench.seen.get(request_id, [])
        ends = [event for event in events if isinstance(event, Finished)]
        assert len(ends) == (0 if request_id in cancelled else 1)
        if ends:
            assert isinstance(events[0], Started)
            assert events[-1] is ends[0]
            assert bench.tokens(request_id) == _alone(request)[0]
    _is_empty(bench)


def test_a_request_starts_gives_its_tokens_and_finishes() -> None:
    bench = Bench()
    bench.core.submit(_request(max_tokens=5))
    bench.run()
    started, *middle, finished = bench.seen["r"]
    assert isinstance(started, Started)
    assert all(isinstance(event, Tokens) and len(event.stats) == 1 for event in middle)
    assert isinstance(finished, Finished)
    _is_empty(bench)


def test_a_step_gives_a_request_at_most_one_event_of_tokens() -> None:
    bench = Bench()
    for index in range(6):
        bench.core.submit(_request(str(index), (5, 6, index + 2)))
    while bench.core.has_work:
        ids = [request_id for request_id, event in bench.step() if isinstance(event, Tokens)]
        assert len(ids) == len(set(ids))


def test_a_long_prompt_delays_the_others_by_one_slice_at_a_time() -> None:
    bench = Bench(prefill_s=0.04)  # one piece fits the 50 ms of a slice, two do not
    bench.core.submit(_request("short", max_tokens=20))
    bench.step()
    bench.core.submit(_request("long", tuple(range(2, 82)), max_tokens=5))
    bench.model.steps.clear()
    for _ in range(8):
        bench.step()
    assert bench.model.steps[:8] == ["decode 1", "prefill 16"] * 4


def test_short_prompts_share_a_slice() -> None:
    bench = Bench(prefill_s=0.001)
    for index in range(3):
        bench.core.submit(_request(str(index)))
    events = bench.step()
    assert [request_id for request_id, event in events if isinstance(event, Started)] == ["0", "1", "2"]


def test_a_slice_is_bounded_even_if_no_time_passes() -> None:
    bench = Bench(rows=20, capacity=10_000)
    for index in range(20):
        bench.core.submit(_request(str(index), tuple(range(2, 66))))
    bench.step()
    assert bench.model.steps == ["prefill 16"] * 16


def test_where_a_prompt_is_cut_does_not_depend_on_the_load() -> None:
    idle, busy = Bench(), Bench(prefill_s=0.06)
    long = _request("long", tuple(range(2, 52)))
    idle.core.submit(long)
    idle.run()
    for index in range(3):
        busy.core.submit(_request(str(index), (9, 8, 7), max_tokens=40))
    busy.core.submit(long)
    busy.run()
    pieces = [step for step in idle.model.steps if step.startswith("prefill")]
    assert pieces == ["prefill 16"] * 3 + ["prefill 2"]
    assert [step for step in busy.model.steps if step in {"prefill 16", "prefill 2"}] == pieces


def test_admission_counts_tokens_not_only_rows() -> None:
    bench = Bench(capacity=40)
    for index in range(3):
        bench.core.submit(_request(str(index), (5, 6, 7, 8, 9, 10, 11, 12), max_tokens=10))
    bench.step()
    stats = bench.core.stats()
    assert (stats.running, stats.waiting, stats.kv_reserved_tokens) == (2, 1, 36)
    bench.run()
    assert {request_id for request_id, events in bench.seen.items() if isinstance(events[-1], Finished)} == {
        "0",
        "1",
        "2",
    }


def test_what_does_not_fit_is_refused_with_its_limit() -> None:
    bench = Bench(capacity=50)
    with pytest.raises(ContextTooLong, match="context of 96"):
        bench.core.submit(_request(prompt=(5,) * 90))
    with pytest.raises(ContextTooLong, match="KV memory of 50"):
        bench.core.submit(_request(prompt=(5,) * 60))
    with pytest.raises(ContextTooLong, match="KV memory of 50"):
        bench.core.submit_labels(_label_request("l", context=(5,) * 60))
    assert not bench.core.has_work


def test_a_full_queue_is_refused_with_a_hint_that_follows_the_service_time() -> None:
    bench = Bench(rows=1, max_waiting=2, prefill_s=8.0)
    for index in range(3):
        bench.core.submit(_request(str(index)))
    with pytest.raises(Overloaded) as early:
        bench.core.submit(_request("x"))
    assert early.value.metadata == {"max_waiting": "2"}
    bench.run()
    for index in range(3):
        bench.core.submit(_request(str(index)))
    with pytest.raises(Overloaded) as late:
        bench.core.submit(_request("x"))
    assert 0.1 <= early.value.retry_after_s < late.value.retry_after_s <= 30


def test_an_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    bench = Bench()
    bench.core.submit(_request())
    with pytest.raises(InvalidArgument) as caught:
        bench.core.submit(_request())
    assert caught.value.field == "request_id"
    bench.run()
    bench.core.submit(_request())


def test_a_deadline_ends_waiting_reading_and_decoding_requests() -> None:
    bench = Bench(rows=2)
    bench.core.submit(_request("decoding", deadline_s=5.0, max_tokens=80))
    bench.core.submit(_request("reading", tuple(range(2, 52)), deadline_s=5.0, max_tokens=40))
    bench.core.submit(_request("waiting", deadline_s=5.0))
    bench.core.submit(_request("patient", deadline_s=50.0))
    bench.step()
    bench.clock.now += 5.0
    expired = [request_id for request_id, event in bench.step() if isinstance(event, DeadlineExpired)]
    assert expired == ["decoding", "reading", "waiting"]
    bench.run()
    assert isinstance(bench.seen["patient"][-1], Finished)
    _is_empty(bench)


def test_a_cancelled_request_frees_its_memory_at_once_and_says_nothing_more() -> None:
    bench = Bench()
    for index in range(4):
        bench.core.submit(_request(str(index), (5, 6, index + 2), max_tokens=30))
    for _ in range(6):
        bench.step()
    before, reserved = len(bench.seen["1"]), bench.core.stats().kv_reserved_tokens
    assert bench.core.cancel("1")
    assert not bench.core.cancel("1")
    assert bench.core.stats().kv_reserved_tokens == reserved - 33
    bench.run()
    assert len(bench.seen["1"]) == before
    for request_id in ("0", "2", "3"):
        request = _request(request_id, (5, 6, int(request_id) + 2), max_tokens=30)
        assert bench.tokens(request_id) == _alone(request)[0]


def test_a_broken_answer_fails_alone() -> None:
    bench = Bench()
    for index in range(3):
        bench.core.submit(_request(str(index), (5, 6, index + 2), max_tokens=30))
    bench.step()
    bench.model.poison = 1
    bench.step()
    bench.model.poison = None
    bench.run()
    assert isinstance(bench.seen["1"][-1], InternalFault)
    for request_id in ("0", "2"):
        request = _request(request_id, (5, 6, int(request_id) + 2), max_tokens=30)
        assert bench.tokens(request_id) == _alone(request)[0]
    _is_empty(bench)


def test_times_are_told_apart() -> None:
    bench = Bench(rows=1, prefill_s=0.25)
    bench.core.submit(_request("first", max_tokens=3))
    bench.core.submit(_request("second", max_tokens=3))
    bench.run()
    first, second = (bench.seen[request_id][0] for request_id in ("first", "second"))
    assert isinstance(first, Started)
    assert isinstance(second, Started)
    assert (first.queue_s, first.prefill_s) == pytest.approx((0.0, 0.25))
    assert (second.queue_s, second.prefill_s) == pytest.approx((0.25, 0.25))


def test_the_likelihood_of_the_prompt_comes_when_asked_for() -> None:
    bench = Bench()
    bench.core.submit(_request("asked", prompt_stats=True))
    bench.core.submit(_request("not"))
    bench.run()
    asked, silent = bench.seen["asked"][0], bench.seen["not"][0]
    assert isinstance(asked, Started)
    assert isinstance(silent, Started)
    assert asked.prompt_logprob_mean is not None
    assert asked.prompt_logprob_mean < 0
    assert silent.prompt_logprob_mean is None


def test_a_large_label_set_delays_decoding_by_one_slice_at_a_time() -> None:
    bench = Bench(prefill_s=0.03)
    bench.core.submit(_request("text", max_tokens=40))
    bench.step()
    bench.core.submit_labels(
        LabelRequest(
            request_id="labels",
            context_tokens=(3, 4),
            prior_tokens=(4,),
            labels=tuple(str(n) for n in range(20)),
            label_tokens=tuple((n + 2, 5, 6) for n in range(20)),
        )
    )
    bench.model.steps.clear()
    for _ in range(20):
        bench.step()
    kinds = [step.split()[0] for step in bench.model.steps]
    assert kinds.count("decode") == 10
    longest = max(len(run) for run in "".join("p" if k == "prefill" else " " for k in kinds).split())
    assert longest <= 2


_REFUSALS: list[tuple[str, Callable[[], EngineRequest]]] = [
    ("no prompt", lambda: _request(prompt=())),
    ("unknown token", lambda: _request(prompt=(97,))),
    ("no answer", lambda: _request(max_tokens=0)),
]


@pytest.mark.parametrize(("name", "build"), _REFUSALS)
def test_a_refused_request_leaves_nothing_behind(name: str, build: Callable[[], EngineRequest]) -> None:
    bench = Bench()
    with pytest.raises(InvalidArgument):
        bench.core.submit(build())
    assert not bench.core.has_work, name
    assert bench.step() == []
