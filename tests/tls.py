"""A certificate authority for the tests, and certificates of servers on loopback."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass
class Authority:
    """A certificate authority with its files in `folder`."""

    folder: Path
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def root(self) -> Path:
        """The root certificate, for clients."""
        path = self.folder / "ca.pem"
        if not path.exists():
            path.write_bytes(self._signed(x509.DNSName("ca.example"), self.key.public_key(), ca=True))
        return path

    def certificate(self, name: str) -> Path:
        """Return key and certificate of a server with this name."""
        return self._of_server(name, x509.DNSName(name))

    def of_loopback(self) -> Path:
        """Return key and certificate for the address 127.0.0.1, without a name."""
        return self._of_server("loopback", x509.IPAddress(ipaddress.ip_address("127.0.0.1")))

    def client(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.root)
        return context

    def server(self, name: str) -> ssl.SSLContext:
        return served(self.certificate(name))

    def _of_server(self, file: str, name: x509.GeneralName) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = self.folder / f"{file}.pem"
        path.write_bytes(pem + self._signed(name, key.public_key(), ca=False))
        return path

    def _signed(self, name: x509.GeneralName, public: ec.EllipticCurvePublicKey, *, ca: bool) -> bytes:
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test authority")])
        subject = issuer if ca else x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, str(name.value))])
        start = datetime(2020, 1, 1, tzinfo=UTC)
        made = (
            x509.CertificateBuilder(issuer, subject, public, x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(datetime(2120, 1, 1, tzinfo=UTC))
            .add_extension(x509.SubjectAlternativeName([name]), critical=False)
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
            .sign(self.key, hashes.SHA256())
        )
        return made.public_bytes(serialization.Encoding.PEM)


def served(certificate: Path) -> ssl.SSLContext:
    """Return the TLS context of a server with this key and certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context
