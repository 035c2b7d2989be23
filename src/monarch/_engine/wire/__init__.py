"""Encode messages as frames and payloads as bytes, and decode them. No sockets, clocks or tasks.

`frame` is the envelope of every message between processes, and has the kinds of messages. `packet`
is the envelope between two hosts. `codec` turns objects into payloads, with the help of `tensor`
for torch and `bulk` for large `bytes`. `json_message` is for messages of the engine itself.

In: kinds, numbers and objects. Out: bytes and buffers; and the same in the other direction.
"""
