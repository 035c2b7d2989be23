"""The meta of a CALL frame: the endpoint's name, the extent of the mesh, perhaps a return port.

Two bytes of length, whose highest bit says whether a return port follows the name; the name; the
return port in eight bytes, if there is one; the extent in all bytes that are left.
"""

from __future__ import annotations

__all__ = ["call_meta", "return_port_of", "route"]

_RETURNS = 0x8000  # bit of the length: a return port follows the name


def call_meta(name: str, extent: bytes, return_port: int = 0) -> bytes:
    """Return the meta of a CALL: the endpoint's name and the extent of the caller's mesh.

    `return_port`: the port that is notified if a message without a reply port cannot be delivered.
    """
    encoded = name.encode()
    if not return_port:
        return len(encoded).to_bytes(2, "little") + encoded + extent
    head = (len(encoded) | _RETURNS).to_bytes(2, "little")
    return head + encoded + return_port.to_bytes(8, "little") + extent


def return_port_of(meta: bytes) -> int:
    """Return the return port in the meta of a CALL; 0 if there is none."""
    length = int.from_bytes(meta[:2], "little")
    if not length & _RETURNS:
        return 0
    end = 2 + (length & ~_RETURNS)
    return int.from_bytes(meta[end : end + 8], "little")


def route(meta: bytes) -> tuple[str, bytes]:
    """Return the endpoint's name and the extent: the inverse of `call_meta`."""
    length = int.from_bytes(meta[:2], "little")
    end = 2 + (length & ~_RETURNS)
    return meta[2:end].decode(), meta[end + 8 * bool(length & _RETURNS) :]
