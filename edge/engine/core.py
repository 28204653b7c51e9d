"""Continuous batching: requests join and leave between steps. Synchronous, one thread, no I/O.

A step is either one decode step of all decoding rows, or one slice of prompt reading on the row behind them;
when there is both to do, they alternate. So a long prompt or a large label set delays the others' tokens by
one slice at a time, and whoever calls `step` can take in cancellations at least that often.

Invariants
- Every accepted request gets exactly one end: `Finished`, a `LabelResult`, or a `ForebayError`; after
  `cancel` it gets nothing more.
- KV memory is promised in tokens before a request starts and taken back when it ends.
- Everything a row needs is moved with it (`edge.engine.scheduler` says where to).

Text is `edge.engine.answer`'s, numbers are the model's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edge.engine.answer import Answer
from edge.engine.detokenizer import Detokenizes
from edge.engine.job import Job
from edge.engine.labels import LabelWork, PriorCache
from edge.engine.model import Float32, StepModel
from edge.engine.pacing import PrefillPacer
from edge.engine.prefill import PromptWork
from edge.engine.protocol import (
    EngineEvent,
    EngineRequest,
    EngineStats,
    Finished,
    LabelRequest,
    LabelResult,
    Started,
)
from edge.engine.requests import check_labels, check_text
from edge.engine.sampler import RowMeter
from edge.engine.scheduler import QueueFullError, Removal, Scheduler
from protos.errors import DeadlineExpired, ForebayError, InvalidArgument, Overloaded

CoreEvent = EngineEvent | LabelResult | ForebayError

_RETRY_LEAST_S, _RETRY_MOST_S = 0.1, 30.0
# Reading one token costs nearly as much as reading this many.
_RUN_TOKENS = 4
_SERVICE_GAIN = 0.1  # weight of the newest request in the mean service time


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Bounds of one engine.

    Attributes:
        kv_capacity_tokens: KV memory over all requests, in tokens. Times the model's `kv_token_bytes` it is
            the most memory that keys and values take.
        max_waiting: Requests accepted beyond the model's rows; more are refused as `Overloaded`.
        prefill_slice_s: Seconds that reading prompts may delay the others' next token. Half of the 100 ms in
            which a cancellation has to be through.
        prefill_slice_tokens: Most prompt tokens of a slice, however fast the machine.
        prefill_piece_tokens: Prompt tokens of one run. Part of what makes answers reproducible, so it is the
            same wherever a release is compared. Longer pieces read up to a tenth faster and delay more.
        label_prior_sets: Label sets whose priors are remembered.
    """

    kv_capacity_tokens: int
    max_waiting: int = 64
    prefill_slice_s: float = 0.05
    prefill_slice_tokens: int = 256
    prefill_piece_tokens: int = 16
    label_prior_sets: int = 64


