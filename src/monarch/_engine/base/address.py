"""Addresses of listeners: transports, addresses, and what a server binds.

An address has two spellings. Users write URLs (``tcp://host:80``, ``ipc://@name``, ``inproc://3``);
the *internal* spelling (``tcp:host:80``, ``unix:@name``, ``local:3``) is printed and logged. Every
parser here reads both; ``str`` returns the internal spelling, ``ChannelAddr.url`` the URL.

============================== ============================= ===================================
URL                            internal                      meaning
============================== ============================= ===================================
``tcp://h:1``, ``tcp://[::]:1`` ``tcp:h:1``, ``tcp:[::]:1``   port 0: any free port
``tcp://*:1``                  ``tcp:[::]:1``                every interface of the host
``ipc:///p``, ``ipc://@n``     ``unix:/p``, ``unix:@n``      ``@``: abstract name (Linux)
``inproc://3``                 ``local:3``                   inside this process
``tls://h:1``                  ``tls:h:1``                   also metatls, quic, metaquic
``tcp://a:1@tcp://b:1``        ``alias:dial_to=..;bind_to=..`` peers dial a, the server binds b
``tcp://h:fd5``                ``tcp:h:fd5``                 adopt the bound socket 5
============================== ============================= ===================================

Parsing does no I/O, so it cannot resolve names: a parser takes ``resolve``, a function from host
name to IP address text that raises ``OSError`` for an unknown name. It is used for TCP only (TLS
and QUIC check certificates against the name). Without it, a name stays a name and is resolved when
it is dialed, which is also the better moment where names move. ``localhost`` needs no resolution.

``ChannelTransport`` is an ordinary enum. Unlike that of the reference it can be hashed and
iterated; the rest is the same.
"""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "AddressError",
    "BindSpec",
    "ChannelAddr",
    "ChannelTransport",
    "Resolver",
    "parse_transport",
]

Resolver: TypeAlias = Callable[[str], str]
"""Returns one IP address of a host name, as text; raises ``OSError`` if it has none."""

_SUN_LEN = 108  # sizeof(sockaddr_un.sun_path) on Linux; a path also needs its final NUL.

_INTERNAL_SCHEME = {"ipc": "unix", "inproc": "local"}
_URL_SCHEME = {"unix": "ipc", "local": "inproc"}
_NETWORK_SCHEMES = ("tcp", "tls", "metatls", "quic", "metaquic")

# Compiled at first use: most programs parse no address.
_SPELLING = r"(?s)([A-Za-z]+)(://|[:!])(.*)"
_HOST_NAME = r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_-]+)*\.?"


class AddressError(ValueError, RuntimeError):
    """Text that is not an address.

    It is a ``ValueError`` by nature, and also a ``RuntimeError`` because programs written for the
    reference expect that type from ``ChannelAddr.parse``.
    """


class ChannelTransport(enum.Enum):
    """A way to carry messages between processes. ``int(t)`` is a stable number."""

    TcpWithLocalhost = 0
    TcpWithHostname = 1
    MetaTlsWithHostname = 2
    MetaTlsWithIpV6 = 3
    Tls = 4
    Quic = 5
    MetaQuicWithHostname = 6
    MetaQuicWithIpV6 = 7
    Local = 8
    Unix = 9

    def get(self) -> ChannelTransport:
        """Return this transport itself."""
        return self

    def __int__(self) -> int:
        number: int = self.value
        return number

    def __repr__(self) -> str:
        return f"ChannelTransport.{self.name}"


# The text of a transport without an address: in configuration, and in the repr of a BindSpec.
_TRANSPORT_TEXT = {
    ChannelTransport.TcpWithLocalhost: ("tcp(Localhost)", "Tcp(Localhost)"),
    ChannelTransport.TcpWithHostname: ("tcp(Hostname)", "Tcp(Hostname)"),
    ChannelTransport.MetaTlsWithHostname: ("metatls(Hostname)", "MetaTls(Hostname)"),
    ChannelTransport.MetaTlsWithIpV6: ("metatls(IpV6)", "MetaTls(IpV6)"),
    ChannelTransport.Tls: ("tls", "Tls"),
    ChannelTransport.Quic: ("quic", "Quic"),
    ChannelTransport.MetaQuicWithHostname: ("metaquic(Hostname)", "MetaQuic(Hostname)"),
    ChannelTransport.MetaQuicWithIpV6: ("metaquic(IpV6)", "MetaQuic(IpV6)"),
    ChannelTransport.Local: ("local", "Local"),
    ChannelTransport.Unix: ("unix", "Unix"),
}
_TRANSPORT_BY_TEXT = {text: transport for transport, (text, _) in _TRANSPORT_TEXT.items()}
_TRANSPORT_BY_TEXT["tcp"] = ChannelTransport.TcpWithHostname

