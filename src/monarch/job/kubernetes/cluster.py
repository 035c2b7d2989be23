"""Requests to the API of a cluster: objects of the job, and pods.

Requests and answers are JSON; the classes of the client are not used. A request that fails raises
`ClusterError`: one line with the request, the answer of the API, and a remedy. The error says
whether the same request may succeed later.

Every request has a time limit. A watch is ended by the API every minute, so that a connection that
was lost without notice is detected soon after.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import warnings
from collections.abc import Callable, Generator
from typing import Any, cast

from monarch.job.kubernetes.answer import items, part, text
from monarch.job.kubernetes.kube_config import KubeConfig
from monarch.job.kubernetes.manifests import MONARCH_MESH, POD, SECRET, SERVICE, STATEFUL_SET, Kind

__all__ = ["Cluster", "ClusterError"]

_log = logging.getLogger("monarch.job")

_CONNECT = 10.0  # seconds to connect
_ANSWER = 60.0  # seconds for an answer
_SLACK = 15.0  # seconds that a watch may take longer than it was asked for
_PAGE = 500  # pods in one answer
_LONGEST = 400  # characters of an answer that an error shows
_EXPIRED = 410
_unverified: set[str] = set()  # the APIs that this process has warned about
_BUSY = frozenset({408, 409, 429, 500, 502, 503, 504})
_TYPED = {POD: "pod", SECRET: "secret", SERVICE: "service", STATEFUL_SET: "stateful_set"}
_REMEDIES = {
    401: "the credentials are not accepted: log in again, or name another kubeconfig",
    403: "let this user do that: docs/jobs/kubernetes.md has the role",
    422: "correct what the API names",
}


class ClusterError(RuntimeError):
    """A request failed; the text has the request, the answer and a remedy, on one line."""

    def __init__(self, text: str, status: int = 0, reason: str = "") -> None:
        super().__init__(text)
        self.status = status
        """The status of the answer; 0: there was none."""
        self.reason = reason
        """The reason in one word, such as ``NotFound``; empty for an answer that has none."""

    @property
    def passes(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status == 0 or self.status in _BUSY


class Cluster:
    """One namespace of a cluster, as the user of a configuration."""

    def __init__(self, namespace: str, config: KubeConfig) -> None:
        client: Any = importlib.import_module("kubernetes.client")
        self.namespace = namespace
        loaded: Any = config.load()
        self._host = str(loaded.host)
        if not loaded.verify_ssl and self._host not in _unverified:
            _unverified.add(self._host)
            _log.warning(
                "the certificate of the API at %s is not verified, as the configuration says "
                "(insecure-skip-tls-verify): whoever is in between reads the job's secret",
                self._host,
            )
        self._api: Any = client.ApiClient(loaded)
        self._core: Any = client.CoreV1Api(self._api)
        self._apps: Any = client.AppsV1Api(self._api)
        self._custom: Any = client.CustomObjectsApi(self._api)

    def close(self) -> None:
        """Close the connections."""
        with contextlib.suppress(AttributeError):  # older releases of the client have none
            self._api.rest_client.pool_manager.clear()
        with contextlib.suppress(AttributeError):
            self._api.close()

    # -- objects ---------------------------------------------------------------------------------

    def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any] | None:
        """Create an object, and return it; None if one of this name exists."""
        name = body["metadata"]["name"]
        try:
            return self._object("create", kind, name, body=body)
        except ClusterError as error:
            if error.status == 409:
                return None
            raise

    def read(self, kind: Kind, name: str) -> dict[str, Any] | None:
        """Return an object; None if there is none."""
        verb = "get" if kind == MONARCH_MESH else "read"
        try:
            return self._object(verb, kind, name)
        except ClusterError as error:
            if error.reason == "NotFound":
                return None
            raise

    def patch(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """Change an object to what `body` has, and return it."""
        return self._object("patch", kind, body["metadata"]["name"], body=body)

    def delete(self, kind: Kind, name: str, uid: str) -> bool:
        """Delete this very object, with all that it owns. Return False if it does not exist."""
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        try:
            self._object("delete", kind, name, body=body)
        except ClusterError as error:
            if error.reason in ("NotFound", "Conflict"):  # (Conflict: another one took the name)
                return False
            raise
        return True

    def _object(self, verb: str, kind: Kind, name: str, **more: Any) -> dict[str, Any]:
        options: dict[str, Any] = {"namespace": self.namespace, **more}
        if verb != "create":
            options["name"] = name
        if verb == "patch":
            options["_content_type"] = "application/merge-patch+json"
        if kind == MONARCH_MESH:
            group, _, version = kind.version.partition("/")
            options |= {"group": group, "version": version, "plural": kind.plural}
            call = getattr(self._custom, f"{verb}_namespaced_custom_object")
        else:
            api = self._apps if kind == STATEFUL_SET else self._core
            call = getattr(api, f"{verb}_namespaced_{_TYPED[kind]}")
        what = f"{'get' if verb == 'read' else verb} {kind.name} {self.namespace}/{name}"
        with self._answer(what, call, (_CONNECT, _ANSWER), options, kind) as response:
            found: dict[str, Any] = self._parsed(what, response.read())
        return found

    # -- pods ------------------------------------------------------------------------------------

    def list_pods(self, selector: str, limit: float = _ANSWER) -> tuple[list[dict[str, Any]], str]:
        """Return the pods that a selector selects, and the version of this list."""
        what = f"list pods {self.namespace} ({selector})"
        while True:
            found: list[dict[str, Any]] = []
            more: dict[str, Any] = {}
            try:
                while True:
                    options = {
                        "namespace": self.namespace,
                        "label_selector": selector,
                        "limit": _PAGE,
                        **more,
                    }
                    call = self._core.list_namespaced_pod
                    with self._answer(what, call, (_CONNECT, limit), options) as response:
                        page = self._parsed(what, response.read())
                    found += items(page, "items")
                    metadata = part(page, "metadata")
                    if not text(metadata, "continue"):
                        return found, text(metadata, "resourceVersion")
                    more = {"_continue": text(metadata, "continue")}
            except ClusterError as error:
                if error.status != _EXPIRED or not more:  # the list changed between two pages
                    raise

    def watch_pods(
        self, selector: str, version: str, seconds: int
    ) -> Generator[tuple[str, dict[str, Any]]]:
        """Yield the events of these pods since a version, until the API ends the watch.

        The API ends it after `seconds`. Raises ClusterError.
        """
        what = f"watch pods {self.namespace} ({selector})"
        options = {
            "namespace": self.namespace,
            "label_selector": selector,
            "resource_version": version,
            "allow_watch_bookmarks": True,
            "watch": True,
            "timeout_seconds": seconds,
        }
        call = self._core.list_namespaced_pod
        limits = (_CONNECT, seconds + _SLACK)
        with self._answer(what, call, limits, options) as response:
            rest = b""
            for chunk in response.stream(decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        event = self._parsed(what, line)
                        yield text(event, "type"), part(event, "object")

    # -- one request -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _answer(
        self,
        what: str,
        call: Callable[..., Any],
        limits: tuple[float, float],
        options: dict[str, Any],
        kind: Kind | None = None,
    ) -> Generator[Any]:
        """Yield the answer of the API to a request, before its body is read."""
        client: Any = importlib.import_module("kubernetes.client")
        urllib3: Any = importlib.import_module("urllib3.exceptions")
        try:
            with warnings.catch_warnings():  # this class has warned once
                warnings.simplefilter("ignore", urllib3.InsecureRequestWarning)
                response = call(**options, _preload_content=False, _request_timeout=limits)
            try:
                if not 200 <= response.status <= 299:  # older releases of the client raise
                    raise self._refused(what, response.status, response.read(), kind)
                yield response
            finally:
                response.close()
                response.release_conn()
        except client.ApiException as error:
            raise self._refused(what, error.status or 0, error.body or b"", kind) from None
        except (urllib3.HTTPError, OSError) as error:
            why = " ".join(str(getattr(error, "reason", None) or error).split())
            raise ClusterError(
                f"cannot {what}: the API at {self._host} does not answer ({_short(why)}): does the "
                "cluster run, and is this its address?"
            ) from None

    def _refused(
        self, what: str, status: int, body: bytes | str, kind: Kind | None
    ) -> ClusterError:
        message, reason = body.decode(errors="replace") if isinstance(body, bytes) else body, ""
        with contextlib.suppress(ClusterError):  # a page of a proxy, say
            said = self._parsed(what, message.encode())
            reason = text(said, "reason")
            message = text(said, "message") or reason
        message = _short(" ".join(message.split()))
        remedy = _REMEDIES.get(status, "")
        if status == 404 and message.startswith("namespaces "):
            remedy = f"`kubectl create namespace {self.namespace}` creates it, if that is its name"
        elif status == 404 and not reason and kind == MONARCH_MESH:
            remedy = (
                "this cluster has no MonarchMesh: install the operator, or make the job without "
                "it, KubernetesJob(..., operator=False)"
            )
        said_text = f"status {status}: {message}" if message else f"status {status}"
        advice = f"; {remedy}" if remedy else ""
        return ClusterError(f"cannot {what}: {said_text}{advice}", status, reason)

    def _parsed(self, what: str, data: bytes) -> dict[str, Any]:
        try:
            parsed = json.loads(data)
        except ValueError:
            said = _short(" ".join(data.decode(errors="replace").split()))
            raise ClusterError(f"cannot {what}: the API answered {said!r}, no JSON") from None
        if not isinstance(parsed, dict):
            raise ClusterError(f"cannot {what}: the API answered {_short(str(parsed))!r}")
        return cast("dict[str, Any]", parsed)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
