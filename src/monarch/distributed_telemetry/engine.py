"""`QueryEngine`: SQL about a running program, with results as tables of Arrow."""

from __future__ import annotations

from typing import Any

from monarch._store.client import QueryEngineClient

__all__ = ["QueryEngine"]


class QueryEngine:
    """Answers SQL by the telemetry of a program. May be pickled, and used in other processes.

    Args:
        actor: what answers: a `QueryEngineClient`, or the address of a store
            (`JobState.telemetry_url`).
    """

    def __init__(self, actor: Any) -> None:
        self._client = QueryEngineClient(actor) if isinstance(actor, str) else actor

    def __repr__(self) -> str:
        return f"QueryEngine({self._client!r})"

    def query(self, sql: str) -> Any:
        """Return the answer as a `pyarrow.Table`. Blocks for 10 seconds at most.

        Raises ModuleNotFoundError where pyarrow is not installed, and what
        `QueryEngineClient.query` raises.
        """
        try:
            import pyarrow as pa  # pyright: ignore[reportMissingImports] - not installed for checks
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "QueryEngine.query() returns a pyarrow.Table: pip install pyarrow; or use "
                "QueryEngineClient, whose rows are dictionaries",
                name=error.name,
            ) from None
        answer = self._client.query(sql)
        columns = {name: [row[name] for row in answer["rows"]] for name in answer["columns"]}
        arrow: Any = pa
        return arrow.table(columns)

    def query_stream(self, sql: str) -> Any:
        """Return the answer as a `pyarrow.RecordBatchReader`; see `query`."""
        return self.query(sql).to_reader()
