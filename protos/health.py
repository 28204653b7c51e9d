"""grpc.health.v1 per service, and reflection.

Invariants
- A service is NOT_SERVING until somebody says otherwise, and for good after `shut_down`.
- The server as a whole (the empty name) serves when all of its services do.
- A watcher that reads slowly sees fewer changes, never a wrong last one, and holds nobody up.

grpcio-health-checking brings the messages; its own servicer lacks List, and a watcher that does not read
blocks whoever sets a status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.errors import Overloaded
from protos.status import abort_with

HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_WATCHERS = 1024

_SERVING: int = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

_Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped library
    """Health of a fixed set of services. Used from the event loop that serves."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._serving = dict.fromkeys(service_names, False)
        self._shut_down = False
        self._watchers: set[asyncio.Event] = set()

    def set_serving(self, service: str, serving: bool) -> None:
        """Say whether a service serves now. Ignored after `shut_down`.

        Raises:
            KeyError: The service is none of those that were named at the start.
        """
        if service not in self._serving:
            raise KeyError(service)
        if not self._shut_down:
            self._serving[service] = serving
            self._wake()

    def shut_down(self) -> None:
        """NOT_SERVING for every service and for good. First step of a graceful stop."""
        self._shut_down = True
        self._serving = dict.fromkeys(self._serving, False)
        self._wake()

    def is_serving(self, service: str = "") -> bool:
        """Whether a service serves, or (empty name) all of them."""
        return self._status(service) == _SERVING

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status is None:
            # The protocol asks for a plain NOT_FOUND.
            await context.abort(grpc.StatusCode.NOT_FOUND, "this server has no service of that name")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: _Context
    ) -> health_pb2.HealthListResponse:
        statuses = {
            name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in ("", *self._serving)
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if len(self._watchers) >= MAX_WATCHERS:
            await abort_with(context, Overloaded("too many health watchers", retry_after_s=10.0))
        changed = asyncio.Event()
        self._watchers.add(changed)
        last: int | None = None
        try:
            while True:
                changed.clear()
                known = self._status(request.service)
                status = _SERVICE_UNKNOWN if known is None else known
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _status(self, service: str) -> int | None:
        if service == "":
            return _SERVING if self._serving and all(self._serving.values()) else _NOT_SERVING
        serving = self._serving.get(service)
        if serving is None:
            return None
        return _SERVING if serving else _NOT_SERVING

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


def add_health(server: grpc.aio.Server, service_names: Iterable[str]) -> HealthServicer:
    """Serve health on this server; all services start as NOT_SERVING. The health service itself serves."""
    servicer = HealthServicer(service_names)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def enable_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Let clients such as grpcurl list and describe these services, health and reflection."""
    names = (*service_names, HEALTH_SERVICE, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
