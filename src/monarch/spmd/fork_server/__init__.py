"""A process that has imported torch, and forks the ranks of launches.

Importing torch takes seconds, a fork milliseconds. So each host has one such process, with one
thread. It serves launches over a Unix socket in a directory that only this user may enter. A launch
that comes within `keep` seconds of the last one finds the process warm. The facts that libraries
read when they are imported must be the same for all launches of one process, so the name of its
socket is a digest of interpreter, modules and environment.

`server` is the process, `rank` is what a forked child does, `finder` finds or starts the server.
"""
