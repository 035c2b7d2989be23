"""Tools around jobs: the commands as functions, and descriptions for schedulers by torchx.

Importing any module of this package needs the standard library only. Functions that hand work to
torchx need the extra ``torchx``, and say so.
"""
