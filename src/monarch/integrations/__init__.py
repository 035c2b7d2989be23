"""Other libraries on meshes, one module or folder for each; each needs the extra of its name.

- `lightning`: a `Trainer` or `Fabric` in the script runs on the processes of a mesh.
- `accelerate`: a function that uses Hugging Face's accelerate, on the processes of a mesh.
- `pytest`: a plugin: meshes as fixtures, tests in the simulator, leaks and failures found.

docs/integrations.md has them at work, and the libraries that need no code of ours.
"""
