"""Who calls: API keys and client certificates.

Invariants
- Keys are kept as SHA-256 only, and compared in constant time with every entry, known or not.
- Once keys are configured, a call without a valid one is refused, unless `accept_certificates` lets a
  verified client certificate stand in.
- Messages and logs name entries, never keys.

A plain hash is right here, where a password would need a slow one: keys are 256 random bits, so nobody can
try them out, and a slow hash on every call would only help those who send wrong keys on purpose.
"""

from __future__ import annotations

import contextvars
import enum
import hashlib
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from protos import metadata
from protos.errors import PermissionDenied, Unauthenticated
from protos.settings import SettingsError, load_settings
from protos.tls import Signature, signature_of

_log = logging.getLogger(__name__)

KEY_PREFIX = "fb_"
MAX_KEYS = 1024
# A longer credential is nobody's key; it is not even hashed.
MAX_KEY_CHARACTERS = 256
# How stale the keys file may be, in seconds.
KEYS_CHECK_INTERVAL_S = 1.0


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One caller's key."""

    name: Annotated[
        str, Meta(min_length=1, max_length=64, description="The caller's name in logs and metrics.")
    ]
    sha256: Annotated[
        str, Meta(pattern="^[0-9a-f]{64}$", description="SHA-256 of the key, lower-case hexadecimal.")
    ]


class KeysFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """API keys of callers."""

    keys: Annotated[list[ApiKey], Meta(max_length=MAX_KEYS, description="Known keys.")] = []


class AuthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may call. Without keys, everybody who can connect may."""

    keys_file: Annotated[
        Path | None,
        Meta(description="TOML file of [[keys]] with name and sha256. Followed while the server runs."),
    ] = None
    keys: Annotated[
        list[ApiKey], Meta(max_length=MAX_KEYS, description="Known keys, beside those of keys_file.")
    ] = []
    accept_certificates: Annotated[
        bool, Meta(description="Let a verified client certificate stand in for a key.")
    ] = False
    allowed_certificates: Annotated[
        list[str],
        Meta(
            max_length=1024,
            description="SPIFFE ids or other subject alternative names of clients that may call. "
            "Empty: every certificate of the client CA.",
        ),
    ] = []


class CallerKind(enum.Enum):
    """How a caller proved who they are."""

    ANONYMOUS = "anonymous"
    API_KEY = "api_key"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerIdentity:
    """Who calls.

    Attributes:
        kind: What the name rests on.
        name: The key's name, the certificate's SPIFFE id or first other name, or `anonymous`.
        certificate_names: All names of the client certificate, SPIFFE id first; empty without one.
    """

    kind: CallerKind
    name: str
    certificate_names: tuple[str, ...] = ()


ANONYMOUS = CallerIdentity(kind=CallerKind.ANONYMOUS, name="anonymous")
# Set by the interceptor for the task of one call; servicers read it with `current_caller`.
CALLER: contextvars.ContextVar[CallerIdentity] = contextvars.ContextVar("forebay_caller", default=ANONYMOUS)


def current_caller() -> CallerIdentity:
    """The caller of the call that this task serves."""
    return CALLER.get()


def generate_key() -> str:
    """A new key: 256 random bits. It is shown once; keep `hash_key` of it."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """SHA-256 of the key, lower-case hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def presented_key(call_metadata: metadata.Metadata | None) -> str | None:
    """The key in `authorization: Bearer KEY`, else in `x-api-key`. None: there is none."""
    pairs = tuple(call_metadata or ())
    authorization = metadata.first(pairs, metadata.AUTHORIZATION)
    if authorization is not None:
        scheme, _, key = authorization.strip().partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return key.strip()
    return metadata.first(pairs, metadata.API_KEY)


