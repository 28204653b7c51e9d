"""A parent process that starts an engine, prints the worker's pid, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys

from edge.engine.process import EngineProcess
from edge.engine.protocol import EngineRequest
from protos.values import SamplingParams
from tests.fakes.moody_worker import COMMAND as WORKER
from tests.fakes.moody_worker import moody_spec

COMMAND = (sys.executable, "-m", "tests.fakes.engine_parent")


async def main() -> None:
    """The first argument is the first token of the request that is left running."""
    engine = await EngineProcess.start(moody_spec(), command=WORKER)
    request = EngineRequest(
        request_id="r", prompt_tokens=(int(sys.argv[1]), 5), sampling=SamplingParams(max_tokens=500, seed=0)
    )
    sys.stdout.write(f"{engine.pid}\n")
    sys.stdout.flush()
    async for _ in engine.generate(request):
        pass


if __name__ == "__main__":
    asyncio.run(main())
