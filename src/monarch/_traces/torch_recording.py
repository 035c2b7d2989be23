"""torch's profiler in a process that runs, for some seconds: what all its threads compute.

It needs a process that has imported torch. The trace is a file of this process until it is fetched,
in parts. torch profiles once at a time, so it fails while the program uses the profiler itself.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import threading
from typing import Any

__all__ = ["TorchRecording", "has_torch"]

_PART = 4 << 20  # bytes


def has_torch() -> bool:
    """Whether this process has imported torch."""
    return "torch" in sys.modules


class TorchRecording:
    """A recording of this process, which ends by itself; `run` is the body of its thread.

    Args:
        seconds: for how long.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._path = ""
        self._fault = ""

    @property
    def ended(self) -> bool:
        """Whether it no longer records."""
        return self._ended.is_set()

    def stop(self) -> None:
        """End it now."""
        self._stopped.set()

    def run(self) -> None:
        """Record until the time is over, and write the trace."""
        try:
            self._record()
        except Exception as error:  # of torch, whatever it is: the command reports it
            self._fault = f"{type(error).__name__}: {error}"
        finally:
            self._ended.set()

    def _record(self) -> None:
        torch: Any = sys.modules["torch"]
        profiler: Any = importlib.import_module("torch.profiler")
        kinds = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            kinds.append(profiler.ProfilerActivity.CUDA)
        # Without it, only what the profiler's own thread computes would be recorded.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        profile = profiler.profile(activities=kinds, experimental_config=config)
        profile.start()
        try:
            self._stopped.wait(self._seconds)
        finally:
            profile.stop()
        handle, self._path = tempfile.mkstemp(prefix="monarch-torch-", suffix=".json")
        os.close(handle)
        profile.export_chrome_trace(self._path)

    def size(self) -> int:
        """Return the bytes of the trace, once it is complete. Raises RuntimeError if it failed."""
        self._ended.wait()
        if self._fault:
            raise RuntimeError(f"torch's profiler failed: {self._fault}")
        return os.path.getsize(self._path)

    def part(self, offset: int) -> bytes:
        """Return the next bytes of the trace."""
        with open(self._path, "rb") as file:
            file.seek(offset)
            return file.read(_PART)

    def close(self) -> None:
        """End, and remove the file."""
        self._stopped.set()
        self._ended.wait()
        if self._path:
            os.unlink(self._path)
            self._path = ""