def certificate_names(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Names of the verified client certificate, SPIFFE id first. Empty without TLS or certificate."""
    names: list[str] = []
    for field in ("peer_spiffe_id", "x509_subject_alternative_name", "x509_common_name"):
        names.extend(raw.decode("utf-8", "replace") for raw in auth_context.get(field, ()))
    return tuple(dict.fromkeys(names))


class Authenticator:
    """Holds the known keys and tells who a caller is. Keys of `keys_file` follow the file."""

    def __init__(self, settings: AuthSettings, *, clock: Callable[[], float]) -> None:
        """Read the keys.

        Args:
            settings: As configured.
            clock: Monotonic seconds.

        Raises:
            SettingsError: The keys file cannot be used, or a name or a key occurs twice.
        """
        self._settings = settings
        self._clock = clock
        self._signature = self._file_signature()
        self._keys = self._load()
        self._checked_at = clock()

    @property
    def requires_key(self) -> bool:
        """Whether keys are configured: a keys file counts even when it is empty."""
        return bool(self._settings.keys) or self._settings.keys_file is not None

    def identify(
        self, call_metadata: metadata.Metadata | None, auth_context: Mapping[str, Iterable[bytes]]
    ) -> CallerIdentity:
        """Who calls.

        Raises:
            Unauthenticated: A key is needed and there is none, or it is not known.
            PermissionDenied: The client's certificate is none of `allowed_certificates`.
        """
        names = certificate_names(auth_context)
        allowed = self._settings.allowed_certificates
        if allowed and not set(names) & set(allowed):
            raise PermissionDenied(
                "this client certificate may not call this server"
                if names
                else "this server is called with a client certificate only"
            )
        if not self.requires_key:
            return _by_certificate(names) if names else ANONYMOUS
        key = presented_key(call_metadata)
        if key is None:
            if names and self._settings.accept_certificates:
                return _by_certificate(names)
            raise Unauthenticated("no API key: send `authorization: Bearer KEY` or `x-api-key: KEY`")
        name = self._match(key)
        if name is None:
            raise Unauthenticated("this API key is not known")
        return CallerIdentity(kind=CallerKind.API_KEY, name=name, certificate_names=names)

    def _match(self, key: str) -> str | None:
        self._refresh()
        if len(key) > MAX_KEY_CHARACTERS:
            return None
        digest = hash_key(key)
        matched: str | None = None
        # All entries, always: how long it takes says nothing of which one matched.
        for entry in self._keys:
            if hmac.compare_digest(entry.sha256, digest):
                matched = entry.name
        return matched

    def _refresh(self) -> None:
        if self._settings.keys_file is None or self._clock() - self._checked_at < KEYS_CHECK_INTERVAL_S:
            return
        self._checked_at = self._clock()
        signature = self._file_signature()
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._keys = self._load()
        except SettingsError as error:
            _log.error("changed keys file is not used, the old keys stay: %s", error)

    def _file_signature(self) -> Signature:
        return signature_of((self._settings.keys_file,))

    def _load(self) -> tuple[ApiKey, ...]:
        keys = list(self._settings.keys)
        if self._settings.keys_file is not None:
            # Keys come from the file alone: no environment variable may add a caller.
            keys += load_settings(KeysFile, self._settings.keys_file, env={}, env_prefix="").keys
        for attribute in ("name", "sha256"):
            values = [getattr(key, attribute) for key in keys]
            if len(set(values)) != len(values):
                twice = next(value for value in values if values.count(value) > 1)
                raise SettingsError(f"two API keys have the {attribute} {twice}", key="auth.keys")
        return tuple(keys)


def _by_certificate(names: tuple[str, ...]) -> CallerIdentity:
    return CallerIdentity(kind=CallerKind.CERTIFICATE, name=names[0], certificate_names=names)


def append_key(path: Path, name: str, key: str) -> None:
    """Add an entry to a keys file, making it (mode 0600) when missing.

    Raises:
        SettingsError: The file is unusable, or the name is taken or not usable as one.
    """
    known = load_settings(KeysFile, path, env={}, env_prefix="").keys if path.exists() else []
    if any(entry.name == name for entry in known):
        raise SettingsError(f"{path} has a key named {name} already", source=str(path), key="keys")
    if not (1 <= len(name) <= 64 and name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
        raise SettingsError("a key's name is 1 to 64 letters, digits, hyphens and underscores", key="keys")
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a") as file:
        file.write(f'\n[[keys]]\nname = "{name}"\nsha256 = "{hash_key(key)}"\n')
