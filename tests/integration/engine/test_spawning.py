"""Failed starts, constructors, bootstraps and imports raise the right type of error.

The text of the error names the cause and the remedy.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest

from monarch._engine.mesh.meshes.proc_mesh import get_active_proc_meshes
from monarch.actor import (
    Actor,
    ActorError,
    BootstrapCommand,
    SupervisionError,
    default_bootstrap_cmd,
    endpoint,
    this_host,
)
from monarch.config import configured

from .conftest import WAIT, Inside

Fresh = Callable[..., Any]
Program = Callable[[str], str]


class Seen(Actor):
    """An actor that returns what its process inherited from the spawn call."""

    @endpoint
    def environ(self, name: str) -> str | None:
        return os.environ.get(name)

    @endpoint
    def parent(self) -> int:
        return os.getppid()

    @endpoint
    def imports(self, name: str) -> str:
        return str(__import__(name).VALUE)

    @endpoint
    def take(self, value: Any) -> str:
        return repr(value)


# -- commands that do not become procs -----------------------------------------------------------


def command(program: str, *args: str, **env: str) -> BootstrapCommand:
    return BootstrapCommand(program, None, list(args), env)


IMPOSSIBLE = {
    "no such file": (command("/no/such/program"), "No such file"),
    "a folder": (command("/tmp"), "denied"),
    "not executable": (command(__file__), "denied"),
    "a null byte in its name": (command("/bin/tr\0ue"), "null byte"),
    "a null byte in an argument": (command("/bin/true", "a\0b"), "null byte"),
    "a variable that cannot be": (command("/bin/true", **{"A=B": "1"}), "environment variable"),
    "arguments without end": (command("/bin/true", "x" * (3 << 20)), "too long"),
    "a name that cannot be encoded": (command("/bin/\ud800"), "encode"),
}

ENDS_EARLY = {
    "ends at once": (command("/bin/true"), "exit code 0"),
    "fails at once": (command("/bin/false"), "exit code 1"),
    "is killed": (command("/bin/sh", "-c", "kill -9 $$"), "SIGKILL"),
    "has no monarch": (command(sys.executable, "-I", "-S", "-c", "import monarch"), "exit code 1"),
}


@pytest.mark.failures
@pytest.mark.parametrize("case", [*IMPOSSIBLE, *ENDS_EARLY])
def test_a_command_that_becomes_no_proc(fresh: Fresh, case: str) -> None:
    bad, says = {**IMPOSSIBLE, **ENDS_EARLY}[case]
    procs = fresh(2, bootstrap_command=bad)
    with pytest.raises(ValueError, match=f"error creating proc.*{says}"):
        procs.initialized.get(timeout=WAIT)
    with pytest.raises(ValueError, match=f"error creating proc.*{says}"):
        procs.spawn("inside", Inside).pid.call().get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)
    assert fresh(1).initialized.get(timeout=WAIT) is True, "the next spawn is none the worse"


@pytest.mark.failures
@pytest.mark.parametrize("python", ["/no/such/python", "/bin/true", "/tmp"])
def test_a_bad_interpreter(python: str) -> None:
    procs = this_host().with_python_executable(python).spawn_procs()
    with pytest.raises(ValueError, match="error creating proc"):
        procs.initialized.get(timeout=WAIT)
    with pytest.raises(ValueError, match="error creating proc"):
        procs.spawn("inside", Inside).pid.call_one().get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)


@pytest.mark.failures
def test_one_bad_command_among_good_ones(fresh: Fresh) -> None:
    def choose(point: Any) -> BootstrapCommand:
        return command("/no/such/program") if point.rank == 1 else default_bootstrap_cmd()

    procs = fresh(3, bootstrap_command=choose)
    with pytest.raises(ValueError, match="error creating proc"):
        procs.initialized.get(timeout=WAIT)
    inside = procs.spawn("inside", Inside)
    assert inside.slice(gpus=0).pid.call_one().get(timeout=WAIT) > 0
    assert inside.slice(gpus=2).pid.call_one().get(timeout=WAIT) > 0
    with pytest.raises(ValueError, match="error creating proc"):
        inside.slice(gpus=1).pid.call_one().get(timeout=WAIT)


def test_a_proc_of_a_command_ends_without_a_word(program: Program, tmp_path: Any) -> None:
    """The shutdown of the interpreter, which the engine performs, prints no text."""
    said = program(
        """
        os.dup2(1, 2)
        for procs in (
            this_host().spawn_procs(bootstrap_command=default_bootstrap_cmd()),
            this_host().with_python_executable(sys.executable).spawn_procs(),
            this_host().spawn_procs(),
        ):
            assert procs.spawn("echo", Echo).echo.call_one(1).get(timeout=60) == 1
            procs.stop().get(timeout=60)
        """
    )
    assert said == ""


def test_a_class_in_the_table_of_modules_is_no_obstacle(fresh: Fresh, tmp_path: Any) -> None:
    procs = fresh(1)
    odd = procs.spawn("odd", Odd)
    odd.place.call_one(str(tmp_path / "file")).get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)
    assert (tmp_path / "file").read_text() == "finalised"


class Odd(Actor):
    @endpoint
    def place(self, path: str) -> None:
        module = types.ModuleType("first_of_mine")
        exec(
            f"class Last:\n def __del__(self): open({path!r}, 'w').write('finalised')", vars(module)
        )
        vars(module)["last"] = vars(module)["Last"]()
        sys.modules["first_of_mine"] = module
        sys.modules["class_of_mine"] = Odd  # type: ignore[assignment]


def test_finalisers_may_use_libraries_to_the_end(fresh: Fresh, tmp_path: Any) -> None:
    procs = fresh(1)
    reader = procs.spawn("reader", Reader)
    reader.read.call_one(str(tmp_path)).get(timeout=WAIT)
    procs.stop().get(timeout=WAIT)
    assert (tmp_path / "file").read_text() == "finalised"


class Reader(Actor):
    """An actor that keeps a library's object in a module that is older than the library.

    Its finaliser uses the library, so the library must be torn down after it.
    """

    @endpoint
    def read(self, folder: str) -> None:
        mine = sys.modules["second_of_mine"] = types.ModuleType("second_of_mine")
        library = pathlib.Path(folder, "site-packages", "library_of_theirs.py")
        library.parent.mkdir()
        library.write_text(
            "TEXT = 'finalised'\n"
            "class Reading:\n"
            "    def __init__(self, path): self.path = path\n"
            "    def __del__(self): self.path.write_text(TEXT)\n"
        )
        sys.path.append(str(library.parent))
        theirs = importlib.import_module("library_of_theirs")
        vars(mine)["reading"] = theirs.Reading(pathlib.Path(folder, "file"))


# -- bootstrap callables -------------------------------------------------------------------------


class Odder(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} {right}")


def raises_lookup() -> None:
    raise LookupError("from the bootstrap")


async def raises_in_async() -> None:
    raise LookupError("from the bootstrap")


def raises_odder() -> None:
    raise Odder(1, 2)


def leaves() -> None:
    sys.exit(3)


@pytest.mark.failures
@pytest.mark.parametrize(
    ("bootstrap", "says"),
    [
        (raises_lookup, "from the bootstrap"),
        (raises_in_async, "from the bootstrap"),
        (raises_odder, "1 2"),
        (leaves, "SystemExit: 3"),
    ],
)
def test_a_bootstrap_that_raises(fresh: Fresh, bootstrap: Callable[[], Any], says: str) -> None:
    procs = fresh(2, bootstrap=bootstrap)
    for attempt in (
        lambda: procs.initialized,
        lambda: procs.spawn("seen", Seen).parent.call(),
        lambda: procs.slice(gpus=1).spawn("seen", Seen).parent.call_one(),
    ):
        with pytest.raises(ActorError, match=says) as caught:
            attempt().get(timeout=WAIT)
        assert "setup" in str(caught.value)


@pytest.mark.failures
def test_a_bootstrap_that_ends_its_process(fresh: Fresh) -> None:
    def ends() -> None:
        os._exit(4)

    procs = fresh(2, bootstrap=ends)
    with pytest.raises(SupervisionError, match="non-zero code 4"):
        procs.initialized.get(timeout=WAIT)
    with pytest.raises(SupervisionError, match="non-zero code 4"):
        procs.spawn("seen", Seen).parent.call().get(timeout=WAIT)


def test_a_bootstrap_that_cannot_be_sent() -> None:
    """The error is raised by the spawn call itself, and no process is left running."""
    before = get_active_proc_meshes()

    with pytest.raises(TypeError, match="lock"):
        this_host().spawn_procs(bootstrap=threading.Lock().acquire)
    with pytest.raises(TypeError, match="callable"):
        this_host().spawn_procs(bootstrap=3)  # type: ignore[arg-type]
    assert get_active_proc_meshes() == before


# -- constructors --------------------------------------------------------------------------------


class FailsToStart(Actor):
    def __init__(self, how: str) -> None:
        if how == "raise":
            raise ValueError("not with me")
        if how == "exit":
            sys.exit(5)
        if how == "end":
            os._exit(6)
        if how == "import":
            import no_such_module_at_all  # noqa: F401

    @endpoint
    def ping(self) -> None: ...


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("raise", "ValueError: not with me"),
        ("exit", "SystemExit: 5"),
        ("end", "non-zero code 6"),
        ("import", "No module named 'no_such_module_at_all'"),
    ],
)
def test_a_constructor_that_fails(fresh: Fresh, faults: Any, how: str, says: str) -> None:
    procs = fresh(2)
    mesh = procs.spawn("fails", FailsToStart, how)
    for attempt in (mesh.ping.call, mesh.slice(gpus=0).ping.call_one, mesh.ping.call):
        with pytest.raises(SupervisionError, match=says):
            attempt().get(timeout=WAIT)
    assert says in str(faults.get(timeout=WAIT))
    if how != "end":
        assert len(procs.spawn("inside", Inside).pid.call().get(timeout=WAIT)) == 2


# -- imports -------------------------------------------------------------------------------------


def test_a_class_whose_module_exists_only_here(fresh: Fresh, faults: Any) -> None:
    module = types.ModuleType("only_in_the_client")
    exec(
        "from monarch.actor import Actor, endpoint\n"
        "class Lonely(Actor):\n  @endpoint\n  def ping(self): return 1\n"
        "class Value: pass",
        vars(module),
    )
    sys.modules[module.__name__] = module
    try:
        procs = fresh(1)
        with pytest.raises(SupervisionError, match="No module named 'only_in_the_client'"):
            procs.spawn("lonely", module.Lonely).ping.call().get(timeout=WAIT)
        seen = procs.spawn("seen", Seen)
        with pytest.raises(ActorError, match="No module named 'only_in_the_client'") as caught:
            seen.take.call_one(module.Value()).get(timeout=WAIT)
        assert isinstance(caught.value.exception, ModuleNotFoundError)
        assert seen.take.call_one(1).get(timeout=WAIT) == "1"
    finally:
        del sys.modules[module.__name__]
    assert "only_in_the_client" in str(faults.get(timeout=WAIT))


def test_an_import_that_fails_inside_an_endpoint(fresh: Fresh) -> None:
    seen = fresh(1).spawn("seen", Seen)
    with pytest.raises(ActorError, match="no_such_module") as caught:
        seen.imports.call_one("no_such_module").get(timeout=WAIT)
    assert isinstance(caught.value.exception, ModuleNotFoundError)


@pytest.mark.torch
def test_what_optimizers_import_is_shared_by_all_processes(program: Program) -> None:
    pytest.importorskip("torch")
    out = program("""
        import torch, torch._dynamo

        class Loaded(Actor):
            @endpoint
            def dynamo(self): return "torch._dynamo" in sys.modules

        print(this_host().spawn_procs().spawn("loaded", Loaded).dynamo.call_one().get())
    """)
    assert out == "True"


# -- what a process inherits from the spawn call -------------------------------------------------


@pytest.mark.torch
def test_processes_draw_different_random_numbers(program: Program) -> None:
    pytest.importorskip("torch")
    out = program("""
        import random
        import numpy, torch

        class Drawer(Actor):
            @endpoint
            def draw(self): return torch.rand(1).item(), numpy.random.rand(), random.random()

        drawers = this_host().spawn_procs({"gpus": 3}).spawn("drawers", Drawer)
        print([len(set(drawn)) for drawn in zip(*drawers.draw.call().get().values())])
    """)
    assert out == "[3, 3, 3]"


def test_environment_folder_and_path_are_those_of_the_call(
    fresh: Fresh, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    meshes = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "placed_module.py").write_text(f"VALUE = {number}")
        with monkeypatch.context() as patch:
            patch.setenv("PLACED", f"{number} \udcff ä")
            patch.chdir(folder)
            patch.syspath_prepend(str(folder))
            meshes.append(fresh(1).spawn("seen", Seen))
    for number, seen in enumerate(meshes):
        assert seen.environ.call_one("PLACED").get(timeout=WAIT) == f"{number} \udcff ä"
        assert seen.imports.call_one("placed_module").get(timeout=WAIT) == str(number)
    assert len({seen.parent.call_one().get(timeout=WAIT) for seen in meshes}) == 1


def test_variables_read_at_import_take_another_launcher(
    fresh: Fresh, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spawn(threads: str | None) -> tuple[int, str | None]:
        with monkeypatch.context() as patch:
            if threads is None:
                patch.delenv("OMP_NUM_THREADS", raising=False)
            else:
                patch.setenv("OMP_NUM_THREADS", threads)
            seen = fresh(1).spawn("seen", Seen)
        value = seen.environ.call_one("OMP_NUM_THREADS").get(timeout=WAIT)
        return seen.parent.call_one().get(timeout=WAIT), value

    (plain, nothing), (three, says_three), (seven, says_seven) = map(spawn, (None, "3", "7"))
    cores = str(len(os.sched_getaffinity(0)))  # the share of the only process
    assert (nothing, says_three, says_seven) == (cores, "3", "7")
    assert len({plain, three, seven}) == 3
    assert spawn("3")[0] == three
    assert spawn(None)[0] == plain


def test_a_folder_that_is_gone(
    fresh: Fresh, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spawn fails if its working directory is removed before the proc starts.

    The next spawn, in another directory, succeeds.
    """
    gone = tmp_path / "gone"
    gone.mkdir()
    with monkeypatch.context() as patch:
        patch.chdir(gone)
        gone.rmdir()
        with pytest.raises((FileNotFoundError, ValueError), match="No such file"):
            this_host().spawn_procs().initialized.get(timeout=WAIT)
    assert fresh(1).initialized.get(timeout=WAIT) is True


