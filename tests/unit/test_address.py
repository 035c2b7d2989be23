"""Addresses, transports, and the address of a worker."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.base.address import (
    AddressError,
    BindSpec,
    ChannelAddr,
    ChannelTransport,
    parse_transport,
)
from monarch._engine.base.worker_address import parse_worker_address

TRANSPORTS = [
    ("TcpWithLocalhost", 0, "tcp(Localhost)", "PyBindSpec(Any(Tcp(Localhost)))"),
    ("TcpWithHostname", 1, "tcp(Hostname)", "PyBindSpec(Any(Tcp(Hostname)))"),
    ("MetaTlsWithHostname", 2, "metatls(Hostname)", "PyBindSpec(Any(MetaTls(Hostname)))"),
    ("MetaTlsWithIpV6", 3, "metatls(IpV6)", "PyBindSpec(Any(MetaTls(IpV6)))"),
    ("Tls", 4, "tls", "PyBindSpec(Any(Tls))"),
    ("Quic", 5, "quic", "PyBindSpec(Any(Quic))"),
    ("MetaQuicWithHostname", 6, "metaquic(Hostname)", "PyBindSpec(Any(MetaQuic(Hostname)))"),
    ("MetaQuicWithIpV6", 7, "metaquic(IpV6)", "PyBindSpec(Any(MetaQuic(IpV6)))"),
    ("Local", 8, "local", "PyBindSpec(Any(Local))"),
    ("Unix", 9, "unix", "PyBindSpec(Any(Unix))"),
]


@pytest.mark.parametrize(("name", "number", "text", "shown"), TRANSPORTS)
def test_transport(name, number, text, shown):
    transport = getattr(ChannelTransport, name)
    assert f"ChannelTransport.{name}" == str(transport) == repr(transport)
    assert number == int(transport)
    assert transport.get() is copy.deepcopy(transport) is transport
    spec = BindSpec(transport)
    assert (text, shown) == (str(spec), repr(spec))
    assert spec == BindSpec(text) == BindSpec(spec)
    assert (spec.transport, spec.address) == (transport, None)


def test_transports_differ_and_have_no_other_members():
    assert len(set(ChannelTransport)) == len(TRANSPORTS) == len(ChannelTransport)
    assert ChannelTransport.Unix != ChannelTransport.Local


ADDRESSES = [
    # text, internal, URL, transport
    ("tcp://127.0.0.1:0", "tcp:127.0.0.1:0", None, "TcpWithLocalhost"),
    ("tcp://localhost:8080", "tcp:127.0.0.1:8080", "tcp://127.0.0.1:8080", "TcpWithLocalhost"),
    ("tcp://[::1]:4", "tcp:[::1]:4", None, "TcpWithLocalhost"),
    ("tcp://::1:4", "tcp:[::1]:4", "tcp://[::1]:4", "TcpWithLocalhost"),
    ("tcp://*:5", "tcp:[::]:5", "tcp://[::]:5", "TcpWithHostname"),
    ("tcp!1.2.3.4:5", "tcp:1.2.3.4:5", "tcp://1.2.3.4:5", "TcpWithHostname"),
    ("tcp://1.2.3.4:0005", "tcp:1.2.3.4:5", "tcp://1.2.3.4:5", "TcpWithHostname"),
    ("tcp://[fe80::1%2]:3", "tcp:[fe80::1%2]:3", None, "TcpWithHostname"),
    ("tcp://node-7.cluster:5", "tcp:node-7.cluster:5", None, "TcpWithHostname"),
    ("tcp://h:fd5", "tcp:h:fd5", None, "TcpWithHostname"),
    ("ipc:///p/q", "unix:/p/q", None, "Unix"),
    ("ipc://@abs", "unix:@abs", None, "Unix"),
    ("ipc://@a@b", "unix:@a@b", None, "Unix"),
    ("unix!@q", "unix:@q", "ipc://@q", "Unix"),
    ("unix:", "unix:", "ipc://", "Unix"),
    ("unix:a@tcp://1.2.3.4:6", "unix:a@tcp://1.2.3.4:6", "ipc://a@tcp://1.2.3.4:6", "Unix"),
    ("inproc://3", "local:3", None, "Local"),
    ("local!3", "local:3", "inproc://3", "Local"),
    ("tls://h:1", "tls:h:1", None, "Tls"),
    ("tls://localhost:1", "tls:localhost:1", None, "Tls"),
    ("tls://*:1", "tls:[::]:1", "tls://[::]:1", "Tls"),
    ("metatls://h:1", "metatls:h:1", None, "MetaTlsWithHostname"),
    ("quic://h:1", "quic:h:1", None, "Quic"),
    ("metaquic://h:1", "metaquic:h:1", None, "MetaQuicWithHostname"),
    (
        "tcp://1.2.3.4:5@tcp://0.0.0.0:6",
        "alias:dial_to=tcp:1.2.3.4:5;bind_to=tcp:0.0.0.0:6",
        None,
        "TcpWithHostname",
    ),
]


@pytest.mark.parametrize(("text", "internal", "url", "transport"), ADDRESSES)
def test_both_spellings_are_read_and_written(text, internal, url, transport):
    address = ChannelAddr.parse(text)
    assert (internal, url or text) == (str(address), address.url)
    assert address == ChannelAddr.parse(internal) == ChannelAddr.parse(address.url)
    assert getattr(ChannelTransport, transport) is address.get_transport()
    spec = BindSpec(text)
    assert (internal, address) == (str(spec), spec.address)
    assert hash(spec) == hash(BindSpec(internal))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("tcp://127.0.0.1:0", "PyBindSpec(Addr(Tcp(127.0.0.1:0)))"),
        ("tcp://[::1]:4", "PyBindSpec(Addr(Tcp([::1]:4)))"),
        ("ipc:///p/q", 'PyBindSpec(Addr(Unix(Bound("/p/q" (pathname)))))'),
        ("ipc://@abs", 'PyBindSpec(Addr(Unix(Bound("abs" (abstract)))))'),
        ("inproc://3", "PyBindSpec(Addr(Local(3)))"),
        ("tls://h:1", 'PyBindSpec(Addr(Tls(TlsAddr { hostname: "h", port: 1 })))'),
        ("metatls://h:1", 'PyBindSpec(Addr(MetaTls(TlsAddr { hostname: "h", port: 1 })))'),
        (
            "tcp://1.2.3.4:5@tcp://0.0.0.0:5",
            "PyBindSpec(Addr(Alias { dial_to: Tcp(1.2.3.4:5), bind_to: Tcp(0.0.0.0:5) }))",
        ),
    ],
)
def test_bind_spec_repr(text, shown):
    assert shown == repr(BindSpec(text))


@pytest.mark.parametrize(
    "text",
    [
        "", "weird", "ipc", "metatls", "TCP", " tcp", "tcp(localhost)", "weird://x", "foo:bar",
        "http://h:1", "ipc:x", "inproc!3", "TCP://127.0.0.1:1", "tcp:", "tcp://", "tcp://1.2.3.4",
        "tcp://1.2.3.4:", "local:",
        "tcp://1.2.3.4:x", "tcp://1.2.3.4:99999", "tcp://1.2.3.4:-1", "tcp://1.2.3.4:5 ",
        "tcp://1.2.3.4:٣", "tcp://:5", "tcp://1.2.3.300:5", "tcp://a b:1", "tcp://h:fd",
        "tcp://h:fdx", "tls://h", "tls://h:x", "inproc://x", "inproc://-1",
        "inproc://18446744073709551616",
        "unix:" + "x" * 108, "unix:@" + "x" * 120, "ipc://a\0b",
        "tcp://1.2.3.4:5@ipc://@x", "tcp://1.2.3.4:fd5@tcp://1.2.3.4:5",
        "tcp://1.2.3.4:5@tcp://1.2.3.4:5@tcp://1.2.3.4:5", "alias:tcp:1.2.3.4:5",
    ],
)  # fmt: skip
def test_bad_addresses_are_refused(text):
    with pytest.raises(ValueError) as refusal:
        BindSpec(text)
    start = f"invalid str for BindSpec '{text}': invalid bind spec: {text}"
    assert str(refusal.value).startswith(start)
    with pytest.raises(AddressError) as refusal:
        ChannelAddr.parse(text)
    assert isinstance(refusal.value, RuntimeError)


def test_longest_socket_names_are_accepted():
    assert ChannelAddr.parse("unix:" + "x" * 107).name == "x" * 107


@pytest.mark.parametrize("value", [3, None, b"tcp", object()])
def test_wrong_types_are_refused(value):
    with pytest.raises(TypeError, match="expected ChannelTransport enum, BindSpec, or str"):
        BindSpec(value)
    with pytest.raises(TypeError):
        ChannelAddr.parse(value)
    with pytest.raises(TypeError):
        ChannelAddr.any(value)


def test_a_resolver_is_used_for_tcp_names_only():
    asked = []

    def resolve(name):
        asked.append(name)
        if name == "nowhere":
            raise OSError("Name or service not known")
        return "fd00::7"

    assert str(ChannelAddr.parse("tcp://node:1", resolve=resolve)) == "tcp:[fd00::7]:1"
    assert str(BindSpec("tcp://node:1@tcp://*:1", resolve=resolve)).startswith(
        "alias:dial_to=tcp:["
    )
    for literal in ("tcp://1.2.3.4:1", "tcp://localhost:1", "tcp://*:1", "tls://node:1"):
        ChannelAddr.parse(literal, resolve=resolve)
    assert asked == ["node", "node"]
    with pytest.raises(AddressError, match="failed to resolve hostname 'nowhere'"):
        ChannelAddr.parse("tcp://nowhere:1", resolve=resolve)


def test_any_gives_something_to_bind():
    given_bytes = bytes(range(12))
    unix = ChannelAddr.any(ChannelTransport.Unix, entropy=lambda n: given_bytes[:n])
    assert unix == "unix:@" + given_bytes.hex()
    assert ChannelAddr.any(ChannelTransport.Unix) != ChannelAddr.any(ChannelTransport.Unix)
    assert ChannelAddr.any(ChannelTransport.Local) == "local:0"
    assert ChannelAddr.any(ChannelTransport.TcpWithLocalhost) == "tcp:[::1]:0"
    for transport in (ChannelTransport.TcpWithHostname, ChannelTransport.Tls):
        address = ChannelAddr.parse(ChannelAddr.any(transport))
        assert address.get_port() == 0


def test_shortcuts_of_enable_transport():
    expected = {
        "tcp": ChannelTransport.TcpWithHostname,
        "ipc": ChannelTransport.Unix,
        "metatls": ChannelTransport.MetaTlsWithIpV6,
        "metatls-hostname": ChannelTransport.MetaTlsWithHostname,
        "tls": ChannelTransport.Tls,
        ChannelTransport.Unix: ChannelTransport.Unix,
    }
    assert {text: BindSpec(transport) for text, transport in expected.items()} == {
        text: parse_transport(text) for text in expected
    }
    assert str(parse_transport("tcp://127.0.0.1:0")) == "tcp:127.0.0.1:0"


@pytest.mark.parametrize(
    "value",
    [ChannelTransport.Unix, BindSpec("unix"), BindSpec("ipc://@x"), ChannelAddr.parse("tls://h:1")],
)
def test_values_travel(value):
    pytest.importorskip(type(value).__module__, reason="pickles name the reference's path")
    assert value == pickle.loads(pickle.dumps(value)) == copy.deepcopy(value)


def test_classes_claim_the_path_programs_know():
    modules = {cls.__module__ for cls in (BindSpec, ChannelAddr, ChannelTransport)}
    assert modules == {"monarch._rust_bindings.monarch_hyperactor.channel"}


HOSTS = st.one_of(
    st.ip_addresses().map(str),
    st.from_regex(r"[a-z][a-z0-9-]{0,10}[a-z0-9](\.[a-z]{1,5}){0,2}", fullmatch=True),
)


@given(st.sampled_from(["tcp", "tls", "metatls", "quic", "metaquic"]), HOSTS, st.integers(0, 65535))
def test_network_addresses_round_trip(scheme, host, port):
    bracketed = f"[{host}]" if ":" in host else host
    address = ChannelAddr.parse(f"{scheme}://{bracketed}:{port}")
    assert address == ChannelAddr.parse(str(address)) == ChannelAddr.parse(address.url)
    assert (scheme, port) == (address.scheme, address.get_port())


@given(st.text(max_size=30) | st.from_regex(r"(tcp|tls|ipc|inproc|alias|unix)(://|:|!)[\w:@\[\]]*"))
def test_the_parser_fails_only_with_address_error(text):
    try:
        address = ChannelAddr.parse(text)
    except AddressError:
        return
    assert address == ChannelAddr.parse(str(address)) == ChannelAddr.parse(address.url)


# -- workers


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://1.2.3.4:5", "tcp:1.2.3.4:5"),
        ("service<21>@tcp://1.2.3.4:5", "tcp:1.2.3.4:5"),
        ("service@ipc://@w", "unix:@w"),
        ("ipc://@w", "unix:@w"),
        ("tcp://a:5@tcp://0.0.0.0:5", "alias:dial_to=tcp:a:5;bind_to=tcp:0.0.0.0:5"),
        ("tcp://h:fd3", "tcp:h:fd3"),
        ("tcp://*:3", "tcp:[::]:3"),
        ("service@tcp://*:3", "tcp:[::]:3"),
        ("tcp://h:1@tcp://*:3", "alias:dial_to=tcp:h:1;bind_to=tcp:[::]:3"),
    ],
)
def test_worker_address(text, address):
    assert address == str(parse_worker_address(text))


@pytest.mark.parametrize(
    "text",
    [
        "nope", "", "tcp:", "tcp:1.2.3.4:5", "service@", "x@y", "weird://x", "tcp://1.2.3.4:x",
        "SER@tcp://1.2.3.4:3", "a.b@tcp://1.2.3.4:3", "<>@tcp://1.2.3.4:3",
    ],
)  # fmt: skip
def test_bad_worker_addresses_are_refused(text):
    with pytest.raises(ValueError) as refusal:
        parse_worker_address(text)
    assert str(refusal.value).startswith(f'invalid worker address "{text}": ')
    assert str(refusal.value).endswith(
        "; expected a URL such as 'tcp://host:4444' or 'ipc:///path/of/a/socket'"
    )
