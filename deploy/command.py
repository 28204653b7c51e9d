"""What every `forebay` command shares: errors that are sentences, and exit codes.

0 success, 1 the work failed, 2 usage or configuration, 130 interrupted. No command shows a traceback; a bug
in ours does, since it is for us. Imports nothing heavy: the help must come at once.
"""

from __future__ import annotations

import errno
from typing import Any

import typer
from typer.core import TyperGroup

from protos.errors import ForebayError

FAILED = 1
USAGE = 2
INTERRUPTED = 130

# Modules of extras, and the extra that brings each.
_EXTRAS = {
    "torch": "build",
    "transformers": "build",
    "onnx": "build",
    "onnxruntime_genai": "build",
    "gguf": "build",
    "bitsandbytes": "build",
    "httpx": "cloud-cpu",
    "vllm": "cloud-gpu",
}


class CommandError(Exception):
    """A command cannot go on. The message is the sentence that the user reads."""

    exit_code = FAILED


class UsageProblem(CommandError):
    """The command line or a configuration file is wrong."""

    exit_code = USAGE


class Group(TyperGroup):
    """A command group that turns known errors into a sentence on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            said = explain(error)
            if said is None:
                raise
            sentence, code = said
            typer.echo(f"forebay: {sentence}", err=True)
            raise typer.Exit(code) from None


def explain(error: Exception) -> tuple[str, int] | None:
    """Sentence and exit code of an error that a user can act on; None for anything else."""
    from cloud.authoring.errors import AuthoringError, BuildCancelled, CatalogError
    from protos.settings import SettingsError

    match error:
        case CommandError():
            return str(error), error.exit_code
        case SettingsError() | CatalogError():
            return str(error), USAGE
        case BuildCancelled():
            return str(error), INTERRUPTED
        case AuthoringError():
            return str(error), FAILED
        case ForebayError():
            return f"{error.message} ({error.reason})", FAILED
        case ModuleNotFoundError() if (error.name or "").partition(".")[0] in _EXTRAS:
            name = (error.name or "").partition(".")[0]
            return f"this needs {name}: install Forebay with the `{_EXTRAS[name]}` extra", FAILED
        case OSError() if error.errno in (errno.ENOENT, errno.EACCES, errno.EADDRINUSE, errno.ENOSPC):
            where = f": {error.filename}" if error.filename else ""
            return f"{error.strerror}{where}", FAILED
        case _:
            return None