# -- exceeded system limits ----------------------------------------------------------------------


@pytest.mark.failures
def test_more_processes_than_descriptors(program: Program) -> None:
    """A spawn of too many processes fails; earlier procs and later spawns are not affected."""
    said = program(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (320, 320))
        old = this_host().spawn_procs(per_host={"gpus": 2}).spawn("old", Echo)
        old.echo.call(1).get(timeout=60)

        def spawn(count):
            procs = this_host().spawn_procs(per_host={"gpus": count})
            procs.spawn("new", Echo).echo.call(1).get(timeout=60)
            procs.stop().get(timeout=60)

        print(outcome(lambda: spawn(1000)))
        print(outcome(lambda: spawn(200)))
        print(outcome(lambda: spawn(4)))
        print(outcome(lambda: old.echo.call(1).get(timeout=60)))
        """
    ).split()
    assert said[0] in ("OSError", "ValueError")
    assert said[1] in ("OSError", "ValueError")
    assert said[2:] == ["value", "value"]


def test_a_ready_timeout_of_its_own(fresh: Fresh) -> None:
    with configured(host_spawn_ready_timeout="300ms"):
        procs = fresh(1, bootstrap_command=command("/bin/sleep", "1000"))
    with pytest.raises(ValueError, match="host_spawn_ready_timeout"):
        procs.initialized.get(timeout=WAIT)