_TRANSPORT_OF_SCHEME = {
    "tls": ChannelTransport.Tls,
    "metatls": ChannelTransport.MetaTlsWithHostname,
    "quic": ChannelTransport.Quic,
    "metaquic": ChannelTransport.MetaQuicWithHostname,
    "local": ChannelTransport.Local,
    "unix": ChannelTransport.Unix,
}

# Short names that `enable_transport` accepts in addition to those of a BindSpec.
_SHORTCUTS = {
    "ipc": ChannelTransport.Unix,
    "metatls": ChannelTransport.MetaTlsWithIpV6,
    "metatls-hostname": ChannelTransport.MetaTlsWithHostname,
}


class ChannelAddr(NamedTuple):
    """One parsed and checked address; made by ``ChannelAddr.parse``.

    Attributes:
        scheme: ``tcp``, ``tls``, ``metatls``, ``quic``, ``metaquic``, ``unix`` or ``local``.
        host: host name or IP address without brackets; empty for ``unix`` and ``local``.
        port: port number; 0 for any free port, and for schemes without ports.
        fd: descriptor of an already bound socket to adopt, or None.
        name: path or ``@abstract`` name of ``unix`` (empty: any); number of ``local``.
        bind: for an alias, the address that the server binds, while peers dial the rest; else None.

    >>> address = ChannelAddr.parse("ipc://@jobs")
    >>> str(address), address.url, address.get_transport()
    ('unix:@jobs', 'ipc://@jobs', ChannelTransport.Unix)
    """

    scheme: str
    host: str = ""
    port: int = 0
    fd: int | None = None
    name: str = ""
    bind: ChannelAddr | None = None

    @staticmethod
    def parse(addr: str, *, resolve: Resolver | None = None) -> ChannelAddr:
        """Return the address that ``addr`` spells, in either spelling.

        Raises ``AddressError`` (a ``ValueError`` and a ``RuntimeError``) that names the flaw.
        """
        if not isinstance(addr, str):
            raise TypeError(f"an address is a str, not {type(addr).__name__!r}")
        return _parse(addr, resolve)

    @staticmethod
    def any(
        transport: ChannelTransport,
        *,
        entropy: Callable[[int], bytes] = os.urandom,  # noqa: TID251 - the driver's is handed in
    ) -> str:
        """Return the text of an address to bind for ``transport``: any free port, or a fresh name.

        ``entropy(n)`` returns the n random bytes of an abstract socket name.
        """
        if not isinstance(transport, ChannelTransport):
            raise TypeError(f"expected a ChannelTransport, not {type(transport).__name__!r}")
        if transport is ChannelTransport.Unix:
            return f"unix:@{entropy(12).hex()}"
        if transport is ChannelTransport.Local:
            return "local:0"
        if transport is ChannelTransport.TcpWithLocalhost:
            return "tcp:[::1]:0"
        scheme = _TRANSPORT_TEXT[transport][0].partition("(")[0]
        return f"{scheme}:{os.uname().nodename}:0"

    def get_port(self) -> int:
        """Return the port that peers dial; 0 if there is none."""
        return self.port

    def get_transport(self) -> ChannelTransport:
        """Return the transport to which this address belongs."""
        if self.scheme == "tcp":
            loopback = self.host == "::1" or self.host.startswith("127.")
            if loopback:
                return ChannelTransport.TcpWithLocalhost
            return ChannelTransport.TcpWithHostname
        return _TRANSPORT_OF_SCHEME[self.scheme]

    @property
    def url(self) -> str:
        """The URL spelling."""
        dial = f"{_URL_SCHEME.get(self.scheme, self.scheme)}://{self._endpoint()}"
        return dial if self.bind is None else f"{dial}@{self.bind.url}"

    def _endpoint(self) -> str:
        if not self.host:
            return self.name
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.fd is None else f"{host}:fd{self.fd}"

    def _native_repr(self) -> str:
        """Return the form in a BindSpec's repr, which tests written for the reference print."""
        if self.bind is not None:
            dial = f"Tcp({self._endpoint()})"
            return f"Alias {{ dial_to: {dial}, bind_to: {self.bind._native_repr()} }}"
        if self.scheme == "tcp":
            return f"Tcp({self._endpoint()})"
        if self.scheme == "local":
            return f"Local({self.name})"
        if self.scheme == "unix":
            kind = "abstract" if self.name.startswith("@") else "pathname"
            return f'Unix(Bound("{self.name.removeprefix("@")}" ({kind})))'
        kind = _TRANSPORT_TEXT[self.get_transport()][1].partition("(")[0]
        return f'{kind}(TlsAddr {{ hostname: "{self.host}", port: {self.port} }})'

    def __str__(self) -> str:
        dial = f"{self.scheme}:{self._endpoint()}"
        return dial if self.bind is None else f"alias:dial_to={dial};bind_to={self.bind}"

    def __repr__(self) -> str:
        return f"ChannelAddr({str(self)!r})"


