"""Parts that other libraries need in order to work with meshes, one module or folder for each.

- `monarch.integrations.pytest`: a plugin of pytest; meshes as fixtures, tests in the simulator.

docs/integrations.md describes these, and the libraries that need no code of ours.
"""
