"""A job that is named by its module: the advice when the module is not found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from monarch.job.current import job_of


@pytest.mark.parametrize("is_searched", [False, True])
def test_only_a_directory_that_is_not_searched_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_searched: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    here = [str(tmp_path)] if is_searched else []
    monkeypatch.setattr(sys, "path", here + [each for each in sys.path if each != str(tmp_path)])
    with pytest.raises(ModuleNotFoundError) as caught:
        job_of("no_such_module_of_jobs.job")
    assert caught.value.name == "no_such_module_of_jobs"
    assert ("chmod o-w" in str(caught.value)) is not is_searched
