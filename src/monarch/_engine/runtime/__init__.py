"""The proc: reactor, links, mailboxes, actor threads; and the host agent.

The only place that joins time, I/O and protocol.
"""
