"""Addresses of hosts: see `monarch.spmd.network`."""

from __future__ import annotations

from monarch.spmd.network import AddrType, get_ipaddr, get_sockaddr

__all__ = ["AddrType", "get_ipaddr", "get_sockaddr"]
