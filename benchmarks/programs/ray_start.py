"""How the Ray programs start Ray: one node, without the services that no benchmark uses."""

import ray


def start() -> None:
    """Start a local Ray, without dashboard, driver logs and usage reports."""
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=2 << 30,
    )
