"""Certificates for a job: one for each host, signed by a CA that exists during one call only.

The program that starts the hosts of a job makes the certificates and gives each host its own. The
CA's private key is dropped once all certificates are signed: no host can be added to the job
afterwards, and there is no key to guard. A certificate is valid for servers and for clients, since
hosts dial each other.

Needs the package `cryptography`: the extra ``pymonarch[tls]``.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Certificate", "make_certificates"]

_SKEW = dt.timedelta(minutes=10)  # by which the clocks of two hosts may differ


class Certificate(NamedTuple):
    """The paths of one host's certificate, private key and CA certificate."""

    cert: str
    key: str
    ca: str

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables to set for the host's worker, or for the client."""
        return {
            "HYPERACTOR_TLS_CERT": self.cert,
            "HYPERACTOR_TLS_KEY": self.key,
            "HYPERACTOR_TLS_CA": self.ca,
        }


def make_certificates(
    folder: str | os.PathLike[str],
    hosts: Sequence[str | Sequence[str]],
    *,
    valid: dt.timedelta = dt.timedelta(days=30),
) -> list[Certificate]:
    """Make a certificate for each host; write them and their CA's certificate to `folder`.

    Args:
        folder: created if it does not exist. Private keys in it are readable by this user only.
        hosts: for each host, the name or IP address by which others dial it, or several of them.
            The client needs a certificate as well; it is never dialed, so any name will do.
        valid: how long the certificates are valid from now. An established connection stays open
            after that.

    Return the paths in the order of `hosts`. Raises ImportError without the package `cryptography`,
    OSError if a file cannot be written, ValueError if the files of two hosts, or of a host and the
    CA, would have the same name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     client, worker = make_certificates(folder, ["client", ["worker1", "10.0.0.7"]])
    ...     [os.path.basename(path) for path in worker]
    ['worker1.crt', 'worker1.key', 'ca.crt']
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError as error:
        raise ImportError(
            "making certificates needs the package cryptography: pip install 'pymonarch[tls]'"
        ) from error

    # Peers compare the validity with real time, so a simulation's clock must not be used.
    now = dt.datetime.now(dt.timezone.utc)  # noqa: TID251
    encoding = serialization.Encoding.PEM

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])

    def alternative(text: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
        except ValueError:
            return x509.DNSName(text)

    def unsigned(subject: str, public: Any, *, is_ca: bool) -> x509.CertificateBuilder:
        usage = {
            name: name == "digital_signature"
            for name in (
                "digital_signature",
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            )
        }
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(authority))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + valid)
            .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
            .add_extension(
                x509.KeyUsage(**usage, key_cert_sign=is_ca, crl_sign=is_ca), critical=True
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()),
                critical=False,
            )
        )

    stems = [_stem(host if isinstance(host, str) else host[0]) for host in hosts]
    for index, stem in enumerate(stems):
        if stem in ("ca", *stems[:index]):
            taken = "the CA has" if stem == "ca" else "another host has"
            raise ValueError(
                f"a host cannot be called {stem}: {taken} the file {stem}.crt; list another of its "
                "names first"
            )
    where = Path(folder)
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = f"monarch job {x509.random_serial_number():x}"
    ca_key = ec.generate_private_key(ec.SECP256R1())
    ca = unsigned(authority, ca_key.public_key(), is_ca=True).sign(ca_key, hashes.SHA256())
    ca_file = where / "ca.crt"
    ca_file.write_bytes(ca.public_bytes(encoding))
    made: list[Certificate] = []
    for host, stem in zip(hosts, stems, strict=True):
        names = [host] if isinstance(host, str) else list(host)
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            unsigned(names[0], key.public_key(), is_ca=False)
            .add_extension(x509.SubjectAlternativeName(map(alternative, names)), critical=False)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .sign(ca_key, hashes.SHA256())
        )
        files = Certificate(str(where / f"{stem}.crt"), str(where / f"{stem}.key"), str(ca_file))
        Path(files.cert).write_bytes(certificate.public_bytes(encoding))
        _write_secret(
            files.key,
            key.private_bytes(
                encoding,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        made.append(files)
    return made


def _stem(name: str) -> str:
    """Return the name of a host's files, without their extensions."""
    return name.replace("/", "_").replace(":", "_")


def _write_secret(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(fd, "wb") as file:
        os.fchmod(fd, 0o600)  # the file may have existed, with another mode
        file.write(content)
