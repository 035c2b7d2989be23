"""`remotemount`: show a directory of this machine on the hosts of a mesh. See docs/mounts.md."""

from monarch._mounts.remote_mount import MountHandler, remotemount

__all__ = ["MountHandler", "remotemount"]
