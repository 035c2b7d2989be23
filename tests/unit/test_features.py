"""A hook is found, or its feature is not installed; a feature that lacks something says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch._engine.base.features import HOOKS, find


@pytest.fixture
def feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a package, in which the hook `mesh_html` belongs to a feature."""
    monkeypatch.setitem(HOOKS, "mesh_html", "package_of_a_test.feature.part:function")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "package_of_a_test"
    folder.mkdir()
    return folder


def test_a_hook_of_a_feature_that_is_not_installed_is_none(feature: Path) -> None:
    assert find("mesh_html") is None


def test_a_feature_that_lacks_a_library_raises_its_error(feature: Path) -> None:
    (feature / "feature").mkdir()
    (feature / "feature" / "part.py").write_text("import library_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="library_that_is_missing"):
        find("mesh_html")
