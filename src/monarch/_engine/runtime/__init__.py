"""The runtime of a process: reactor, links, mailboxes, actor threads; and the host agent.

Only this package combines time, I/O and protocol.
"""