class BindSpec:
    """The address that a server binds: a transport (at any address) or one address.

    Immutable, hashable, picklable. Raises ``TypeError`` for other types and ``ValueError`` for text
    that spells neither.

    >>> BindSpec("tcp://127.0.0.1:0")
    PyBindSpec(Addr(Tcp(127.0.0.1:0)))
    >>> BindSpec("unix") == BindSpec(ChannelTransport.Unix), str(BindSpec("tcp"))
    (True, 'tcp(Hostname)')
    """

    __slots__ = ("_address", "_transport")

    def __init__(
        self, spec: ChannelTransport | BindSpec | str, *, resolve: Resolver | None = None
    ) -> None:
        address: ChannelAddr | None = None
        if isinstance(spec, ChannelTransport):
            transport = spec
        elif isinstance(spec, BindSpec):
            transport, address = spec.transport, spec.address
        elif not isinstance(spec, str):
            raise TypeError("expected ChannelTransport enum, BindSpec, or str")
        elif spec in _TRANSPORT_BY_TEXT:
            transport = _TRANSPORT_BY_TEXT[spec]
        else:
            try:
                address = _parse(spec, resolve)
            except AddressError as error:
                raise ValueError(
                    f"invalid str for BindSpec '{spec}': invalid bind spec: {spec} ({error})"
                ) from None
            transport = address.get_transport()
        self._transport = transport
        self._address = address

    @property
    def transport(self) -> ChannelTransport:
        """The transport to bind."""
        return self._transport

    @property
    def address(self) -> ChannelAddr | None:
        """The address to bind; None for any address of the transport."""
        return self._address

    def __str__(self) -> str:
        return _TRANSPORT_TEXT[self.transport][0] if self.address is None else str(self.address)

    def __repr__(self) -> str:
        if self.address is None:
            return f"PyBindSpec(Any({_TRANSPORT_TEXT[self.transport][1]}))"
        return f"PyBindSpec(Addr({self.address._native_repr()}))"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BindSpec):
            return NotImplemented
        return (self.transport, self.address) == (other.transport, other.address)

    def __hash__(self) -> int:
        return hash((self.transport, self.address))

    def __reduce__(self) -> tuple[Any, ...]:
        return BindSpec, (str(self),)


def parse_transport(
    transport: ChannelTransport | BindSpec | str, *, resolve: Resolver | None = None
) -> BindSpec:
    """Return the ``BindSpec`` that a user means in ``enable_transport``, short names included.

    Raises the same errors as ``BindSpec``.

    >>> parse_transport("ipc")
    PyBindSpec(Any(Unix))
    """
    if isinstance(transport, str):
        transport = _SHORTCUTS.get(transport, transport)
    return BindSpec(transport, resolve=resolve)


