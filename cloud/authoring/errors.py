"""What can go wrong while a release is built. Each message is a sentence that says what to do.

    AuthoringError
    ├── CatalogError        no such model or pair, or the catalogue's data is wrong
    ├── DownloadFailed      the package index or the hub did not give a file in time
    ├── BadDownload         what came is not what the catalogue promises: member, size or digest
    ├── ChildFailed         conversion or quantization broke; the log has more
    ├── MissingTool         a package of the `build` extra, or pip, is not installed
    ├── DiskFull            no space left under the home directory
    ├── HomeBusy            another build holds the home directory
    ├── ReleaseInvalid      the parts do not make a release
    └── BuildCancelled      the caller asked to stop

These errors never cross the wire, so they are not in `protos.errors`.
"""

from __future__ import annotations


class AuthoringError(Exception):
    """Base of every error of this package."""


class CatalogError(AuthoringError):
    """No such model or pair, or the catalogue's own data is wrong."""


class DownloadFailed(AuthoringError):
    """A file could not be had in time. Trying again goes on where this run stopped."""


class BadDownload(AuthoringError):
    """A file came, but it is not the one that the catalogue describes. It was thrown away."""


class ChildFailed(AuthoringError):
    """A child process ended badly or took too long. The message names its log."""


class MissingTool(AuthoringError):
    """A package that building needs is not installed."""


class DiskFull(AuthoringError):
    """No space left. What was half written is gone."""


class HomeBusy(AuthoringError):
    """Another process builds under the same home directory."""


class ReleaseInvalid(AuthoringError):
    """The parts do not make a release: a file is missing, or no end-of-text token can be found."""


class BuildCancelled(AuthoringError):
    """The caller asked to stop. Finished steps are kept."""
