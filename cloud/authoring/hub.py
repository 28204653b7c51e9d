"""A model from its publisher's hub, where one answers within three seconds.

The library runs in a child process: it has no bound of its own on name lookups, and it keeps global state.
Run as a module, this file is that child: `python -m cloud.authoring.hub REPOSITORY DIRECTORY`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from cloud.authoring.children import run_child
from cloud.authoring.errors import ChildFailed, DownloadFailed

PROBE_S = 3.0
NO_ANSWER = 3
_IMPORT_S = 12.0
_DOWNLOAD_S = 1800.0
_WANTED = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json"]
_WANTED += ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]


def hub_is_wanted(env: Mapping[str, str]) -> bool:
    """False without the library, or where HF_HUB_OFFLINE=1 or FOREBAY_HUB=off switch hubs off."""
    if env.get("FOREBAY_HUB", "").lower() in ("off", "0", "no"):
        return False
    if env.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    return importlib.util.find_spec("huggingface_hub") is not None


def hub_answers(repository: str, *, log: Path, stop: threading.Event, env: Mapping[str, str]) -> bool:
    """Whether a hub knows `repository` and says so within `PROBE_S` seconds of being asked."""
    try:
        code = run_child(
            [sys.executable, "-m", __name__, repository],
            what=f"asking the hub for {repository}",
            log=log,
            timeout_s=_IMPORT_S + PROBE_S,
            stop=stop,
            env=env,
            accept=frozenset({0, NO_ANSWER}),
        )
    except ChildFailed:
        return False
    return code == 0


def hub_download(
    repository: str, directory: Path, *, log: Path, stop: threading.Event, env: Mapping[str, str]
) -> None:
    """Fetch weights and tokenizer into `directory`, which must exist. The hub library checks digests.

    Raises:
        DownloadFailed: The hub broke off; the caller may take the package index instead.
        BuildCancelled: `stop` was set.
    """
    try:
        run_child(
            [sys.executable, "-m", __name__, repository, str(directory)],
            what=f"downloading {repository} from the hub",
            log=log,
            timeout_s=_DOWNLOAD_S,
            stop=stop,
            env=env,
        )
    except ChildFailed as error:
        raise DownloadFailed(str(error)) from error
    shutil.rmtree(directory / ".cache", ignore_errors=True)


def _probe(repository: str) -> int:
    from huggingface_hub import HfApi

    def give_up() -> None:
        os._exit(NO_ANSWER)  # a name lookup that hangs cannot be interrupted in any other way

    timer = threading.Timer(PROBE_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        HfApi().model_info(repository, timeout=PROBE_S)
    except Exception as error:  # any failure means the same: take the other way
        sys.stderr.write(f"no answer from the hub: {type(error).__name__}: {error}\n")
        return NO_ANSWER
    finally:
        timer.cancel()
    return 0


def _main(arguments: list[str]) -> int:
    if len(arguments) == 1:
        return _probe(arguments[0])
    from huggingface_hub import snapshot_download

    snapshot_download(arguments[0], local_dir=arguments[1], allow_patterns=_WANTED)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
