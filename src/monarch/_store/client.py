"""`QueryEngineClient`: SQL of another process, by HTTP."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
from typing import Any, cast

from monarch._store.query import before_query

__all__ = ["QueryEngineClient"]

_TIMEOUT = 10.0
_GRACE = 5.0  # seconds that the answer may take beyond the time of the query

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class QueryEngineClient:
    """Answers SQL about a job, from the store at `url`, as `JobState.telemetry_url` has it.

    The address contains the key to the store, so treat it as a secret. Proxies of the environment
    are not used.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def __repr__(self) -> str:
        return f"QueryEngineClient({self._url.rpartition('/')[0]}/...)"

    def query(self, sql: str, timeout: float | None = None) -> dict[str, Any]:
        """Return ``{"rows": [...], "columns": [...], "types": [...], "truncated": False}``.

        Args:
            sql: one statement that reads: SELECT, EXPLAIN, SHOW TABLES or DESCRIBE.
            timeout: seconds that the query may take; 10 by default.

        What the script itself has done so far, such as the meshes that it has spawned with all
        their actors, is in the answer; what its processes did arrives within a quarter of a second.
        Each row is a dictionary by column name; there are at most 100,000, and `truncated` says
        whether there are more. Blocks. Raises `urllib.error.HTTPError` for statements that the
        store refuses or cannot execute, whose `reason` is the JSON text ``{"error": "..."}``;
        `urllib.error.URLError` if the store cannot be reached; and RuntimeError if the answer is
        not one of a store.
        """
        for deliver in before_query:
            deliver()
        limit = _TIMEOUT if timeout is None else timeout
        answer = self._post("/api/query", {"sql": sql, "timeout": limit}, limit + _GRACE)
        rows: Any = answer.get("rows")
        if type(rows) is not list or not set(map(type, cast("Any", rows))) <= {dict}:
            raise RuntimeError(f"the answer to {sql!r} has no rows: {str(answer)[:200]}")
        return answer

    def store_pyspy_dump(self, dump_id: str, proc_ref: str, pyspy_result_json: str) -> None:
        """Store stacks of a process in the tables ``pyspy_*``.

        Args:
            dump_id: a name for these stacks, new in the store.
            proc_ref: the process they are from.
            pyspy_result_json: a PySpyResult as the admin API returns it.
        """
        content = {
            "dump_id": dump_id,
            "proc_ref": proc_ref,
            "pyspy_result_json": pyspy_result_json,
        }
        self._post("/api/pyspy_dump", content, _TIMEOUT)

    def _post(self, path: str, content: dict[str, Any], timeout: float) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310 - the address of a store, http only
            self._url + path,
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with _direct.open(request, timeout=timeout) as response:
                answer: Any = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                reason = error.read().decode(errors="replace") or error.reason
            where = self._url.rpartition("/")[0]
            refusal = urllib.error.HTTPError(where, error.code, reason, error.headers, io.BytesIO())
            refusal.close()  # the caller needs the reason only
            raise refusal from None
        if type(answer) is not dict:
            text = f"the answer of {path} is not an object: {str(answer)[:200]}"
            raise RuntimeError(text)
        return cast("dict[str, Any]", answer)
