"""Remote hosts: attach to worker loops on other hosts, or run a worker loop on this one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from monarch._engine.base.address import BindSpec, ChannelAddr, parse_transport
from monarch._engine.base.settings import settings
from monarch._engine.base.worker_address import InvalidWorkerAddress, parse_worker_address
from monarch._engine.mesh.call.context import context
from monarch._engine.mesh.meshes.attachment import Attachment
from monarch._engine.mesh.meshes.host_mesh import HostMesh
from monarch._engine.mesh.results.future import RAISED, VALUE, Future, _check_timeout
from monarch._engine.mesh.results.progress import progress
from monarch._engine.runtime.agent.client import current_proc, start_agent
from monarch._engine.runtime.io import environment as environments
from monarch._engine.shapes import Slice
from monarch._engine.shapes.shape import shape_of

if TYPE_CHECKING:
    from monarch._engine.protocol.session.handshake import Peer
    from monarch._engine.runtime.agent.worker import Worker

__all__ = [
    "addresses_of",
    "attach",
    "attach_hosts",
    "attach_to_workers",
    "enable_transport",
    "gateway",
    "gateways",
    "greet_worker",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "serve_host",
    "start_worker_loop_forever",
]

_enabled: BindSpec | None = None
_gateway: str | None = None  # the gateway of this client, see `attach`
_spare_gateways: list[str] = []


def enable_transport(transport: Any) -> None:
    """Choose the transport between hosts; call this before any other function of the interface.

    Accepts a `ChannelTransport`, a shortcut (``"tcp"``, ``"ipc"``, ...) or an address. Processes of
    one host always communicate over socket pairs, whatever is chosen. Raises RuntimeError for a
    second, different choice and once the client exists, ValueError for an invalid transport.
    """
    global _enabled
    spec = parse_transport(transport)
    if _enabled is not None and _enabled != spec:
        raise RuntimeError(
            "Only one transport type may be enabled at one time. Currently enabled transport type "
            f"is `{_enabled}`. Attempted to enable transport type `{spec}`."
        )
    if _enabled is None and current_proc() is not None and settings.default_transport != spec:
        raise RuntimeError(
            "`enable_transport()` must be called before any other calls in the monarch API. Move "
            "it to the start of the program."
        )
    _enabled = spec
    settings.configure(default_transport=transport)


def attach_to_workers(
    *,
    private_key: Any = None,
    ca: Any,
    workers: Sequence[str | Future[str]],
    name: str | None = None,
    timeout: float | None = None,
) -> HostMesh:
    """Return a mesh of the hosts whose worker loops serve at these addresses.

    The mesh has the extent ``{hosts: n}``. It is returned at once, before the workers are reached.

    Args:
        private_key: must be None, see `ca`.
        ca: must be ``"trust_all_connections"``. This does not disable any check: with ``tls://``
            addresses, certificates are verified with the files named by ``HYPERACTOR_TLS_CERT``,
            ``HYPERACTOR_TLS_KEY`` and ``HYPERACTOR_TLS_CA``.
        workers: addresses such as ``tcp://host:4444``, or futures of them. Blocks until the
            futures are resolved.
        name: not used; accepted for compatibility.
        timeout: seconds after which attaching to a worker fails if it is not reached (default: the
            setting `mesh_attach_config_timeout`, 60). Workers may be started within this time.

    Both sides prove that they know the same secret (see docs/security.md) before any other data is
    exchanged. `HostMesh.initialized` resolves when all workers were reached; processes may be
    spawned before that. A worker that is not reached within 2 seconds is named on stderr, with the
    reason. Raises RuntimeError for an invalid address, NotImplementedError for other ``ca`` and
    ``private_key``, ValueError for an impossible timeout.
    """
    _check_security(private_key, ca)
    if timeout is not None:
        _check_timeout(timeout)
    texts = [worker.get() if isinstance(worker, Future) else worker for worker in workers]
    return attach_hosts(texts, timeout=timeout)


def attach_hosts(
    workers: Sequence[str], secret_file: str | None = None, timeout: float | None = None
) -> HostMesh:
    """As `attach_to_workers`, for workers of a job whose own secret is in `secret_file`."""
    context()  # makes the client if need be
    start_agent()
    names = [str(address) for address in addresses_of(workers)]
    hosts, called = dict(zip(names, names, strict=True)), dict(zip(names, workers, strict=True))
    shape = shape_of(("hosts",), Slice.new_row_major([len(hosts)]))
    mesh = HostMesh(shape, None, tuple(hosts))
    mesh._attachment = Attachment(hosts, secret_file, gateways(), called=called, timeout=timeout)
    return mesh


def addresses_of(workers: Sequence[str]) -> list[ChannelAddr]:
    """Return the addresses to dial for these workers; RuntimeError for an invalid one."""
    from monarch._engine.runtime.admission.handshake_io import uses_tls

    addresses: list[ChannelAddr] = []
    for text in workers:
        try:
            if "://*" in text:
                raise ValueError("* is where to listen: dial what the worker says that it serves")
            # The gateway looks up the names of hosts behind it.
            resolve = _resolve if _gateway is None else None
            address = parse_worker_address(text, resolve=resolve)
            uses_tls(address)  # raises for what hosts cannot use
        except InvalidWorkerAddress as error:
            raise RuntimeError(str(error)) from error
        except (ValueError, NotImplementedError) as error:
            raise RuntimeError(f'invalid worker address "{text}": {error}') from error
        addresses.append(address)
    return addresses


def gateway() -> str | None:
    """Return the address of the worker through which all others are reached, see `attach`."""
    return _gateway


def gateways() -> list[str]:
    """Return the addresses of the gateway and of its spares; none: workers are dialed directly."""
    return [] if _gateway is None else [_gateway, *_spare_gateways]


def attach(addr: str, *, timeout: float | None = None, spares: Sequence[str] = ()) -> None:
    """Reach all workers through one of them, the *gateway* at `addr`: ``tcp://gateway:4444``, say.

    For clients that can reach only the gateway: addresses given to `attach_to_workers` are looked
    up and dialed there. The gateway forwards bytes unchanged, including the handshake with each
    worker and TLS; behind a ``tls://`` gateway only ``tls://`` workers are reached. Workers connect
    to each other directly. No worker ever connects to the client. `this_host()` remains this
    machine.

    The workers at `spares` are gateways in the place of one that is lost, in this order. If one of
    them is reached before the hosts behind have been silent for `host_timeout`, no host is lost,
    and no message. Without one, all hosts behind a lost gateway count as lost, and the report names
    the gateway.

    Call it before the client exists; a second call with the same address does nothing. Blocks until
    both sides have proved that they know the secret, at most `timeout` seconds (default: the
    setting `mesh_attach_config_timeout`, 60). Raises RuntimeError if the client exists or is
    attached through another worker, for an invalid address, and if the gateway is not reached or
    refuses; ValueError for an impossible timeout. A spare that is not reached now is no error, an
    invalid address of one is.
    """
    global _gateway, _spare_gateways
    from monarch._engine.protocol.session.handshake import HandshakeError
    from monarch._engine.runtime.admission.handshake_io import why_unreachable

    if _gateway == addr:
        return
    if _gateway is not None:
        raise RuntimeError(
            f"client is already attached through {_gateway}, not {addr}; a client has one gateway"
        )
    if current_proc() is not None:
        raise RuntimeError(
            "client was initialized without a remote attachment; call attach(addr) before the "
            "first context()/this_host()/this_proc()"
        )
    if timeout is not None:
        _check_timeout(timeout)
    for spare in spares:
        _check_gateway(spare)
    limit = settings.mesh_attach_config_timeout if timeout is None else timeout
    try:
        with progress(f"waiting for {addr}"):
            greet_worker(addr, limit)
    except OSError as error:
        why = why_unreachable(error, limit)
        raise RuntimeError(f"cannot attach through {addr}: {why}") from error
    except (ValueError, HandshakeError) as error:
        raise RuntimeError(f"cannot attach through {addr}: {error}") from error
    _gateway, _spare_gateways = addr, list(spares)


def _check_gateway(spare: str) -> None:
    from monarch._engine.runtime.admission.handshake_io import uses_tls

    try:
        uses_tls(parse_worker_address(spare, resolve=None))
    except (ValueError, NotImplementedError) as error:
        raise RuntimeError(f"cannot attach through the spare {spare}: {error}") from error


def run_worker_loop_forever(*, private_key: Any = None, ca: Any, address: str) -> NoReturn:
    """Serve this host at `address` and never return.

    Exits the process with status 0 after a client's `HostMesh.shutdown`. When a client exits or is
    lost, its processes are ended, and the loop waits for other clients. If it cannot listen at the
    address, it prints the reason in one line on stderr and exits with status 1. See
    `attach_to_workers` for the arguments. Raises ValueError for an invalid address.
    """
    try:
        worker = _worker(private_key, ca, address)
    except OSError as error:
        sys.exit(f"monarch worker: cannot listen at {address}: {error.strerror or error}")
    worker.run()
    sys.exit(0)


def run_worker_loop_until_shutdown(*, private_key: Any = None, ca: Any, address: str) -> None:
    """As `run_worker_loop_forever`, but return after a client's `HostMesh.shutdown`.

    Raises OSError if it cannot listen at the address, ValueError for an invalid address.
    """
    _worker(private_key, ca, address).run()


def greet_worker(address: str, timeout: float) -> Peer:
    """Return what the worker at this address states about itself in the authenticated handshake.

    Blocks at most about `timeout` seconds. Raises ValueError for an invalid address, OSError if no
    worker is reached, HandshakeError if one side refuses the other, SecretError without a secret.
    """
    from monarch._engine.runtime.admission.handshake_io import greet  # few programs ask
    from monarch._engine.runtime.admission.secret import find_secret

    where = parse_worker_address(address, resolve=_resolve)
    return greet(where, find_secret(), timeout)


def serve_host(
    address: str,
    ready: Callable[[str], None],
    lifeline: int | None = None,
    names: Sequence[str] = (),
) -> None:
    """Serve this host at `address` until a client shuts it down, or SIGTERM or SIGINT comes.

    Args:
        address: where to listen.
        ready: called as ``ready(url)`` once the worker listens, with the address for clients: it
            has the port that was chosen, if `address` left it open, and a name of this host, if the
            worker listens at all its addresses.
        lifeline: a descriptor, or None; EOF there ends the worker, too. The system closes the other
            end if the launching process is killed.
        names: other addresses at which clients reach the worker, see the setting `worker_names`.

    Blocks; to be called on the main thread of a process. When it returns, all processes of clients
    on this host have exited. Raises like `run_worker_loop_until_shutdown`.
    """
    import signal

    worker = _worker(None, "trust_all_connections", address, names)

    def stop(_number: int, _frame: Any) -> None:
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if lifeline is not None:

        def hold_on() -> None:
            with contextlib.suppress(OSError):  # a terminal that was closed
                while os.read(lifeline, 4096):
                    pass
            worker.stop()

        environments.current.start_thread("monarch-lifeline", hold_on)
    ready(_dialed(address, worker))
    worker.run()


def start_worker_loop_forever(*, private_key: Any = None, ca: Any, address: str) -> Future[None]:
    """As `run_worker_loop_until_shutdown`, on a thread of its own; does not block.

    The future resolves after a client's `HostMesh.shutdown`. Raises like
    `run_worker_loop_until_shutdown`.
    """
    worker = _worker(private_key, ca, address)
    future: Future[None] = Future._new()

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:
            future._resolve(RAISED, error)
        else:
            future._resolve(VALUE, None)

    environments.current.start_thread("monarch-worker", run)
    return future


def _worker(private_key: Any, ca: Any, address: str, names: Sequence[str] = ()) -> Worker:
    from monarch._engine.runtime.agent.worker import Worker  # few programs are workers

    _check_security(private_key, ca)
    also: list[str] = []
    for name in (*names, *filter(None, settings.worker_names.split(","))):
        also.append(parse_worker_address(name.strip()).url)
        with contextlib.suppress(ValueError):  # the name need not be known on this host
            also.append(parse_worker_address(name.strip(), resolve=_resolve).url)
    return Worker(parse_worker_address(address, resolve=_resolve), also)


def _dialed(text: str, worker: Worker) -> str:
    """Return the address that clients of a worker dial; `text` is the address it listens at."""
    from monarch._engine.runtime.admission.public_name import EVERYWHERE, own_name

    address = parse_worker_address(text)._replace(bind=None)
    if address.host in EVERYWHERE:
        address = address._replace(host=own_name())
    return address._replace(port=address.port or worker.port, fd=None).url


def _check_security(private_key: Any, ca: Any) -> None:
    if private_key is not None or ca != "trust_all_connections":
        raise NotImplementedError(
            "TLS security plumbing, which takes certificates as arguments, is not in this release: "
            "name the certificates with HYPERACTOR_TLS_CERT, HYPERACTOR_TLS_KEY and "
            "HYPERACTOR_TLS_CA, use tls:// addresses, "
            'and pass ca="trust_all_connections" and no private_key'
        )


def _resolve(host: str) -> str:
    import socket

    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
