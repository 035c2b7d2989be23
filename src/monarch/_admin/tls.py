"""The certificate of the admin API: the one that the hosts of the job have, if there is one."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping

from monarch._spi import memory_file

__all__ = ["certificate"]


def certificate(environ: Mapping[str, str]) -> ssl.SSLContext | None:
    """Return the context of ``HYPERACTOR_TLS_CERT`` and ``_KEY``; None if they are not set.

    Each is a path, or PEM text. Clients show no certificate: they show the token. Raises OSError.
    """
    cert, key = (environ.get(f"HYPERACTOR_TLS_{name}", "") for name in ("CERT", "KEY"))
    if not cert or not key:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    opened: list[int] = []
    try:
        chain, private = (_path(text, opened) for text in (cert, key))
        context.load_cert_chain(chain, private, password=lambda: "")
    except (OSError, ValueError):  # whose text may be that of a key
        raise OSError("HYPERACTOR_TLS_CERT and HYPERACTOR_TLS_KEY are no certificate") from None
    finally:
        for fd in opened:
            os.close(fd)
    return context


def _path(text: str, opened: list[int]) -> str:
    if "-----BEGIN " not in text:
        return text
    fd = memory_file()
    opened.append(fd)
    os.write(fd, text.encode())
    os.lseek(fd, 0, os.SEEK_SET)
    return f"/dev/fd/{fd}"