def _parse(text: str, resolve: Resolver | None) -> ChannelAddr:
    found = re.fullmatch(_SPELLING, text)
    if found is None:
        raise AddressError(f"{text!r} names no transport, expected such as tcp://host:4444")
    scheme, mark, rest = found.groups()
    if mark == "://":
        if scheme == "tcp" and "@" in rest:
            dial, _, bind = rest.partition("@")
            return _alias(text, f"tcp://{dial}", bind, resolve)
        scheme = _INTERNAL_SCHEME.get(scheme, scheme)
    elif scheme == "alias":
        return _parse_alias(text, rest, resolve)
    if scheme in _NETWORK_SCHEMES:
        return _parse_network(text, scheme, rest, resolve)
    if scheme == "unix":
        if len(os.fsencode(rest)) >= _SUN_LEN or "\0" in rest:
            raise AddressError(f"{text!r}: a socket name has at most {_SUN_LEN - 1} bytes, no NUL")
        return ChannelAddr("unix", name=rest)
    if scheme == "local":
        return ChannelAddr("local", name=str(_number(text, rest, 2**64 - 1)))
    raise AddressError(f"{text!r}: no such channel type: {scheme}")


def _parse_alias(text: str, rest: str, resolve: Resolver | None) -> ChannelAddr:
    found = re.fullmatch("dial_to=([^;]*);bind_to=(.*)", rest)
    if found is None:
        raise AddressError(f"{text!r}: an alias reads alias:dial_to=<address>;bind_to=<address>")
    return _alias(text, found.group(1), found.group(2), resolve)


def _alias(text: str, dial: str, bind: str, resolve: Resolver | None) -> ChannelAddr:
    dial_to, bind_to = _parse(dial, resolve), _parse(bind, resolve)
    for end in (dial_to, bind_to):
        if end.scheme != "tcp" or end.bind is not None:
            raise AddressError(f"{text!r}: both ends of an alias must be plain tcp addresses")
    if dial_to.fd is not None:
        raise AddressError(f"{text!r}: a descriptor can be bound but not dialed")
    return ChannelAddr("tcp", host=dial_to.host, port=dial_to.port, bind=bind_to)


def _parse_network(text: str, scheme: str, rest: str, resolve: Resolver | None) -> ChannelAddr:
    host, colon, port = rest.rpartition(":")
    if not colon:
        raise AddressError(f"{text!r} has no port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if host == "*":
        host = "::"
    elif scheme == "tcp":
        host = _host(text, "127.0.0.1" if host == "localhost" else host, resolve)
    else:
        host = _host(text, host, None)
    if scheme == "tcp" and port.startswith("fd"):
        return ChannelAddr(scheme, host=host, fd=_number(text, port[2:], 2**31 - 1))
    return ChannelAddr(scheme, host=host, port=_number(text, port, 65535))


def _host(text: str, host: str, resolve: Resolver | None) -> str:
    import ipaddress  # imported late: few programs spell an IP address

    def plain(text: str) -> str:
        address = ipaddress.ip_address(text)
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return str(mapped or address)  # a single spelling for each address

    try:
        return plain(host)
    except ValueError:
        looks_numeric = host.rstrip(".").rpartition(".")[2].isdigit()
        if looks_numeric or not re.fullmatch(_HOST_NAME, host):
            raise AddressError(f"{text!r}: {host!r} is no IP address or host name") from None
    if resolve is None:
        return host
    try:
        return plain(resolve(host))
    except OSError as error:
        raise AddressError(f"failed to resolve hostname '{host}': {error}") from error


def _number(text: str, digits: str, most: int) -> int:
    if not (digits.isascii() and digits.isdigit()) or int(digits) > most:
        raise AddressError(f"{text!r}: {digits!r} is not a number from 0 to {most}")
    return int(digits)


# Pickles and `repr` checks contain the path under which programs import these classes. Doctest only
# examines classes that claim its module, so `__test__` points it to the examples.
for _public in (BindSpec, ChannelAddr, ChannelTransport):
    _public.__module__ = "monarch._rust_bindings.monarch_hyperactor.channel"
__test__ = {"BindSpec": BindSpec.__doc__, "ChannelAddr": ChannelAddr.__doc__}
