"""How the Ray programs start Ray: one node, and nothing that a benchmark does not use."""

import ray


def start() -> None:
    """Start a local Ray, without dashboard, driver logs and usage reports."""
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2 << 30,
    )
