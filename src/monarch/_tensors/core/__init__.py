"""The pure core of the tensor engine: what a client has to know to issue operations.

It does no input or output, knows no actors, no clocks and no threads, and computes nothing. It has
the metadata of tensors (`metadata`), which of them share a storage and who may use it (`aliases`),
the form of an operation that is the same each time it is issued (`template`), the cache that finds
it (`cache`), and the commands that workers have not confirmed yet (`history`).

In: operations on references, confirmations, failures. Out: commands, and the reference numbers
whose values are lost.
"""
