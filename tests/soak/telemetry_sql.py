"""`python tests/soak/telemetry_sql.py [MESSAGES]`: SQL over many recorded messages.

A million messages (or as many as given) of 16 actors and 5 endpoints, a tenth of them sent by
actors, are put into a store, as the
processes of a job would send them. Then each query is run five times. Printed are the time to store
them, for a message, the bytes that one takes on its way, the memory of the process, and the median
time of each query.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from monarch._store.store import Store
from monarch._telemetry.kinds import BatchReader, encode

BATCH = 1000
QUERIES = {
    "messages by endpoint": """
        SELECT endpoint, count(*) AS n FROM messages GROUP BY endpoint ORDER BY n DESC""",
    "the last messages": "SELECT * FROM messages ORDER BY timestamp_us DESC LIMIT 20",
    "steps by status": "SELECT status, count(*) FROM message_status_events GROUP BY status",
    "the latest state of each actor": """
        SELECT full_name, new_status FROM (
            SELECT a.full_name, e.new_status, row_number() OVER (
                PARTITION BY e.actor_id ORDER BY e.timestamp_us DESC) AS place
            FROM actor_status_events e JOIN actors a ON a.id = e.actor_id)
        WHERE place = 1""",
    "messages by receiver": """
        SELECT a.full_name, count(*) AS n FROM messages m JOIN actors a ON a.id = m.to_actor_id
        GROUP BY a.full_name ORDER BY n DESC""",
    "messages by sender and receiver": """
        SELECT from_actor_id, to_actor_id, count(*) FROM messages GROUP BY 1, 2""",
    "seconds in each endpoint": """
        SELECT m.endpoint, avg(e.timestamp_us - b.timestamp_us) / 1e6 AS seconds
        FROM messages m
        JOIN message_status_events b ON b.message_id = m.id AND b.status = 'active'
        JOIN message_status_events e ON e.message_id = m.id AND e.status = 'complete'
        GROUP BY 1""",
    "failed messages": """
        SELECT m.endpoint, count(*) FROM message_status_events e JOIN messages m
        ON m.id = e.message_id WHERE e.status = 'failed' GROUP BY 1""",
    "rate by second": """
        SELECT timestamp_us // 1000000 AS second, count(*) FROM messages GROUP BY 1 ORDER BY 1""",
    "spans by name": "SELECT name, count(*) FROM spans GROUP BY name",
}


def main() -> None:
    total = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    store = Store(1 << 30, 0.0)
    choose = random.Random(1)
    reader = BatchReader()

    def put(kind: str, columns: list[list[object]]) -> int:
        data = encode(kind, columns, 7, "p@host:1", 0)
        for batch in reader.feed(data):
            store.put(batch)
        return len(data)

    for rank in range(16):
        put("actor", [[100 + rank], [1], [200], [rank], [f"trainers.p{rank}"], [""], [0]])
        put("state", [[300 + rank], [2], [100 + rank], ["Idle"], [""]])
    size = 0
    began = time.perf_counter()
    for start in range(0, total, BATCH):
        count = min(BATCH, total - start)
        numbers = list(range(start, start + count))
        when = [1_700_000_000_000_000 + 20 * number for number in numbers]
        actor = [100 + choose.randrange(16) for _ in numbers]
        name = [f"endpoint{choose.randrange(5)}" for _ in numbers]
        failed = [int(choose.random() < 0.001) for _ in numbers]
        size += put(
            "message",
            [
                *([number + 1 for number in numbers], actor, [200] * count, [7] * count),
                *([70] * count, [number + 5 for number in numbers], name),
                *(when, [at + 5 for at in when], [at + 15 for at in when], failed),
            ],
        )
        by_actor = [int(number % 10 == 0) for number in numbers]
        ids = [(1 << 40) + number for number in numbers]
        size += put(
            "send",
            [
                *(ids, when, [7] * count, [71] * count, [200] * count, ["{}"] * count),
                *(["{}"] * count, [number + 5 for number in numbers], name, by_actor, [0] * count),
            ],
        )
    store.query("SELECT 1 FROM messages LIMIT 1", timeout=600)
    spent = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{store.engine}: {total:,} messages, {1e6 * spent / total:.2f} us each with their making"
    )
    print(f"{size / total:.0f} bytes a message on its way, {memory:,.0f} MiB resident in the end")
    for name_, sql in QUERIES.items():
        times: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            rows = len(store.query(sql, timeout=600).rows)
            times.append(time.perf_counter() - began)
        print(f"{1000 * statistics.median(times):8.1f} ms  {name_} ({rows} rows)")
    store.close()


if __name__ == "__main__":
    main()
