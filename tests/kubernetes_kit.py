"""A small Kubernetes of the tests' own: an API server, an operator, and pods that are processes.

It is no Kubernetes; it speaks as much of the API as `monarch.job.kubernetes` uses, over HTTP, so
that the real client and real watches are tested:

* pods, services, secrets, StatefulSets and MonarchMeshes: create (409 if the name is taken), get,
  list (label selectors, pages), merge patch, delete (404, preconditions), watch;
* versions: a watch starts from a version, and gets 410 for one that was `expire`d;
* faults: `deny`, `cut` (all watches break in the middle of a line), `nonsense`, `close`.

Two controllers make StatefulSets of MonarchMeshes, and pods of StatefulSets. A pod runs the command
of its first container as a process of this machine, with its variables, at an address of its own
below 127.0.0.0/8. So a job connects to real workers. A pod whose image is ``missing`` never starts.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from monarch.job.pod import BIND_VARIABLE

INDEX = "apps.kubernetes.io/pod-index"
PLURALS = {
    "pods": "Pod",
    "services": "Service",
    "secrets": "Secret",
    "statefulsets": "StatefulSet",
    "monarchmeshes": "MonarchMesh",
}
PATH = re.compile(
    r"/(?:api/v1|apis/apps/v1|apis/monarch\.pytorch\.org/v1alpha1)"
    r"/namespaces/([^/]+)/(\w+)(?:/([^/]+))?"
)
Object = dict[str, Any]


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str = "") -> None:
        super().__init__(message)
        self.status = {
            "kind": "Status",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message or reason,
        }


class Cluster:
    """The kit; `page` is the number of items in one answer to a list."""

    def __init__(self, folder: Path, *, operator: bool = True, page: int = 500) -> None:
        self.folder = folder
        self.operator = operator
        self.page = page
        self.requests: list[str] = []
        self.changed = threading.Condition(threading.RLock())
        self.objects: dict[tuple[str, str, str], Object] = {}  # plural, namespace, name
        self.events: list[tuple[int, str, str, Object]] = []  # version, plural, kind, object
        self.denied: dict[tuple[str, str], tuple[int, str, str]] = {}  # method and plural
        self.nonsense = False
        self.cuts = 0
        self.expired = 0
        self.collects_late = False  # pods outlive their owner for a while, as in real clusters
        self._number = itertools.count(1)
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by uid
        self._block = f"127.{random.randrange(1, 127)}.{random.randrange(256)}"
        self._last_byte = itertools.count(2)
        self._collectors: list[threading.Timer] = []
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.cluster = self
        self.server.connections = []
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.05}
        )
        self._thread.start()

    def kubeconfig(self) -> Path:
        path = self.folder / "kubeconfig"
        user = {"name": "u", "user": {"token": "token-of-the-tests"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        cluster = {"name": "c", "cluster": {"server": self.url}}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [cluster],
            "users": [user],
            "contexts": [context],
            "current-context": "c",
        }
        path.write_text(json.dumps(config))
        return path

    # -- what tests do ---------------------------------------------------------------------------

    def names(self, plural: str) -> list[str]:
        with self.changed:
            return sorted(name for kind, _, name in self.objects if kind == plural)

    def pod(self, name: str, namespace: str = "ml") -> Object:
        with self.changed:
            return self.objects["pods", namespace, name]

    def add_pod(self, name: str, labels: dict[str, str], spec: Object | None = None) -> Object:
        """Create a pod that is not ready; without a spec it runs nothing."""
        body = {"metadata": {"name": name, "labels": labels}, "spec": spec or {"containers": []}}
        return self.create("pods", "ml", body)

    def make_ready(self, name: str, ip: str = "10.0.0.1", namespace: str = "ml") -> None:
        with self.changed:
            pod = json.loads(json.dumps(self.pod(name, namespace)))
            pod["status"] = {
                "phase": "Running",
                "podIP": ip,
                "conditions": [{"type": "Ready", "status": "True"}],
            }
            self._put("pods", "MODIFIED", pod)

    def expire(self) -> None:
        """Forget all events until now: a watch from an earlier version gets 410."""
        with self.changed:
            self.expired = next(self._number)
            self.events.clear()
            self.changed.notify_all()

    def cut(self) -> None:
        """Break all watches in the middle of a line."""
        with self.changed:
            self.cuts += 1
            self.changed.notify_all()

    def deny(
        self,
        method: str,
        plural: str,
        code: int = 403,
        reason: str = "Forbidden",
        message: str = "",
    ) -> None:
        self.denied[method, plural] = code, reason, message

    def process_of(self, name: str) -> subprocess.Popen[bytes]:
        return self._processes[self.pod(name)["metadata"]["uid"]]

    def stop_api(self) -> None:
        """Stop listening, and break all watches."""
        if self._thread.is_alive():
            self.cut()
            self.server.shutdown()
            self._thread.join()
            self.server.hang_up()
            self.server.server_close()

    def close(self) -> None:
        self.collects_late = False
        for collector in self._collectors:
            collector.join()
        with self.changed:
            for plural, namespace, name in list(self.objects):
                if (plural, namespace, name) in self.objects:
                    self.delete(plural, namespace, name, {})
        self.stop_api()

    # -- objects ---------------------------------------------------------------------------------

    def create(self, plural: str, namespace: str, body: Object) -> Object:
        with self.changed:
            metadata = body["metadata"]
            name = metadata["name"]
            if (plural, namespace, name) in self.objects:
                raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
            metadata |= {
                "namespace": namespace,
                "uid": f"uid-{next(self._number)}",
                "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            self._put(plural, "ADDED", body)
            self._reconcile(plural, body)
            return self.objects.get((plural, namespace, name), body)

    def patch(self, plural: str, namespace: str, name: str, body: Object) -> Object:
        with self.changed:
            found = json.loads(json.dumps(self.get(plural, namespace, name)))
            merge(found, body)
            self._put(plural, "MODIFIED", found)
            self._reconcile(plural, found)
            return found

    def get(self, plural: str, namespace: str, name: str) -> Object:
        found = self.objects.get((plural, namespace, name))
        if found is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        return found

    def delete(self, plural: str, namespace: str, name: str, options: Object) -> Object:
        with self.changed:
            found = self.get(plural, namespace, name)
            uid = found["metadata"]["uid"]
            if (options.get("preconditions") or {}).get("uid", uid) != uid:
                raise Refused(409, "Conflict", "the UID in the precondition does not match")
            self._put(plural, "DELETED", found)
            self._end_process(uid)
            for key, other in list(self.objects.items()):
                owners = other["metadata"].get("ownerReferences") or []
                if key in self.objects and any(owner["uid"] == uid for owner in owners):
                    if self.collects_late and key[0] == "pods":
                        self._collectors.append(threading.Timer(0.5, self._collect, key))
                        self._collectors[-1].start()
                    else:
                        self.delete(*key, {})
            for owner in found["metadata"].get("ownerReferences") or []:
                parent = self.objects.get(("statefulsets", namespace, owner["name"]))
                if parent is not None:
                    self._reconcile("statefulsets", parent)
            return found

    def _collect(self, *key: str) -> None:
        with contextlib.suppress(Refused):
            self.delete(*key, {})

    def _put(self, plural: str, event: str, body: Object) -> None:
        version = next(self._number)
        body["metadata"]["resourceVersion"] = str(version)
        key = plural, body["metadata"]["namespace"], body["metadata"]["name"]
        if event == "DELETED":
            del self.objects[key]
        else:
            self.objects[key] = body
        self.events.append((version, plural, event, json.loads(json.dumps(body))))
        self.changed.notify_all()

    # -- controllers -----------------------------------------------------------------------------

    def _reconcile(self, plural: str, body: Object) -> None:
        metadata, spec = body["metadata"], body.get("spec") or {}
        name, namespace = metadata["name"], metadata["namespace"]
        owner = {"name": name, "uid": metadata["uid"]}
        if plural == "monarchmeshes":
            labels = {
                "app.kubernetes.io/name": "monarch-worker",
                "monarch.pytorch.org/mesh-name": name,
            }
            template = json.loads(json.dumps(spec["podTemplate"]))
            pod_labels = template.setdefault("metadata", {}).setdefault("labels", {})
            pod_labels |= labels
            wanted = {
                "metadata": {"name": name, "ownerReferences": [owner]},
                "spec": {"replicas": spec["replicas"], "template": template},
            }
            with contextlib.suppress(Refused):
                self.create("statefulsets", namespace, wanted)
                return
            self.patch("statefulsets", namespace, name, {"spec": wanted["spec"]})
        elif plural == "statefulsets":
            for index in range(spec["replicas"]):
                if ("pods", namespace, f"{name}-{index}") not in self.objects:
                    self._start_pod(namespace, f"{name}-{index}", index, spec["template"], owner)
            for _, _, other in list(self.objects):
                if other.startswith(f"{name}-") and other.rpartition("-")[2].isdigit():
                    surplus = int(other.rpartition("-")[2]) >= spec["replicas"]
                    if surplus and ("pods", namespace, other) in self.objects:
                        self.delete("pods", namespace, other, {})

    # -- pods as processes -----------------------------------------------------------------------

    def _start_pod(
        self, namespace: str, name: str, index: int, template: Object, owner: Object
    ) -> None:
        labels = {**template["metadata"]["labels"], INDEX: str(index)}
        pod = {
            "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
            "spec": template["spec"],
        }
        self.create("pods", namespace, pod)
        container = template["spec"]["containers"][0]
        if container["image"] == "missing":
            waiting = {"reason": "ImagePullBackOff", "message": "no such image: missing"}
            pod = json.loads(json.dumps(self.pod(name, namespace)))
            pod["status"] = {
                "phase": "Pending",
                "containerStatuses": [{"state": {"waiting": waiting}}],
            }
            self._put("pods", "MODIFIED", pod)
            return
        ip = self._free_ip()
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self._processes[pod["metadata"]["uid"]] = subprocess.Popen(
                container["command"],
                env=self._environ(pod, container, ip),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.make_ready(name, ip, namespace)

    def _environ(self, pod: Object, container: Object, ip: str) -> dict[str, str]:
        """Resolve the variables of a container, as a kubelet does."""
        metadata = pod["metadata"]
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            BIND_VARIABLE: ip,
        }
        for name in ("PYTHONPATH", "PYMONARCH_CI_RUN", "TMPDIR"):
            if name in os.environ:
                environ[name] = os.environ[name]
        for variable in container.get("env") or []:
            source = variable.get("valueFrom") or {}
            value = variable.get("value")
            if field := (source.get("fieldRef") or {}).get("fieldPath"):
                label = re.fullmatch(r"metadata\.labels\['(.+)'\]", field)
                value = metadata["labels"][label[1]] if label else metadata[field.split(".")[1]]
            elif key := source.get("secretKeyRef"):
                secret = self.get("secrets", metadata["namespace"], key["name"])
                value = base64.b64decode(secret["data"][key["key"]]).decode()
            environ[variable["name"]] = value
        return environ

    def _free_ip(self) -> str:
        """Return an address of this machine that is used for nothing else."""
        return f"{self._block}.{next(self._last_byte)}"

    def _end_process(self, uid: str) -> None:
        process = self._processes.pop(uid, None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Server(ThreadingHTTPServer):
    daemon_threads = False  # they are joined, so that none outlives a test
    cluster: Cluster
    connections: list[socket.socket]

    def get_request(self) -> tuple[socket.socket, Any]:
        sock, address = super().get_request()
        self.connections.append(sock)
        return sock, address

    def hang_up(self) -> None:
        """Break all connections, those that clients keep open included."""
        for sock in self.connections:
            with contextlib.suppress(OSError):  # it is closed
                sock.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _serve(self) -> None:
        cluster = self.server.cluster
        url = urlparse(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        cluster.requests.append(f"{self.command} {self.path}")
        if cluster.nonsense:
            self._answer(200, b"<html>a proxy's page</html>")
            return
        try:
            found = PATH.fullmatch(url.path)
            served = found is not None and found[2] in PLURALS
            if not served or (found[2] == "monarchmeshes" and not cluster.operator):
                self._answer(404, b"404 page not found\n")
                return
            namespace, plural, name = found.groups()
            verb = "WATCH" if query.get("watch") in ("1", "true", "True") else self.command
            if denied := cluster.denied.get((verb, plural)):
                who = 'User "tester" cannot do that'
                said = denied[2] or f"{plural} is forbidden: {who} in namespace {namespace}"
                raise Refused(*denied[:2], said)
            if verb == "WATCH":
                self._watch(cluster, plural, namespace, query)
                return
            if verb == "GET" and name is None:
                answer = self._list(cluster, plural, namespace, query)
            else:
                with cluster.changed:
                    answer = self._one(cluster, plural, namespace, name, body)
            self._answer(201 if verb == "POST" else 200, json.dumps(answer).encode())
        except Refused as error:
            self._answer(error.status["code"], json.dumps(error.status).encode())

    do_GET = do_POST = do_PATCH = do_DELETE = _serve

    def _one(
        self, cluster: Cluster, plural: str, namespace: str, name: str | None, body: Object
    ) -> Object:
        if self.command == "POST":
            return cluster.create(plural, namespace, body)
        assert name is not None
        if self.command == "PATCH":
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            return cluster.patch(plural, namespace, name, body)
        if self.command == "DELETE":
            return cluster.delete(plural, namespace, name, body)
        return cluster.get(plural, namespace, name)

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _list(self, cluster: Cluster, plural: str, namespace: str, query: dict[str, str]) -> Object:
        with cluster.changed:
            if token := query.get("continue"):
                start, _, version = token.partition("@")
                if int(version) < cluster.expired:
                    raise Refused(410, "Expired", "the continue parameter is too old")
                at, items = cluster._pages[version]
                assert at == int(start)
            else:
                version = str(next(cluster._number))
                items = [
                    found
                    for (kind, where, _), found in sorted(cluster.objects.items())
                    if kind == plural and where == namespace and selected(found, query)
                ]
                items = json.loads(json.dumps(items))
                start = "0"
            end = int(start) + cluster.page
            metadata = {"resourceVersion": version}
            if end < len(items):
                cluster._pages[version] = end, items
                metadata["continue"] = f"{end}@{version}"
            kind = f"{PLURALS[plural]}List"
            return {"kind": kind, "metadata": metadata, "items": items[int(start) : end]}

    def _watch(self, cluster: Cluster, plural: str, namespace: str, query: dict[str, str]) -> None:
        version = int(query["resourceVersion"])
        deadline = time.monotonic() + float(query["timeoutSeconds"])
        cuts = cluster.cuts
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:
                with cluster.changed:
                    if version < cluster.expired:
                        status = Refused(410, "Expired", "too old resource version").status
                        self._chunk({"type": "ERROR", "object": status})
                        break
                    if cluster.cuts != cuts:
                        self.wfile.write(b"40\r\n" + b'{"type": "MODIFIED", "obj')
                        self.close_connection = True
                        return
                    new = [event for event in cluster.events if event[0] > version]
                    if not new:
                        left = deadline - time.monotonic()
                        if left <= 0:
                            break
                        cluster.changed.wait(min(left, 0.2))
                        self._check_peer()
                        continue
                for at, kind, event, found in new:
                    version = at
                    where = found["metadata"]["namespace"]
                    if kind == plural and where == namespace and selected(found, query):
                        self._chunk({"type": event, "object": found})
            self.wfile.write(b"0\r\n\r\n")

    def _check_peer(self) -> None:
        """Raise if the client has closed the connection."""
        self.connection.setblocking(False)
        try:
            if not self.connection.recv(1, socket.MSG_PEEK):
                self.close_connection = True
                raise BrokenPipeError
        except BlockingIOError:
            pass
        finally:
            self.connection.setblocking(True)

    def _chunk(self, event: Object) -> None:
        line = json.dumps(event).encode() + b"\n"
        half = len(line) // 2  # a line may come in parts
        for part in (line[:half], line[half:]):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))


def selected(found: Object, query: dict[str, str]) -> bool:
    labels = found["metadata"].get("labels") or {}
    terms = filter(None, query.get("labelSelector", "").split(","))
    return all(labels.get(term.partition("=")[0]) == term.partition("=")[2] for term in terms)


def merge(found: Object, change: Object) -> None:
    """Apply a JSON merge patch."""
    for name, value in change.items():
        if value is None:
            found.pop(name, None)
        elif isinstance(value, dict) and isinstance(found.get(name), dict):
            merge(found[name], value)
        else:
            found[name] = value
