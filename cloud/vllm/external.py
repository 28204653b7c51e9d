"""Watches an engine that somebody else runs. The same face as `VllmSupervisor`, without a child.

The engine is READY after a health check and the warm-up, and BACKOFF while checks fail `unhealthy_limit`
times in a row, until one succeeds again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from cloud.vllm.lifecycle import Phase
from cloud.vllm.supervisor import EngineStartFailed, PhaseListener
from protos.errors import ForebayError

_log = logging.getLogger(__name__)


class ExternalEngine:
    """Health of an engine at an address. The arguments are those of `VllmSupervisor`.

    `wait_ready` and each warm-up give up after `startup_timeout_s` seconds; the watch itself never does.
    """

    def __init__(
        self,
        address: str,
        *,
        healthy: Callable[[], Awaitable[bool]],
        warm_up: Callable[[], Awaitable[None]],
        health_interval_s: float,
        unhealthy_limit: int,
        startup_timeout_s: float,
        listener: PhaseListener,
    ) -> None:
        self._address = address
        self._healthy = healthy
        self._warm_up = warm_up
        self._health_interval_s = health_interval_s
        self._unhealthy_limit = unhealthy_limit
        self._startup_timeout_s = startup_timeout_s
        self._listener = listener
        self._phase = Phase.STOPPED
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        return self._phase

    def start(self) -> None:
        """Begin; returns at once."""
        if self._task is None:
            self._enter(Phase.STARTING)
            self._task = asyncio.create_task(self._run(), name="engine-watch")

    async def wait_ready(self) -> None:
        """Return once the engine is ready.

        Raises:
            EngineStartFailed: It was not within the time, or the watch was stopped.
        """
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                while self._phase is not Phase.READY:
                    if self._task is None or self._task.done():
                        raise EngineStartFailed("the engine is not being watched")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineStartFailed(
                f"the engine at {self._address} was not healthy within {self._startup_timeout_s:g} s"
            ) from None

    async def stop(self) -> None:
        """End the watch; the engine itself goes on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._enter(Phase.STOPPED)

    async def _run(self) -> None:
        failures = 0
        while True:
            failures = 0 if await self._usable() else failures + 1
            if failures == 0:
                self._enter(Phase.READY)
            elif failures >= self._unhealthy_limit and self._phase is Phase.READY:
                self._enter(Phase.BACKOFF)
            await asyncio.sleep(self._health_interval_s)

    async def _usable(self) -> bool:
        if not await self._healthy():
            return False
        if self._phase is Phase.READY:
            return True
        try:
            async with asyncio.timeout(self._startup_timeout_s):
                await self._warm_up()
        except ForebayError as error:
            _log.warning("the engine at %s is up but not usable: %s", self._address, error.message)
            return False
        except TimeoutError:
            _log.warning("the engine at %s is up but does not answer", self._address)
            return False
        return True

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            _log.info("engine at %s: %s -> %s", self._address, self._phase.value, phase.value)
            self._phase = phase
            self._listener(phase)
            self._changed.set()
