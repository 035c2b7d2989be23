"""Checkpoints on disk, written in the background by `torch.distributed.checkpoint`.

One replica group writes. Each of its ranks has a directory of its own, so that no collective is
needed: ``<folder>/step-<version>-<run>-<width>-<mark>/position-<position>``. The name of the run
keeps apart what several trainings have left in one folder, the width says how many positions there
are. The file ``.metadata`` is written last, by a rename; a directory without it is not complete,
and is passed over. The checkpoint counts when those of all positions are complete.

torch is imported when it is needed: the script only looks which checkpoints there are.

The keys of a checkpoint are those of the state dict ("model.0.weight"), so that other programs can
read it. All but tensors is in the entry "rest".
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch import _spi

if TYPE_CHECKING:
    from monarch.training.state import Packed

__all__ = ["Writer", "find_newest", "load", "place"]

_log = logging.getLogger("monarch.training")
_STEP = re.compile(r"step-(\d+)-[0-9a-f]{8}-(\d+)-(\d+)")
_DONE = ".metadata"


def place(folder: str, version: int, mark: int, run: str, width: int) -> str:
    """Return the directory of a checkpoint; `run` is a name of eight hexadecimal digits."""
    return os.path.join(folder, f"step-{version:09}-{run}-{width}-{mark}")


def find_newest(folder: str, width: int) -> tuple[int, str] | None:
    """Return the version and the directory of the newest complete checkpoint, or None.

    Raises ValueError if it is that of groups with another number of ranks.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    steps = [(int(m[1]), int(m[3]), int(m[2]), m[0]) for m in map(_STEP.fullmatch, names) if m]
    for version, _, written, name in sorted(steps, reverse=True):
        path = os.path.join(folder, name)
        if not all(_is_complete(path, position) for position in range(written)):
            continue
        if written != width:
            raise ValueError(
                f"the checkpoint {path} is of groups of width {written}, and this training has "
                f"groups of width {width}: give width={written}, or another folder"
            )
        return version, path
    return None


def _is_complete(path: str, position: int) -> bool:
    return os.path.exists(os.path.join(path, f"position-{position}", _DONE))


def _names(packed: Packed) -> list[str]:
    """Return a name for each tensor: its path in the state dict. No two are equal."""
    from monarch.training.state import unpack

    names = [f"tensor.{index}" for index in range(len(packed.tensors))]
    places = {id(tensor): index for index, tensor in enumerate(packed.tensors)}

    def walk(value: Any, path: str) -> None:
        if id(value) in places:
            names[places[id(value)]] = path
        elif isinstance(value, dict):
            for key, part in value.items():
                walk(part, f"{path}.{key}" if path else str(key))
        elif isinstance(value, (list, tuple)):
            for index, part in enumerate(value):
                walk(part, f"{path}.{index}")

    walk(unpack(packed), "")
    taken: set[str] = {"names", "rest"}
    for index, name in enumerate(names):
        if name in taken:  # as of {"a.b": x, "a": {"b": y}}
            names[index] = f"{name}#{index}"
        taken.add(names[index])
    return names


def _be_quiet() -> None:
    """Let torch not warn that one process writes or reads alone: that is meant.

    The filter stays. To set filters for a while is not safe beside other threads.
    """
    warnings.filterwarnings(
        "ignore", "torch.distributed is disabled", module=r"torch\.distributed\.checkpoint"
    )


class Writer:
    """Writes checkpoints of one rank, one at a time."""

    def __init__(self) -> None:
        self._busy = False

    def write(self, path: str, position: int, packed: Packed, done: Callable[[], None]) -> None:
        """Write a state, whose memory nobody changes, in the background; call `done()` then.

        If the checkpoint before is still being written, this one is left out. A failure to write is
        logged, and training goes on: `done` is not called.
        """
        if self._busy:
            _log.warning("%s is not written: the checkpoint before is not complete", path)
            return
        self._busy = True

        def run() -> None:
            import torch
            import torch.distributed.checkpoint as dcp

            try:
                _be_quiet()
                entries: dict[str, Any] = dict(zip(_names(packed), packed.tensors, strict=True))
                entries["names"] = torch.tensor(list("\n".join(entries).encode()))
                entries["rest"] = torch.tensor(list(packed.rest), dtype=torch.uint8)
                where = os.path.join(path, f"position-{position}")
                dcp.save(entries, checkpoint_id=where, no_dist=True)
                done()
            except Exception as error:
                _log.error("the checkpoint %s was not written: %s", path, error)
            finally:
                self._busy = False

        _spi.start_thread("monarch-training", run)


def load(path: str, position: int) -> Packed:
    """Read a state. Raises what `torch.distributed.checkpoint` raises."""
    import torch
    import torch.distributed.checkpoint as dcp

    from monarch.training.state import Packed

    where = os.path.join(path, f"position-{position}")
    metadata: Any = dcp.FileSystemReader(where).read_metadata()  # of tensors only
    entries: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
    }
    _be_quiet()
    dcp.load(entries, checkpoint_id=where, no_dist=True)
    names = bytes(entries["names"].tolist()).decode().split("\n")
    rest = bytes(entries["rest"].tolist())
    return Packed(rest, [entries[name] for name in names if name])
