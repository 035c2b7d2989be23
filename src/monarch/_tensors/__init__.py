"""Tensors whose parts live on all processes of a mesh, and the tools of programs that use them.

One script issues the operations of torch, as ordinary torch code. The parts, from the bottom:

* `core` keeps the books: metadata, storages and rights, operations and their commands, failures. It
  knows no actors, sockets, clocks or threads.
* `worker` executes commands in each process of the mesh.
* The client: `tensor` and `stream` are what programs see, `dispatch` issues an operation, with what
  `propagate` finds out about its result, `engine` sends commands in batches and takes the
  confirmations, `mesh` activates a mesh, and `fetch`, `reduction`, `transfer`, `borrow`,
  `coalescing`, `recording` and `remote` are further operations.
* `simulator` takes the place of the workers, and estimates time and memory.
* Modules that need torch alone: gradients one by one (`gradient`), functions with a backward of
  their own (`grad_function`), timers, profiles, snapshots of memory, and a model of the time that
  communication takes.

The package needs torch (`pymonarch[torch]`), and only programs that use it import it.
"""
