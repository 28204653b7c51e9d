"""TLS for every port, mutual TLS between the tiers, and the rule for plaintext.

Invariants
- Plaintext only on loopback (127.0.0.0/8, ::1, localhost, unix sockets), or where `allow_plaintext` says so.
- A server's certificates follow their files: the next handshake after a change uses the new ones, and open
  connections go on. New files that cannot be used are logged once and the old ones stay.
- With `client_ca_file` no client without a certificate of that CA gets past the handshake.

What does not hold: gRPC's Python client reads its own certificates once per channel, so a client follows a
change by opening a new channel (`protos.channel.ReloadingChannel`). Revocation lists are not consulted:
certificates are meant to be short-lived.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import grpc
import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from msgspec import Meta

from protos.settings_errors import SettingsError

_log = logging.getLogger(__name__)

Signature = tuple[tuple[int, int, int], ...]


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of a server. Without a certificate it speaks plaintext, which only loopback allows by itself."""

    cert_file: Annotated[
        Path | None, Meta(description="PEM certificate of this server, followed by its chain.")
    ] = None
    key_file: Annotated[Path | None, Meta(description="PEM private key of cert_file, unencrypted.")] = None
    client_ca_file: Annotated[
        Path | None,
        Meta(description="PEM certificates of the CAs whose clients may connect. When set, TLS is mutual."),
    ] = None
    allow_plaintext: Annotated[
        bool, Meta(description="Serve plaintext beyond loopback. For networks that encrypt by themselves.")
    ] = False


class ClientTlsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS towards a server. Loopback without a CA is plaintext; elsewhere TLS with the system's CAs."""

    ca_file: Annotated[
        Path | None, Meta(description="PEM certificates of the CAs that may vouch for the server.")
    ] = None
    cert_file: Annotated[Path | None, Meta(description="PEM certificate of this client, for mutual TLS.")] = (
        None
    )
    key_file: Annotated[Path | None, Meta(description="PEM private key of cert_file, unencrypted.")] = None
    server_name: Annotated[
        str | None,
        Meta(description="Name that the server's certificate must carry, when the address is not that name."),
    ] = None
    allow_plaintext: Annotated[
        bool, Meta(description="Speak plaintext beyond loopback. For networks that encrypt by themselves.")
    ] = False


