"""Mounts: file systems whose contents are on another host. Linux, with FUSE.

`remote_mount` shows a directory of the script's machine on hosts: `plan` and `tree` (pure) describe
a directory as a table and an address space, `source` reads it, `mounter` shows it on a host, and
`delivery` moves its blocks from host to host. `gather` is the reverse. Both stand on `kernel`, the
FUSE protocol, and `mount_point`.

In: a directory, and hosts. Out: the same directory elsewhere, read-only.
"""
