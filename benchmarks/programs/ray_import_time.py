"""Ray: its import in fresh interpreters."""

from import_time import import_once
from timing import emit, rounds

if __name__ == "__main__":
    import_once("ray")  # writes the byte code and fills the page cache
    emit(seconds=[import_once("ray") for _ in rounds(at_least=3)])
