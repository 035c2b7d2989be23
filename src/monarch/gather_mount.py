"""`gather_mount`: show a directory of each host on this machine. See docs/mounts.md."""

from monarch._mounts.gather import GatherMount, gather_mount

__all__ = ["GatherMount", "gather_mount"]
