"""The proc: reactor, links, mailboxes, actor threads; the host agent. The only place that joins time, I/O and protocol."""
