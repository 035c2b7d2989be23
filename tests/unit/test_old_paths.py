"""Each old import path gives the object from its new home, or an error that names a replacement."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import runpy
import subprocess
import sys
import types
import warnings
from operator import attrgetter

import pytest

import monarch
from monarch import _compat

without_torch = importlib.util.find_spec("torch") is None


def served(module: str) -> dict[str, str]:
    """Return the homes of the names of a module; without torch those that do not need it."""
    return {
        name: home
        for name, home in _compat.homes(module).items()
        if not (without_torch and home.startswith("monarch._tensors"))
    }


def load(module: str) -> types.ModuleType:
    with warnings.catch_warnings():
        if module in _compat.DEPRECATED:
            warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module(module)


def is_where_it_claims(thing: object) -> bool:
    if not isinstance(thing, type):
        return True
    claimed = load(thing.__module__)
    return (
        getattr(claimed, thing.__qualname__) is thing and pickle.loads(pickle.dumps(thing)) is thing
    )


@pytest.mark.parametrize("module", _compat.PATHS)
def test_old_paths_give_the_objects_in_their_homes(module: str) -> None:
    others = []
    for name, place in served(module).items():
        home, _, attribute = place.partition(":")
        thing = attrgetter(attribute)(importlib.import_module(home))
        if getattr(load(module), name) != thing:
            others.append(name)
    assert others == []


@pytest.mark.parametrize("module", _compat.PATHS)
def test_classes_are_found_where_they_claim_to_live(module: str) -> None:
    loaded = load(module)
    assert [name for name in served(module) if not is_where_it_claims(getattr(loaded, name))] == []


@pytest.mark.parametrize("module", [name for name in _compat.PATHS if name not in _compat.SAME])
def test_a_class_is_looked_up_once_where_pickles_find_it(module: str) -> None:
    """Other objects are looked up each time: their home may replace them."""
    loaded = load(module)
    things = {name: getattr(loaded, name) for name in served(module)}
    claiming = {
        name for name, thing in things.items() if getattr(thing, "__module__", None) == module
    }
    assert things.keys() & vars(loaded).keys() == claiming


@pytest.mark.parametrize("module", _compat.INTERNAL)
def test_internals_say_what_to_use_instead(module: str) -> None:
    load(module)  # the alias has given its warning now
    for name in _compat.advice(module):
        with pytest.raises(ImportError, match=f"{name} has no counterpart in pymonarch: ."):
            exec(f"from {module} import {name}")


@pytest.mark.parametrize("module", _compat.INTERNAL_MODULES)
def test_internal_modules_say_what_to_use_instead(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"{module} has no counterpart in pymonarch: ."):
        importlib.import_module(f"{module}.anything")
    package, _, name = module.rpartition(".")
    if package in _compat.PACKAGES:
        with pytest.raises(ModuleNotFoundError, match=r"has no counterpart in pymonarch: ."):
            exec(f"from {package} import {name}")


@pytest.mark.parametrize("module", sorted(_compat.PACKAGES))
def test_folders_are_packages_whose_modules_are_attributes(module: str) -> None:
    below = {
        path.removeprefix(f"{module}.").partition(".")[0]
        for path in (*_compat.PATHS, *_compat.SAME)
        if path.startswith(f"{module}.")
    }
    package = load(module)

    assert package.__path__ == []
    for name in sorted(below):
        home = _compat.SAME.get(f"{module}.{name}", "")
        if without_torch and home.startswith("monarch._tensors"):
            continue
        assert getattr(package, name) is sys.modules[f"{module}.{name}"]


@pytest.mark.parametrize(("old", "home"), _compat.SAME.items())
def test_modules_with_switches_are_the_module_itself(old: str, home: str) -> None:
    if without_torch and home.startswith("monarch._tensors"):
        pytest.skip("needs torch")
    module, _, attribute = home.partition(":")
    meant = importlib.import_module(module)
    if attribute:
        meant = getattr(meant, attribute)
    assert importlib.import_module(old) is meant


@pytest.mark.parametrize(("alias", "instead"), _compat.DEPRECATED.items())
def test_deprecated_aliases_warn_at_the_import(alias: str, instead: tuple[str, str]) -> None:
    sys.modules.pop(alias, None)
    text = rf"^{alias} is deprecated, please import from {instead[1]} instead\.$"
    with pytest.warns(DeprecationWarning, match=text) as caught:
        exec(f"import {alias}", {"__name__": "__main__"})

    assert _compat.PATHS[instead[0]] is _compat.PATHS[alias]
    assert caught[0].filename == "<string>"


@pytest.mark.parametrize("name", ["x", "__wrapped__", "_repr_html_"])
def test_unknown_names_are_attribute_errors(name: str) -> None:
    from monarch._src.actor import actor_mesh

    with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
        getattr(actor_mesh, name)


def test_unknown_modules_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'monarch\._src\.nothing'"):
        importlib.import_module("monarch._src.nothing")


def test_homes_are_looked_up_at_each_access(monkeypatch: pytest.MonkeyPatch) -> None:
    import monarch.actor
    from monarch._src.actor import supervision

    def hook(failure: object) -> None:
        """Stand in for a program's own."""

    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", hook)

    assert hook is supervision.unhandled_fault_hook


def test_dir_lists_what_is_served() -> None:
    from monarch._src.actor import concurrent

    assert dir(concurrent) == ["_explicit_response_signature", "concurrent_endpoint"]


@pytest.mark.parametrize("module", _compat.PROGRAMS)
def test_bootstrap_runs_as_a_program(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = types.ModuleType(_compat.PROGRAMS[module])
    home.main = lambda: f"ran as {sys.argv[1:]}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "argv", ["ignored", "argument"])

    with pytest.raises(SystemExit, match=r"ran as \['argument'\]"):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def test_other_old_modules_are_no_programs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "monarch._src.actor.shape"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert done.returncode == 1
    assert "No code object available for monarch._src.actor.shape" in done.stderr


def test_the_finder_is_asked_last_and_installed_once() -> None:
    ours = [finder for finder in sys.meta_path if isinstance(finder, _compat._OldPaths)]
    importlib.reload(monarch)

    assert len(ours) == 1
    assert ours == [finder for finder in sys.meta_path if isinstance(finder, _compat._OldPaths)]


def test_real_modules_win() -> None:
    assert monarch.config.__spec__ is not None
    assert not isinstance(monarch.config.__spec__.loader, _compat._OldPaths)
    assert _compat.PATHS.keys().isdisjoint({"monarch.actor", "monarch.config"})


@pytest.mark.parametrize(
    "statement",
    [
        "from monarch import grad_generator",
        "from monarch.gradient import GradientGenerator",
        "from monarch import timer; timer.ExecutionTimer",
        "from monarch.simulator.communication_model import NetworkConfig",
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    statement: str,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {statement}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert re.search(
        r"ImportError: .* needs torch, .*: pip install 'pymonarch\[torch\]'", done.stderr
    )


def test_importing_an_old_path_loads_no_home() -> None:
    program = "import sys, monarch._src.actor.actor_mesh\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )

    assert {"monarch.actor", "monarch._engine"}.isdisjoint(done.stdout.split())
