"""The one error of settings, in a module of its own so that all that reads settings can raise it."""

from __future__ import annotations


class SettingsError(Exception):
    """The operator's fault: a settings file, variable or combination that cannot be used.

    Not a `ForebayError`, since it happens before there is a caller. Commands print it and exit 2.

    Attributes:
        message: One sentence with everything that is known.
        source: The file or the environment variable.
        key: Dotted path of the key, such as `server.listen`.
        nearest: What the operator may have meant.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        key: str | None = None,
        nearest: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.source = source
        self.key = key
        self.nearest = nearest
