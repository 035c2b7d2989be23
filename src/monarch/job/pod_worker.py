"""The worker that runs in a pod of Kubernetes: ``python -m monarch.job.pod_worker``.

It is set up by environment variables, which the pod's template has:

``MONARCH_PORT``
    The port of the worker (26600).
``MONARCH_JOB_SECRET``
    The job's secret, from a Secret object. Without it the worker finds its secret as every worker
    does: see docs/security.md.
``MONARCH_POD_NAMESPACE``, ``MONARCH_POD_NAME``
    The pod, from the downward API; needed where clients come through a forwarded port.
``MONARCH_SERVICE_PROC_IDS``, ``MONARCH_SERVICE_PROC_RANK``
    The service ids of the mesh, and the rank of this pod (`service_identity`); optional.
``MONARCH_BIND_ADDRESS``
    The IP address where the worker listens; all addresses of the pod by default. A forwarded port
    leads to the pod's loopback address, so it needs that default.

This module is not in `monarch.job.kubernetes`, since a pod needs no client of Kubernetes.
"""

from __future__ import annotations

import contextlib
import os
import sys

from monarch._spi import SecretError
from monarch.job.host import serve_host
from monarch.job.node import SECRET_VARIABLE, kept_secret, take_secret
from monarch.job.pod import BIND_VARIABLE, NAMES, PORT, PORT_VARIABLE, forwarded_host
from monarch.job.service_identity import ranked_service_proc_id_from_env, service_proc_addr

__all__ = ["main"]


def main() -> None:
    """Serve as a host until a client shuts it down, or the pod ends."""
    given = os.environ.get(PORT_VARIABLE, str(PORT))
    if not given.isdecimal() or not 0 < int(given) < 65536:
        sys.exit(f"monarch worker: {PORT_VARIABLE} must be a port, not {given!r}")
    address = f"tcp://{_host(os.environ.get(BIND_VARIABLE) or '*')}:{given}"
    names: list[str] = []
    namespace, pod = (os.environ.get(name, "") for name in NAMES)
    if namespace and pod:
        names.append(f"tcp://{forwarded_host(namespace, pod)}:{given}")
    with contextlib.ExitStack() as stack:
        try:
            address = service_proc_addr(address, ranked_service_proc_id_from_env())
        except ValueError as error:
            sys.exit(f"monarch worker: {error}")
        if os.environ.get(SECRET_VARIABLE):
            stack.enter_context(kept_secret(take_secret()))
        try:
            serve_host(address, _listening, names=names)
        except OSError as error:
            reason = error.strerror or str(error)
            sys.exit(f"monarch worker: cannot listen at {address}: {reason}")
        except (SecretError, ValueError) as error:
            sys.exit(f"monarch worker: {error}")


def _host(name: str) -> str:
    return f"[{name}]" if ":" in name else name


def _listening(url: str) -> None:
    sys.stdout.write(f"monarch worker: serving at {url}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
