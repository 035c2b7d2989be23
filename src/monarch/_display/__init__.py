"""How meshes look in notebooks: `html` draws them as grids of their ranks.

In: a mesh, of which only local knowledge is used: drawing neither communicates nor blocks. Out: a
piece of HTML. The engine calls this package by a hook, when a notebook asks a mesh for its picture.
"""
