"""Waiting for what another process or task does, without guessing how long it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return as soon as the condition holds. Raises TimeoutError after `timeout_s` seconds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is another process's
            await asyncio.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