def is_loopback(address: str) -> bool:
    """Whether an address in gRPC's notation never leaves the machine."""
    scheme, _, rest = address.partition(":")
    if scheme in ("unix", "unix-abstract"):
        return True
    if scheme in ("dns", "ipv4", "ipv6"):
        address = rest.rsplit("/", 1)[-1]
    host = host_of(address)
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_of(address: str) -> str:
    """The host of `host:port` or `[v6]:port`."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    host, colon, _ = address.rpartition(":")
    # A bare IPv6 address has several colons and no port.
    return host if colon and ":" not in host else address


def check_plaintext(address: str, *, allow_plaintext: bool, key: str) -> None:
    """Raises SettingsError for plaintext that would leave the machine without having been switched on."""
    if not allow_plaintext and not is_loopback(address):
        raise SettingsError(
            f"{address} is not loopback and has no TLS: set {key}.cert_file and {key}.key_file, "
            f"or {key}.allow_plaintext = true",
            key=f"{key}.allow_plaintext",
        )


def server_credentials(settings: TlsSettings, *, key: str = "tls") -> grpc.ServerCredentials | None:
    """Credentials that follow their files, or None for plaintext.

    Args:
        settings: Which files.
        key: The settings' place in the role's tree, for errors.

    Raises:
        SettingsError: A file is missing or unusable, key and certificate do not belong together, or half of a
            pair is set.
    """
    if settings.cert_file is None and settings.key_file is None and settings.client_ca_file is None:
        return None
    if settings.cert_file is None or settings.key_file is None:
        raise SettingsError(f"{key} needs both cert_file and key_file", key=key)
    files = ServerFiles(settings.cert_file, settings.key_file, settings.client_ca_file, key=key)
    return grpc.dynamic_ssl_server_credentials(
        files.initial,
        files.fetch,  # type: ignore[arg-type]  # None for "no change" is documented; the stubs lack it
        require_client_authentication=settings.client_ca_file is not None,
    )


def channel_credentials(settings: ClientTlsSettings, *, key: str = "tls") -> grpc.ChannelCredentials:
    """Credentials of a client, as the files are now.

    Raises:
        SettingsError: A file is missing or unusable, or half of a pair is set.
    """
    if (settings.cert_file is None) != (settings.key_file is None):
        raise SettingsError(f"{key} needs both cert_file and key_file, or neither", key=key)
    ca = _read(settings.ca_file, f"{key}.ca_file")
    certificate = _read(settings.cert_file, f"{key}.cert_file")
    private_key = _read(settings.key_file, f"{key}.key_file")
    if ca is not None:
        _check_certificates(ca, f"{key}.ca_file", settings.ca_file)
    if certificate is not None and private_key is not None:
        _check_pair(certificate, private_key, key, settings.cert_file)
    return grpc.ssl_channel_credentials(ca, private_key, certificate)


def uses_tls(address: str, settings: ClientTlsSettings, *, key: str = "tls") -> bool:
    """Whether a client speaks TLS to this address.

    Raises:
        SettingsError: A client certificate without TLS to show it in.
    """
    if settings.ca_file is not None:
        return True
    plaintext = settings.allow_plaintext or is_loopback(address)
    if plaintext and settings.cert_file is not None:
        raise SettingsError(f"{key}.cert_file is set, but without ca_file {address} is plaintext", key=key)
    return not plaintext


def signature_of(paths: Sequence[Path | None]) -> Signature:
    """What changes when a file is replaced: inode, size and time of change. Missing files count as zeros."""
    found: list[tuple[int, int, int]] = []
    for path in paths:
        try:
            stat = path.stat() if path is not None else None
        except OSError:
            stat = None
        found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns) if stat is not None else (0, 0, 0))
    return tuple(found)


class ServerFiles:
    """Certificate files of a server, read again when they change. `fetch` is called at each handshake."""

    def __init__(self, cert_file: Path, key_file: Path, client_ca_file: Path | None, *, key: str) -> None:
        """Read them. Raises SettingsError when they cannot be used."""
        self._cert_file = cert_file
        self._key_file = key_file
        self._client_ca_file = client_ca_file
        self._key = key
        self._seen = self._signature()
        self.initial = self._load()

    def fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration after a change; None keeps the current one. Never raises.

        Called on a thread of gRPC's. A replacement in several steps (certificate, then key) may be seen half
        done: that pair is refused, and read again once the files have changed further.
        """
        signature = self._signature()
        if signature == self._seen:
            return None
        self._seen = signature
        try:
            configuration = self._load()
        except SettingsError as error:
            _log.error("changed certificate files are not used, the old ones stay: %s", error)
            return None
        _log.info("certificate of %s loaded anew", self._cert_file)
        return configuration

    def _signature(self) -> Signature:
        return signature_of((self._cert_file, self._key_file, self._client_ca_file))

    def _load(self) -> grpc.ServerCertificateConfiguration:
        certificate = _read(self._cert_file, f"{self._key}.cert_file")
        private_key = _read(self._key_file, f"{self._key}.key_file")
        client_ca = _read(self._client_ca_file, f"{self._key}.client_ca_file")
        assert certificate is not None
        assert private_key is not None
        _check_pair(certificate, private_key, self._key, self._cert_file)
        if client_ca is not None:
            _check_certificates(client_ca, f"{self._key}.client_ca_file", self._client_ca_file)
        return grpc.ssl_server_certificate_configuration([(private_key, certificate)], client_ca)


def _read(path: Path | None, key: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{key}: cannot read {path}: {error.strerror}", key=key) from error


def _check_certificates(pem: bytes, key: str, path: Path | None) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise SettingsError(f"{key}: {path} holds no PEM certificate", key=key) from error


def _check_pair(certificate: bytes, private_key: bytes, key: str, path: Path | None) -> None:
    """gRPC accepts any bytes and fails at the first handshake: say it here instead."""
    leaf = _check_certificates(certificate, f"{key}.cert_file", path)[0]
    try:
        loaded = serialization.load_pem_private_key(private_key, password=None)
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"{key}.key_file: is no unencrypted PEM private key", key=f"{key}.key_file"
        ) from error
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    if loaded.public_key().public_bytes(*form) != leaf.public_key().public_bytes(*form):
        raise SettingsError(f"{key}.key_file: is not the key of {path}", key=f"{key}.key_file")
