"""Tensors whose parts live on all processes of a mesh, and the tools of programs that use them.

One script issues the operations of torch. A *core* keeps the books of tensors, streams and errors
and knows no actors; a *client* sends the operations in batches; a *worker* in each process of the
mesh runs them on its own part. These three are in preparation. The modules that need torch alone
are here: gradients one by one (`gradient`), functions with a backward of their own
(`grad_function`), timers, profiles, snapshots of memory, and a model of the time that communication
takes.

The package needs torch (`pymonarch[torch]`), and is imported by the programs that use it only.
"""
