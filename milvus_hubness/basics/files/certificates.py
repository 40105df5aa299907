"""Certificates and keys for TLS, in files in PEM."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from typing import Any

from milvus_hubness.basics.files.opening import read_bytes
from milvus_hubness.errors import InvalidParameter, UnreadableFile, redacted, secrets_in

HTTPS = "https://"

_PEM = re.compile(rb"^-----BEGIN [A-Z0-9 ]+-----\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Certificates:
    """Files for TLS to a server.

    Raises InvalidParameter for a file that cannot be read or holds something else, for a key of
    another certificate, and for one of `cert` and `key` without the other.
    """

    ca: str | None = None
    """Authorities that sign the server's certificate; None for those of the system."""

    cert: str | None = None
    """Certificate of the client, for a server that wants one."""

    key: str | None = None
    """Key of `cert`, without a password."""

    def __post_init__(self) -> None:
        # Read here for its errors, and once more by each connection: files are replaced when
        # certificates expire.
        self.credentials()

    def __bool__(self) -> bool:
        return any((self.ca, self.cert, self.key))

    def credentials(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return authorities, key and certificate in PEM, in the order of
        `grpc.ssl_channel_credentials`. Raises InvalidParameter.
        """
        authorities = read_authorities(self.ca) if self.ca else None
        if self.cert is None and self.key is None:
            return authorities, None, None
        if self.cert is None or self.key is None:
            missing = "cert" if self.cert is None else "key"
            raise InvalidParameter(
                f"no {missing} for TLS: a certificate and its key belong together, name both"
            )

        return authorities, *read_pair(self.key, self.cert)

    def context(self) -> ssl.SSLContext:
        """Return a context for a client. Raises InvalidParameter."""
        self.credentials()
        context = ssl.create_default_context(cafile=self.ca)
        if self.cert is not None:
            context.load_cert_chain(self.cert, self.key)
        return context

    def expect_https(self, address: str) -> None:
        """Raise InvalidParameter if there are files and connections to the address use no TLS."""
        if self and not address.startswith(HTTPS):
            raise InvalidParameter(
                f"certificates ($MILVUS_HUBNESS_CA, _CERT, _KEY) are of addresses that begin with {HTTPS}, and "
                f"{redacted(address, secrets_in(address))} does not: correct it, or leave them out"
            )


NO_CERTIFICATES = Certificates()
"""For servers that an authority of the system has signed, and that want no certificate."""


def read_pem(path: str) -> bytes:
    """Return the content of a PEM file.

    Raises InvalidParameter if it cannot be read, or holds no PEM.
    """
    try:
        content = read_bytes(path)
    except UnreadableFile as error:
        raise InvalidParameter(str(error)) from None

    if not _PEM.search(content):
        raise InvalidParameter(f"{path}: holds nothing in PEM: name a file with -----BEGIN … lines")
    return content


def read_authorities(path: str) -> bytes:
    """Return the certificates of authorities, in PEM. Raises InvalidParameter."""
    authorities = read_pem(path)
    if not _has_certificates(authorities):
        raise InvalidParameter(
            f"{path} has no certificate in PEM: pass the file of the authority that signed the "
            "server's certificate"
        )
    return authorities


def read_pair(key: str, certificate: str) -> tuple[bytes, bytes]:
    """Return a key and its certificate, both in PEM.

    Raises InvalidParameter unless they belong together.
    """
    pair = read_pem(key), read_pem(certificate)
    if not _has_certificates(pair[1]):
        raise InvalidParameter(f"{certificate} has no certificate in PEM: pass that of {key}")

    context: Any = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would ask for its password on the terminal, and gRPC cannot read it.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ValueError, OSError):
        raise InvalidParameter(
            f"{key} is not the key of the certificate in {certificate}: pass its key, in PEM, "
            "without a password"
        ) from None

    return pair


def _has_certificates(pem: bytes) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(
            cadata=pem.decode("ascii", "ignore")
        )
    except ssl.SSLError:
        return False
    return True
