"""Requests to the admin API of a running script, by `urllib`."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, NamedTuple

__all__ = ["Address", "Client", "Lost", "Refused", "Tls", "address_of", "read_token"]

_LARGEST = 1 << 28  # bytes of an answer
_PORT = 1729


class Lost(Exception):
    """The server does not answer; the text says why, for a user."""


class Refused(Exception):
    """The server answers that it cannot; `code` is that of its error."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Address(NamedTuple):
    """Where the admin API is served. `token` may be empty; it is never shown."""

    url: str
    token: str

    def __repr__(self) -> str:
        return self.url


class Tls(NamedTuple):
    """Files of a private certificate authority, and of a certificate for this client."""

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


def address_of(text: str, token: str = "", port: int | None = None) -> Address:
    """Return the address that a user has written: ``host``, ``host:port``, or a URL.

    A token in the URL, as the first part of its path or as ``?token=``, is taken out of it. `port`
    is used where the text has none. Without a scheme the URL begins with ``//``.

    >>> address = address_of("http://127.0.0.1:1729/KEY")
    >>> address, address.token
    (http://127.0.0.1:1729, 'KEY')
    >>> address_of("node1")
    //node1:1729
    """
    given = urllib.parse.urlsplit(text if "://" in text else f"//{text}")
    try:
        there = given.port
    except ValueError:
        there = -1
    if given.scheme not in ("", "http", "https") or not given.hostname or there == -1:
        raise ValueError(
            f"{given.scheme or 'the'} address is not understood: expected HOST:PORT or an http "
            "URL, as `monarch tui --help` shows"
        )
    found = urllib.parse.parse_qs(given.query).get("token", [""])[0]
    found = found or given.path.strip("/").partition("/")[0]
    host = f"[{given.hostname}]" if ":" in given.hostname else given.hostname
    scheme = f"{given.scheme}:" if given.scheme else ""
    return Address(f"{scheme}//{host}:{there or port or _PORT}", token or found)


class Client:
    """A server of the admin API. Methods block, for at most `timeout` seconds, and raise `Lost`.

    Args:
        address: where it is; without a scheme, TLS is tried first.
        tls: files for TLS.
        timeout: seconds for an answer.
        plaintext: never use TLS.
    """

    def __init__(
        self,
        address: Address,
        tls: Tls | None = None,
        *,
        timeout: float = 10.0,
        plaintext: bool = False,
    ) -> None:
        self._token = address.token
        self._timeout = timeout
        self._plaintext = plaintext
        tls = Tls() if tls is None else tls
        self._context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate is not None:
            self._context.load_cert_chain(tls.certificate, tls.key)
        self.url = address.url
        """The address, without the token."""

    def get(self, path: str) -> Any:
        """Return what the server answers to this path, such as ``/v1/root``, parsed from JSON.

        Raises `Refused` for an error of the server's.
        """
        if self.url.startswith("//"):
            self.url = self._probe()
        return json.loads(self._open(self.url, path, self._token))

    def _probe(self) -> str:
        """Return the address with its scheme. The token is not sent meanwhile."""
        problem = Lost("")
        for scheme in ("http",) if self._plaintext else ("https", "http"):
            url = f"{scheme}:{self.url}"
            try:
                self._open(url, "/health", "")
            except Lost as error:
                problem = error
            else:
                return url
        raise problem

    def _open(self, url: str, path: str, token: str) -> bytes:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # The scheme is http or https: see `address_of`.
        request = urllib.request.Request(f"{url}{path}", headers=headers)  # noqa: S310
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}) if _is_near(url) else urllib.request.ProxyHandler(),
            urllib.request.HTTPSHandler(context=self._context),
            _NoRedirect(),
        )
        try:
            with opener.open(request, timeout=self._timeout) as answer:
                data: bytes = answer.read(_LARGEST)
                return data
        except urllib.error.HTTPError as error:
            with error:
                raise _refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = str(reason) or type(reason).__name__
            raise Lost(f"{url} does not answer: {why}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The token goes nowhere else."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _is_near(url: str) -> bool:
    return urllib.parse.urlsplit(url).hostname in ("127.0.0.1", "::1", "localhost")


def _refused(error: urllib.error.HTTPError) -> Exception:
    try:
        found = json.loads(error.read(1 << 16))["error"]
        code, text = str(found["code"]), str(found["message"])
    except (OSError, ValueError, KeyError, TypeError):
        code, text = f"http_{error.code}", f"the server answers {error.code} {error.reason}"
    if error.code == 401:
        text = "the server wants a token: the printed address has it, or use --token-file"
    if code in ("service_unavailable", "gateway_timeout"):
        return Lost(text)
    return Refused(code, text)


def read_token(path: str) -> str:
    """Return the token that a file contains."""
    with open(os.path.expanduser(path), encoding="utf-8") as file:
        return file.read().strip()
