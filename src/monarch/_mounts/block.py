"""`Block`: the end of a ``with`` block of a mount."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Block"]


class Block:
    """A mount that its ``with`` block closes. An error of the block hides that of `close`."""

    def close(self) -> None:
        """Unmount. Raises RuntimeError while files are open."""
        raise NotImplementedError

    def _stop(self) -> None:
        """End the processes of the mount, whatever files are open."""
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RuntimeError:
            if error is None:
                raise
            self._stop()  # files that are open keep the mount; the error of the block counts