class EngineCore:
    """All requests of one loaded model.

    Args:
        model: Weights and KV rows; the core is its only user.
        tokenizer: From token ids to text.
        eos_token_ids: Tokens that end a text.
        limits: Bounds.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        tokenizer: Detokenizes,
        eos_token_ids: frozenset[int],
        limits: CoreLimits,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._limits = limits
        self._clock = clock
        self._meter = RowMeter(model.vocab_size)
        self._priors = PriorCache(limits.label_prior_sets)
        self._pacer = PrefillPacer(
            slice_s=limits.prefill_slice_s,
            slice_tokens=limits.prefill_slice_tokens,
            piece_tokens=limits.prefill_piece_tokens,
        )
        self._scheduler: Scheduler[Job] = Scheduler(
            max_rows=model.max_rows,
            kv_capacity_tokens=limits.kv_capacity_tokens,
            max_waiting=limits.max_waiting,
        )
        self._prefill_next = True
        self._service_s = 1.0  # of a request, smoothed; the base of the retry hint
        self._events: list[tuple[str, CoreEvent]] = []

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return self._scheduler.has_work

    def stats(self) -> EngineStats:
        """The load now."""
        return EngineStats(
            running=self._scheduler.running_count,
            waiting=self._scheduler.waiting_count,
            kv_reserved_tokens=self._scheduler.reserved_tokens,
        )

    def submit(self, request: EngineRequest) -> None:
        """Accept a text to decode.

        Raises:
            ContextTooLong: Prompt and max_tokens exceed the context, or all KV memory there is.
            InvalidArgument: No prompt, a token that the model does not know, an id that is in use.
            Overloaded: The queue is full.
        """
        reserve = check_text(request, self._model, self._limits.kv_capacity_tokens)
        meter = self._meter if request.prompt_stats else None
        work = PromptWork(np.array(request.prompt_tokens, np.int64), meter=meter)
        answer = Answer(
            request,
            tokenizer=self._tokenizer,
            eos_token_ids=self._eos_token_ids,
            meter=self._meter,
            vocab_size=self._model.vocab_size,
        )
        self._enqueue(request, reserve, work, answer)

    def submit_labels(self, request: LabelRequest) -> None:
        """Accept labels to score. Raises as `submit` does."""
        reserve = check_labels(request, self._model, self._limits.kv_capacity_tokens)
        self._enqueue(request, reserve, LabelWork(request, meter=self._meter, priors=self._priors), None)

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free what it holds, at once. False when it is not (or no longer) here."""
        return self._remove(request_id) is not None

    def step(self) -> list[tuple[str, CoreEvent]]:
        """Do the next piece of work; returns what happened, by request, in order.

        Never raises for a single request's sake: its error is its last event.
        """
        self._events = []
        self._expire()
        if self._scheduler.prefilling is None:
            self._admit()
        reading, decoding = self._scheduler.prefilling is not None, bool(self._scheduler.decoding)
        if reading and (self._prefill_next or not decoding):
            self._prefill_slice()
            self._prefill_next = False
        elif decoding:
            self._decode()
            self._prefill_next = True
        return self._events

    def _enqueue(
        self,
        request: EngineRequest | LabelRequest,
        reserve_tokens: int,
        work: PromptWork | LabelWork,
        answer: Answer | None,
    ) -> None:
        if request.request_id in self._scheduler:
            raise InvalidArgument("a request with this id is being served", field="request_id")
        now = self._clock()
        job = Job(
            request_id=request.request_id,
            reserve_tokens=reserve_tokens,
            arrived_at=now,
            deadline_at=None if request.deadline_s is None else now + request.deadline_s,
            work=work,
            answer=answer,
        )
        try:
            self._scheduler.enqueue(job)
        except QueueFullError:
            waiting = self._scheduler.waiting_count
            raise Overloaded(
                f"{waiting} requests are waiting already",
                retry_after_s=self._retry_after_s(),
                metadata={"max_waiting": str(self._limits.max_waiting)},
            ) from None

    def _retry_after_s(self) -> float:
        turns = (self._scheduler.waiting_count + 1) / self._model.max_rows
        return min(max(turns * self._service_s, _RETRY_LEAST_S), _RETRY_MOST_S)

    def _expire(self) -> None:
        for job in self._scheduler.expired(self._clock()):
            self._remove(job.request_id)
            self._events.append((job.request_id, DeadlineExpired("the deadline passed in the engine")))

    def _admit(self) -> None:
        job = self._scheduler.admit()
        if job is not None:
            job.started_at = self._clock()

    def _prefill_slice(self) -> None:
        """Read prompts until the slice is used up; several short ones may fit."""
        began = now = self._clock()
        read_tokens = 0
        while (job := self._scheduler.prefilling) is not None and self._pacer.allows(
            read_tokens, now - began
        ):
            piece = job.work.next_piece(self._pacer.piece_tokens)
            logits = self._model.prefill(
                self._scheduler.prefill_row, piece.tokens, piece.start, all_logits=piece.all_logits
            )
            job.work.accept(logits)
            before, now = now, self._clock()
            self._pacer.observe(len(piece.tokens), now - before)
            read_tokens += max(len(piece.tokens), _RUN_TOKENS)
            if job.work.done:
                self._prompt_read(job, now)
                self._admit()

    def _prompt_read(self, job: Job, now: float) -> None:
        queue_s, prefill_s = job.started_at - job.arrived_at, now - job.started_at
        if isinstance(job.work, LabelWork):
            self._end(job, LabelResult(scores=job.work.result(), queue_s=queue_s, service_s=prefill_s))
            return
        mean = job.work.logprob_mean
        started = Started(queue_s=queue_s, prefill_s=prefill_s, prompt_logprob_mean=mean)
        self._events.append((job.request_id, started))
        self._scheduler.promote()
        if (end := self._push(job, job.work.last_logits)) is not None:
            self._end(job, end)

    def _decode(self) -> None:
        jobs = self._scheduler.decoding
        tokens = np.array([job.last_token for job in jobs], np.int64)
        lengths = np.array([job.kv_length for job in jobs], np.int64)
        logits = self._model.decode(tokens, lengths)
        # Rows move only when all jobs have taken their token: a job's length follows from its tokens.
        ends = [(job, self._push(job, row)) for job, row in zip(jobs, logits, strict=True)]
        for job, end in ends:
            if end is not None:
                self._end(job, end)

    def _push(self, job: Job, logits: Float32) -> Finished | ForebayError | None:
        """Give a job its next token; returns the event that ends it, when that was the last."""
        answer = job.answer
        assert answer is not None
        try:
            tokens = answer.push(logits)
        except ForebayError as error:
            return error
        now = self._clock()
        if job.first_token_at is None:
            job.first_token_at = now
        if tokens is not None:
            self._events.append((job.request_id, tokens))
        if answer.finished is None:
            return None
        return Finished(reason=answer.finished, decode_s=now - job.first_token_at)

    def _end(self, job: Job, event: CoreEvent) -> None:
        self._remove(job.request_id)
        self._events.append((job.request_id, event))
        self._service_s += _SERVICE_GAIN * (self._clock() - job.started_at - self._service_s)

    def _remove(self, request_id: str) -> Removal[Job] | None:
        removal = self._scheduler.remove(request_id)
        if removal is None:
            return None
        for move in removal.moves:
            self._model.move_row(move.source, move.target, move.job.kv_length)
        if removal.freed_row is not None:
            self._model.release_row(removal.freed_row)
        return removal
