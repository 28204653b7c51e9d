"""Certificates for development: one CA, a server certificate per tier, a client certificate for the edge.

Invariants
- Nothing is overwritten: a directory that holds any of the files is refused before a key is made.
- Private keys have mode 0600 from the moment they exist.
- Certificates are good for 90 days, and for nothing but their role (server or client authentication).

The CA's key is written too, so that more certificates can be made by hand; production wants a CA whose key
is elsewhere. This module does not renew.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protos.errors import RequestError

VALID_DAYS = 90
# Clocks of machines differ; a certificate that is not valid yet is a puzzling failure.
BACKDATE = datetime.timedelta(minutes=5)
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
TRUST_DOMAIN = "forebay.dev"


class CertificatesExistError(RequestError):
    """The directory holds certificates already; they are not overwritten."""

    reason = "CERTIFICATES_EXIST"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertPair:
    """A certificate and its private key, both PEM."""

    cert_file: Path
    key_file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class DevCerts:
    """What `make_dev_certs` wrote.

    Attributes:
        ca: The CA. `ca.cert_file` is what both sides trust.
        edge: Server certificate of an edge node.
        cloud: Server certificate of the cloud tier.
        edge_client: What an edge node shows to the cloud.
        expires: When all of them end.
    """

    ca: CertPair
    edge: CertPair
    cloud: CertPair
    edge_client: CertPair
    expires: datetime.datetime


@dataclass(frozen=True, slots=True)
class _Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_dev_certs(
    out_dir: Path, hosts: Sequence[str] = (), *, now: datetime.datetime | None = None
) -> DevCerts:
    """Make a set of certificates.

    Args:
        out_dir: Made (mode 0700) when missing.
        hosts: Names and addresses of the servers, beside the loopback ones.
        now: Aware time of issue; None is the current time.

    Raises:
        CertificatesExistError: One of the files is there already.
        OSError: The directory cannot be written.
    """
    issued = now or datetime.datetime.now(datetime.UTC)
    expires = issued + datetime.timedelta(days=VALID_DAYS)
    pairs = {name: _pair(out_dir, name) for name in ("ca", "edge", "cloud", "edge-client")}
    taken = [path for pair in pairs.values() for path in (pair.cert_file, pair.key_file) if path.exists()]
    if taken:
        raise CertificatesExistError(f"{taken[0]} exists; choose another directory or remove it")
    out_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _authority(issued, expires)
    _write(pairs["ca"], authority.certificate, authority.key)
    names = [_general_name(host) for host in dict.fromkeys((*LOOPBACK_HOSTS, *hosts))]
    for name, role, usage, alternative in (
        ("edge", "edge", ExtendedKeyUsageOID.SERVER_AUTH, names),
        ("cloud", "cloud", ExtendedKeyUsageOID.SERVER_AUTH, names),
        ("edge-client", "edge", ExtendedKeyUsageOID.CLIENT_AUTH, []),
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _leaf(authority, key, name, role, usage, alternative, (issued, expires))
        _write(pairs[name], certificate, key)
    return DevCerts(
        ca=pairs["ca"],
        edge=pairs["edge"],
        cloud=pairs["cloud"],
        edge_client=pairs["edge-client"],
        expires=expires,
    )


def spiffe_id(role: str) -> str:
    """The SPIFFE id of a role, `edge` or `cloud`."""
    return f"spiffe://{TRUST_DOMAIN}/{role}"


def _pair(out_dir: Path, name: str) -> CertPair:
    return CertPair(cert_file=out_dir / f"{name}.pem", key_file=out_dir / f"{name}-key.pem")


def _authority(issued: datetime.datetime, expires: datetime.datetime) -> _Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Forebay development CA")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, name, key, issued, expires)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Authority(certificate, key)


def _leaf(
    authority: _Authority,
    key: ec.EllipticCurvePrivateKey,
    name: str,
    role: str,
    usage: x509.ObjectIdentifier,
    alternative: Sequence[x509.GeneralName],
    validity: tuple[datetime.datetime, datetime.datetime],
) -> x509.Certificate:
    names = [*alternative, x509.UniformResourceIdentifier(spiffe_id(role))]
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    return (
        _builder(_name(f"forebay {name}"), authority.certificate.subject, key, *validity)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority.key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issued: datetime.datetime,
    expires: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(issued - BACKDATE)
        .not_valid_after(expires)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _write(pair: CertPair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _create(pair.key_file, pem, 0o600)
    _create(pair.cert_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def _create(path: Path, content: bytes, mode: int) -> None:
    """A new file only: O_EXCL also refuses a link that somebody put there."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
