"""Admission: the check of peers that connect, and the protection of the bytes between hosts.

`handshake_io` carries the first bytes of a connection between hosts: the proof of the secret
(`protocol.session.handshake`), then the purpose. `secret` finds the secret, `host_identity` says
which host a dialer means, `tls` and `authenticated` are sockets whose bytes are protected,
`gateway` leads through one worker to others, `audit` records what was accepted and refused.

In: addresses to dial, and connections that were accepted. Out: sockets whose peer has proved
itself, or an error that says why not. No message of a peer is parsed before its proof.
"""
