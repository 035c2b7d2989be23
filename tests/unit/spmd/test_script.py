"""Scripts run as ``__main__``, see their own arguments, and leave no trace in the process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monarch.spmd.script import run_script

SCRIPT = """
import sys
from beside import NAME
assert __name__ == "__main__"
print(NAME, sys.argv[1:])
if sys.argv[1:]:
    sys.exit(eval(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "beside.py").write_text("NAME = 'beside'\n")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "beside", raising=False)


@pytest.mark.parametrize("status", [[], ["0"], ["None"]])
def test_normal_ends(script: str, status: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    before = (list(sys.argv), list(sys.path), sys.modules["__main__"])
    run_script([script, *status])
    assert capsys.readouterr().out == f"beside {status}\n"
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_a_module(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(script).parent)
    run_script(["-m", "script"])


@pytest.mark.parametrize(("status", "text"), [("3", "status 3"), ("'no'", "status no")])
def test_another_status_is_an_error(script: str, status: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        run_script([script, status])


def test_errors_of_the_call() -> None:
    for words in ([], ["-m"]):
        with pytest.raises(ValueError, match="No script or module specified"):
            run_script(words)
    with pytest.raises(FileNotFoundError, match=r"absent\.py"):
        run_script(["absent.py"])
