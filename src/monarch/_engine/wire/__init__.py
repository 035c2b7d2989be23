"""Encode messages as frames and payloads as bytes, and decode them. No sockets, clocks or tasks."""
