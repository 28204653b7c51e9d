"""InferenceService: messages to values and back. Everything else is the cascade's."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio

from edge.cascade import CascadeSettings, answer
from edge.classify import classify
from edge.convert import (
    answer_to_pb,
    delta_to_pb,
    hand_off_to_pb,
    label_answer_to_pb,
    label_query_from_pb,
    model_to_pb,
    query_from_pb,
)
from edge.request import Answer, Delta, HandOff
from edge.serving import ServedModel, ServedModels
from edge.uplink import Uplink
from protos.convert import check_model_name
from protos.errors import InternalFault
from protos.forebay.v1 import inference_pb2, inference_pb2_grpc
from protos.interceptors import remaining_s, request_id_of

SERVICE_NAME: str = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Errors leave as `ForebayError`; the interceptor gives them their status.

    Args:
        uplink: None where no cloud is configured.
        classify_threshold: Probability of the best label under which the cloud is asked.
        default_deadline_s: For calls that bring none.
        clock: Monotonic seconds.
        seed: Seeds for requests that bring none.
    """

    def __init__(
        self,
        models: ServedModels,
        *,
        uplink: Uplink | None,
        settings: CascadeSettings,
        classify_threshold: float,
        default_deadline_s: float,
        clock: Callable[[], float],
        seed: Callable[[], int],
    ) -> None:
        self._models = models
        self._uplink = uplink
        self._settings = settings
        self._classify_threshold = classify_threshold
        self._default_deadline_s = default_deadline_s
        self._clock = clock
        self._seed = seed

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> inference_pb2.GenerateResponse:
        async with aclosing(self._answer(request, context, show_early=False)) as events:
            async for event in events:
                if event.HasField("final"):
                    return event.final
        raise InternalFault("the request ended without an answer")

    async def StreamGenerate(  # noqa: N802
        self, request: inference_pb2.StreamGenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.StreamGenerateResponse]:
        async with aclosing(self._answer(request.request, context, show_early=True)) as events:
            async for event in events:
                yield event

    async def Classify(  # noqa: N802
        self, request: inference_pb2.ClassifyRequest, context: _Context
    ) -> inference_pb2.ClassifyResponse:
        request_id = request_id_of(request, context)
        query = label_query_from_pb(request, request_id=request_id, deadline=self._deadline(context))
        result = await classify(
            query,
            self._resolve(request.model),
            uplink=self._uplink,
            threshold=self._classify_threshold,
            deadline_margin_s=self._settings.deadline_margin_s,
            clock=self._clock,
        )
        return label_answer_to_pb(result, request_id=request_id)

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[model_to_pb(m) for m in self._models.all()])

    async def GetModel(  # noqa: N802
        self, request: inference_pb2.GetModelRequest, context: _Context
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(model=model_to_pb(self._resolve(request.name, field="name")))

    async def _answer(
        self, request: inference_pb2.GenerateRequest, context: _Context, *, show_early: bool
    ) -> AsyncGenerator[inference_pb2.StreamGenerateResponse, None]:
        request_id = request_id_of(request, context)
        model = self._resolve(request.model)
        query = query_from_pb(
            request, request_id=request_id, deadline=self._deadline(context), seed=self._seed
        )
        events = answer(
            query,
            model,
            uplink=self._uplink,
            settings=self._settings,
            show_early=show_early,
            clock=self._clock,
        )
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    yield delta_to_pb(event)
                elif isinstance(event, HandOff):
                    yield hand_off_to_pb(event)
                else:
                    assert isinstance(event, Answer)
                    final = answer_to_pb(event, request_id=request_id)
                    yield inference_pb2.StreamGenerateResponse(final=final)

    def _resolve(self, name: str, *, field: str = "model") -> ServedModel:
        return self._models.resolve(*check_model_name(name, field=field))

    def _deadline(self, context: _Context) -> float:
        return self._clock() + remaining_s(context, default_s=self._default_deadline_s)
