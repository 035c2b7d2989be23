"""The session between two hosts, as pure state machines.

`handshake` proves that both sides know the secret, `records` authenticate every byte after it.
`channel` numbers and acknowledges packets, so it survives connections; `lanes` decides which goes
next, and `stream` puts packets on a connection. `detector` decides when a silent host is lost.

In: bytes and times. Out: bytes to send, messages in order, and verdicts.
"""
