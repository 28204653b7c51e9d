"""A worker process with the real loop and the real core over a model that misbehaves on request.

    python -m tests.fakes.moody_worker --fd N

How it loads is in the spec's `name`; how a request goes is in its prompt's first token.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge.engine.core import CoreLimits, EngineCore
from edge.engine.model import Float32, Int64
from edge.engine.spec import EngineSpec
from edge.engine.worker import LoadedEngine, engine_info, run
from protos.errors import ForebayError
from tests.fakes.history_model import HistoryModel

# A prompt that begins with a number under 50 takes that many milliseconds for each step.
HANG, RAISE, DIE = 90, 91, 92
EOS = 96
COMMAND = (sys.executable, "-m", "tests.fakes.moody_worker")


class CannotServeError(ForebayError):
    """What a model of a wrong kind raises."""

    reason = "UNSUPPORTED_MODEL"


class Letters:
    """Token ids as letters."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids)

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])


class MoodyModel(HistoryModel):
    """Never ends a text by itself."""

    def prefill(self, row: int, tokens: Int64, start: int, *, all_logits: bool = False) -> Float32:
        self._act(int(tokens[0]) if start == 0 else int(self.kv[row, 0]))
        return super().prefill(row, tokens, start, all_logits=all_logits)

    def decode(self, tokens: Int64, lengths: Int64) -> Float32:
        self._act(int(self.kv[: len(tokens), 0].max()))
        return super().decode(tokens, lengths)

    def _act(self, mood: int) -> None:
        if mood == HANG:
            time.sleep(3600)
        if mood == RAISE:
            raise RuntimeError("a step went wrong")
        if mood == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 < mood < 50:
            time.sleep(mood / 1000)

    def _logits(self, row: int, length: int) -> Float32:
        logits = super()._logits(row, length)
        logits[EOS] = -50.0
        return logits


def load(spec: EngineSpec) -> LoadedEngine:
    """Load, or not, as the name says."""
    word, _, rest = spec.name.partition(":")
    if word == "refuse":
        raise CannotServeError("the graph has an unknown input")
    if word == "refuse-unless" and not Path(rest).exists():
        raise CannotServeError("the file is gone")
    if word == "crash":
        sys.stderr.write("libmodel: cannot allocate\n")
        raise RuntimeError("native trouble")
    if word == "sleep":
        time.sleep(float(rest))
    model = MoodyModel(max_rows=spec.max_batch, context_tokens=spec.context_tokens)
    core = EngineCore(
        model,
        tokenizer=Letters(),
        eos_token_ids=frozenset(spec.eos_token_ids),
        limits=CoreLimits(kv_capacity_tokens=spec.kv_tokens, max_waiting=spec.max_waiting),
        clock=time.monotonic,
    )
    return LoadedEngine(core=core, info=engine_info(spec, model))


def moody_spec(
    name: str = "fine", *, max_batch: int = 8, max_waiting: int = 64, context_tokens: int = 512
) -> EngineSpec:
    """A spec that `load` understands."""
    return EngineSpec(
        name=name,
        variant="int4",
        engine="onnxruntime",
        model_dir="",
        tokenizer_json="",
        eos_token_ids=(EOS,),
        context_tokens=context_tokens,
        threads=1,
        max_batch=max_batch,
        max_waiting=max_waiting,
    )


def check_history(prompt: Sequence[int], generated: Sequence[int]) -> bool:
    """Whether greedy decoding of a request alone gives these tokens."""
    model = MoodyModel(max_rows=1, context_tokens=len(prompt) + len(generated))
    history = np.array([*prompt, *generated], np.int64)
    model.kv[0] = history
    expected = [int(model._logits(0, len(prompt) + i).argmax()) for i in range(len(generated))]
    return expected == list(generated)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    os._exit(run(parser.parse_args().fd, load=load))
