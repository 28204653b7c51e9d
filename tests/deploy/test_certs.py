"""Development certificates: roles, names, modes, and nothing overwritten."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from deploy.certs import CertificatesExistError, make_dev_certs, spiffe_id

NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


def test_servers_carry_loopback_the_given_hosts_and_their_spiffe_id(tmp_path: Path) -> None:
    certs = make_dev_certs(tmp_path / "pki", ["edge-7.example", "10.0.0.7", "localhost"], now=NOW)
    for pair, role in ((certs.edge, "edge"), (certs.cloud, "cloud")):
        alternative = names(load(pair.cert_file))
        assert alternative.get_values_for_type(x509.DNSName) == ["localhost", "edge-7.example"]
        assert alternative.get_values_for_type(x509.IPAddress) == [
            ipaddress.ip_address(address) for address in ("127.0.0.1", "::1", "10.0.0.7")
        ]
        assert alternative.get_values_for_type(x509.UniformResourceIdentifier) == [spiffe_id(role)]


def test_each_certificate_is_good_for_its_role_only_and_for_90_days(tmp_path: Path) -> None:
    certs = make_dev_certs(tmp_path, now=NOW)
    ca = load(certs.ca.cert_file)
    for pair, usage in (
        (certs.edge, ExtendedKeyUsageOID.SERVER_AUTH),
        (certs.cloud, ExtendedKeyUsageOID.SERVER_AUTH),
        (certs.edge_client, ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        certificate = load(pair.cert_file)
        certificate.verify_directly_issued_by(ca)
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert list(usages) == [usage]
        assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
        assert certificate.not_valid_after_utc == NOW + datetime.timedelta(days=90) == certs.expires
        assert certificate.not_valid_before_utc < NOW


def test_private_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    out_dir = tmp_path / "pki"
    make_dev_certs(out_dir)
    keys = sorted(out_dir.glob("*-key.pem"))
    assert [key.name for key in keys] == [
        "ca-key.pem",
        "cloud-key.pem",
        "edge-client-key.pem",
        "edge-key.pem",
    ]
    assert {key.stat().st_mode & 0o777 for key in keys} == {0o600}
    assert out_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["ca.pem", "cloud-key.pem", "edge-client.pem"])
def test_a_directory_with_any_of_the_files_is_refused_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(CertificatesExistError, match=name):
        make_dev_certs(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"
