"""Servers and channels with matched settings: message sizes, keepalive, TLS.

Invariants
- A client's keepalive pings are never closer than what these servers permit: gRPC's default server allows
  one in five minutes and answers more with `too_many_pings`, which ends all calls of the connection.
- A port is listened on by one server: gRPC's default lets a second one share it in silence.
- Both sides accept the same message size, so what one may send the other may receive.

It does not retry and does not hedge: which calls may run twice is the caller's knowledge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

import grpc.aio

from protos import limits
from protos.settings_errors import SettingsError
from protos.tls import (
    ClientTlsSettings,
    TlsSettings,
    channel_credentials,
    check_plaintext,
    server_credentials,
    signature_of,
    uses_tls,
)

_log = logging.getLogger(__name__)

Options = list[tuple[str, int | str]]

# A dead peer is noticed after at most the sum of time and timeout.
CLIENT_PING_INTERVAL_S: Final = 20
PING_TIMEOUT_S: Final = 10
SERVER_PING_INTERVAL_S: Final = 60
# What servers permit: under the client's interval by a margin for timers that fire early.
LEAST_PERMITTED_PING_INTERVAL_S: Final = 10
MAX_STREAMS_PER_CONNECTION: Final = 1024
FIRST_RECONNECT_S: Final = 0.2
# gRPC takes its "least reconnect backoff" for the time that one attempt to connect may last. It must hold a
# TCP and TLS handshake over a bad mobile link; the pause between attempts is not governed by it.
CONNECT_TIMEOUT_S: Final = 5.0
# gRPC's default of two minutes would leave a healed cloud unused for that long.
LONGEST_RECONNECT_S: Final = 5.0
# How often a channel's certificate files are looked at.
FILES_CHECK_INTERVAL_S: Final = 10.0


def server_options(max_message_bytes: int = limits.MAX_MESSAGE_BYTES) -> Options:
    """Options of a `grpc.aio.server`."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", limits.MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", SERVER_PING_INTERVAL_S * 1000),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", LEAST_PERMITTED_PING_INTERVAL_S * 1000),
    ]


def channel_options(
    max_message_bytes: int = limits.MAX_MESSAGE_BYTES, *, server_name: str | None = None
) -> Options:
    """Options of a channel to such a server."""
    options: Options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", limits.MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", CLIENT_PING_INTERVAL_S * 1000),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_S * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", int(FIRST_RECONNECT_S * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(LONGEST_RECONNECT_S * 1000)),
        # Channels of one process would share a connection, and with it credentials that have changed.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


def listen(
    server: grpc.aio.Server,
    address: str,
    tls: TlsSettings,
    *,
    key: str = "tls",
    address_key: str = "server.listen",
) -> str:
    """Bind a server that has not been started.

    Args:
        server: Made with `server_options`.
        address: `host:port`, `[v6]:port` or `unix:path`; port 0 takes a free one.
        tls: Certificates, or plaintext.
        key, address_key: Where TLS and address stand in the role's settings, for errors.

    Returns:
        The address with the port that was taken.

    Raises:
        SettingsError: Plaintext beyond loopback, unusable certificates, or an address that cannot be bound.
    """
    credentials = server_credentials(tls, key=key)
    if credentials is None:
        check_plaintext(address, allow_plaintext=tls.allow_plaintext, key=key)
    _check_port(address, key=address_key)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise SettingsError(
            f"cannot listen on {address}: in use, or not an address here", key=address_key
        ) from error
    return address if address.startswith("unix") else f"{address.rpartition(':')[0]}:{port}"


def open_channel(
    address: str,
    tls: ClientTlsSettings,
    *,
    max_message_bytes: int = limits.MAX_MESSAGE_BYTES,
    key: str = "tls",
) -> grpc.aio.Channel:
    """A channel with matched options; plaintext only where `protos.tls` allows it. Does not connect yet.

    Raises:
        SettingsError: As `protos.tls`.
    """
    _check_port(address)
    options = channel_options(max_message_bytes, server_name=tls.server_name)
    if not uses_tls(address, tls, key=key):
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, channel_credentials(tls, key=key), options)


def _check_port(address: str, *, key: str | None = None) -> None:
    """gRPC takes any text and fails much later, or never."""
    if address.startswith("unix"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise SettingsError(f"{address!r} is no host:port with a port from 0 to 65535", key=key)


class ReloadingChannel:
    """A channel that follows its certificate files.

    `current()` is the channel to start a call on; don't keep it. After a change of the files it is a new one,
    and the calls on the old one have `drain_s` seconds to end. Unusable new files leave the old channel.
    """

    def __init__(
        self,
        address: str,
        tls: ClientTlsSettings,
        *,
        clock: Callable[[], float],
        max_message_bytes: int = limits.MAX_MESSAGE_BYTES,
        drain_s: float = limits.MAX_DEADLINE_S,
        key: str = "tls",
    ) -> None:
        """Open the first channel. `clock`: monotonic seconds. Raises SettingsError as `open_channel`."""
        self._address = address
        self._tls = tls
        self._clock = clock
        self._max_message_bytes = max_message_bytes
        self._drain_s = drain_s
        self._key = key
        self._signature = self._files()
        self._checked_at = clock()
        self._channel = self._open()
        self._draining: set[asyncio.Task[None]] = set()

    def current(self) -> grpc.aio.Channel:
        """The channel for a call that starts now. Called on the event loop."""
        if self._clock() - self._checked_at >= FILES_CHECK_INTERVAL_S:
            self._checked_at = self._clock()
            signature = self._files()
            if signature != self._signature:
                self._signature = signature
                self._replace()
        return self._channel

    async def close(self) -> None:
        """Close all channels at once; live calls are cancelled."""
        draining = list(self._draining)
        for task in draining:
            task.cancel()
        await asyncio.gather(*draining, return_exceptions=True)
        await self._channel.close()

    def _replace(self) -> None:
        try:
            fresh = self._open()
        except SettingsError as error:
            _log.error("changed certificate files are not used, the old ones stay: %s", error)
            return
        task = asyncio.get_running_loop().create_task(_drain(self._channel, self._drain_s))
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)
        self._channel = fresh

    def _open(self) -> grpc.aio.Channel:
        return open_channel(
            self._address, self._tls, max_message_bytes=self._max_message_bytes, key=self._key
        )

    def _files(self) -> tuple[tuple[int, int, int], ...]:
        return signature_of((self._tls.ca_file, self._tls.cert_file, self._tls.key_file))


async def _drain(channel: grpc.aio.Channel, grace_s: float) -> None:
    try:
        await channel.close(grace_s)
    finally:
        await channel.close()
