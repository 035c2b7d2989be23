"""The terminal interface: the tree of a job's hosts, processes and actors, kept up to date.

- `client`: requests to the admin API of a script.
- `tree`: what the API answers in, the visible rows of the tree out. Pure.
- `details`: a node in, lines of text out. Pure.
- `checks`: the diagnosis: probes of the API and of the job, and their report. Pure, but for time.
- `words`: the texts of the interface, in English and Chinese.
- `app`: the screen and its keys, by textual.

Only `app` needs the extra ``pymonarch[tui]``; ``monarch tui --diagnose`` works without.
"""
