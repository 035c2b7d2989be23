"""`Kept`: what a function returned, until the client has learnt its pattern and names its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch._tensors.core.metadata import metadata_of
from monarch._tensors.core.template import Operand, Output
from monarch._tensors.worker.argument import GroupArgument, MeshArgument

__all__ = ["Kept"]


class Kept:
    """The results of one call of a function of the program.

    Attributes:
        leaves: the parts of what it returned, in the order of `torch.utils._pytree`.
    """

    def __init__(
        self, returned: Any, given: Sequence[torch.Tensor], written: tuple[int, ...]
    ) -> None:
        leaves, self._spec = pytree.tree_flatten(returned)
        self._given = given
        self._written = written
        self.leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        given: Sequence[torch.Tensor],
    ) -> Kept:
        """Call the function, with `given` in the places of the operands."""
        inputs = [value.detach() for value in given]
        versions = [value._version for value in inputs]

        def local(leaf: Any) -> Any:
            if type(leaf) is Operand:
                return inputs[leaf.index]
            return leaf.resolve() if isinstance(leaf, MeshArgument | GroupArgument) else leaf

        arguments, keywords = pytree.tree_map(local, (args, kwargs))
        with torch.enable_grad():
            returned = function(*arguments, **keywords)
        written = tuple(n for n, value in enumerate(inputs) if value._version != versions[n])
        return cls(returned, inputs, written)

    def pattern(self) -> tuple[list[Output], Any, list[int], tuple[int, ...]]:
        """Return outputs, structure, the leaves that get references, and what was written.

        The structure is what was returned with an `Operand` for each output, in a tuple; None if it
        is the only output.
        """
        storages: dict[int, int] = {}
        for number, value in enumerate(self._given):
            storages.setdefault(value.untyped_storage()._cdata, number)
        outputs: list[Output] = []
        picks: list[int] = []
        shown: list[Any] = []
        for position, leaf in enumerate(self.leaves):
            if not isinstance(leaf, torch.Tensor):
                shown.append(leaf)
                continue
            shown.append(Operand(len(outputs)))
            picks.append(position)
            storage = leaf.untyped_storage()._cdata
            outputs.append(Output(metadata_of(leaf), storages.get(storage)))
            storages.setdefault(storage, -len(outputs))
        alone = len(self.leaves) == 1 and self._spec.is_leaf() and bool(outputs)
        shape = None if alone else (pytree.tree_unflatten(shown, self._spec),)
        return outputs, shape, picks, self._written
