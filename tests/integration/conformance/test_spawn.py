"""Spawning procs: their environment, bootstrap, binding and commands."""

import asyncio
import contextlib
import multiprocessing
import os
import pathlib
import signal
import sys

import pytest

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    context,
    current_rank,
    default_bootstrap_cmd,
    endpoint,
    this_host,
    this_proc,
)

GLOBAL: dict[str, object] = {}


class Probe(Actor):
    @endpoint
    def env(self, name):
        return os.environ.get(name)

    @endpoint
    def environ(self):
        return dict(os.environ)

    @endpoint
    def facts(self):
        import __main__

        return {
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "cwd": str(pathlib.Path.cwd()),
            "argv": sys.argv,
            "path0": sys.path[0],
            "main": __main__.__name__,
            "executable": sys.executable,
            "start method": multiprocessing.get_start_method(allow_none=True),
            "line buffering": sys.stdout.line_buffering,
        }

    @endpoint
    def set_global(self, key, value):
        GLOBAL[key] = value

    @endpoint
    def get_global(self, key):
        return GLOBAL.get(key)

    @endpoint
    def affinity(self):
        return sorted(os.sched_getaffinity(0))


# --- the environment of a proc -------------------------------------------------------------------


def test_procs_are_processes_of_their_own(grid):
    facts = grid.spawn("probe", Probe).facts.call().get().values()
    pids = {f["pid"] for f in facts}
    assert len(pids) == 4
    assert os.getpid() not in pids


def test_environment_and_cwd_are_those_of_the_client(fresh, monkeypatch, tmp_path):
    probe = fresh().spawn("probe", Probe)
    facts = probe.facts.call_one().get()
    assert facts["cwd"] == str(pathlib.Path.cwd())
    assert probe.env.call_one("PATH").get() == os.environ["PATH"]


def test_environment_is_taken_at_the_spawn(fresh, monkeypatch):
    monkeypatch.setenv("SPAWN_TEST_VALUE", "first")
    first = fresh().spawn("probe", Probe)
    assert first.env.call_one("SPAWN_TEST_VALUE").get() == "first"
    monkeypatch.setenv("SPAWN_TEST_VALUE", "second")
    second = fresh().spawn("probe", Probe)
    assert second.env.call_one("SPAWN_TEST_VALUE").get() == "second"
    monkeypatch.delenv("SPAWN_TEST_VALUE")
    third = fresh().spawn("probe", Probe)
    assert third.env.call_one("SPAWN_TEST_VALUE").get() is None
    assert first.env.call_one("SPAWN_TEST_VALUE").get() == "first"


def test_what_a_proc_changes_stays_there(fresh):
    procs = fresh({"gpus": 2})
    mesh = procs.spawn("setter", EnvSetter)
    mesh.set.call().get()
    assert procs.spawn("probe", Probe).env.call("SET_BY_PROC").get().values() == ["0", "1"]
    assert "SET_BY_PROC" not in os.environ


class EnvSetter(Actor):
    @endpoint
    def set(self):
        os.environ["SET_BY_PROC"] = str(current_rank().rank)


def test_variables_that_name_the_process(single):
    environ = single.spawn("probe", Probe).environ.call_one().get()
    assert " @ " in environ["HYPERACTOR_PROCESS_NAME"]
    assert "HYPERACTOR_MESH_BOOTSTRAP_MODE" in environ


def test_python_in_a_proc(single):
    facts = single.spawn("probe", Probe).facts.call_one().get()
    assert facts["main"] == "__main__"
    assert facts["executable"] == sys.executable
    assert len(facts["argv"]) >= 1
    assert facts["line buffering"]
    assert facts["start method"] == ("forkserver" if sys.platform == "linux" else "spawn")


def test_modules_are_imported_once_per_proc(fresh):
    procs = fresh({"gpus": 2})
    first, second = procs.spawn("first", Probe), procs.spawn("second", Probe)
    first.slice(gpus=0).set_global.call_one("key", "of proc 0").get()
    assert second.get_global.call("key").get().values() == ["of proc 0", None]
    assert "key" not in GLOBAL


def test_the_name_labels_the_procs(fresh):
    procs = fresh({"gpus": 2}, name="labelled")
    names = procs.spawn("probe", Probe).env.call("HYPERACTOR_PROCESS_NAME").get().values()
    assert [name.partition(" @ ")[0] for name in names] == ["labelled-0", "labelled-1"]


def test_a_process_pool_in_an_actor(fresh):
    assert fresh().spawn("pool", Pool).square.call_one([1, 2, 3]).get() == [1, 4, 9]


def square(x):
    return x * x


class Pool(Actor):
    @endpoint
    def square(self, values):
        from concurrent.futures import ProcessPoolExecutor

        with ProcessPoolExecutor(1) as pool:
            return list(pool.map(square, values))


class Subprocess(Actor):
    @endpoint
    def run(self):
        import subprocess

        return subprocess.run(
            [sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True, check=True
        ).stdout


def test_a_subprocess_in_an_actor(single):
    assert single.spawn("sub", Subprocess).run.call_one().get() == "42\n"


# --- per_host ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_host", "sizes"),
    [(None, {}), ({}, {}), ({"gpus": 1}, {"gpus": 1}), ({"a": 1, "b": 2}, {"a": 1, "b": 2})],
)
def test_per_host_gives_the_shape(fresh, per_host, sizes):
    procs = fresh(per_host)
    assert procs.sizes == sizes
    mesh = procs.spawn("probe", Probe)
    assert mesh.sizes == sizes
    assert len(mesh.env.call("PATH").get()) == len(procs)


def test_per_host_may_be_positional():
    procs = this_host().spawn_procs({"gpus": 1})
    assert procs.sizes == {"gpus": 1}
    procs.stop().get()


@pytest.mark.parametrize(
    ("per_host", "error"), [({"gpus": "two"}, TypeError), ("gpus", (AttributeError, TypeError))]
)
def test_bad_per_host(per_host, error):
    with pytest.raises(error):
        this_host().spawn_procs(per_host).initialized.get()


@pytest.mark.ours("the reference ends in an internal RuntimeError")
def test_zero_procs_are_refused():
    with pytest.raises(ValueError, match="gpus"):
        this_host().spawn_procs({"gpus": 0}).initialized.get()


def test_several_meshes_of_procs_are_independent(fresh):
    first, second = fresh({"gpus": 1}), fresh({"gpus": 1})
    a, b = first.spawn("probe", Probe), second.spawn("probe", Probe)
    assert a.facts.call().get().values()[0]["pid"] != b.facts.call().get().values()[0]["pid"]
    first.stop().get()
    assert b.env.call("PATH").get().values() == [os.environ["PATH"]]


# --- bootstrap -----------------------------------------------------------------------------------


def set_variable():
    os.environ["SET_BY_BOOTSTRAP"] = str(os.getpid())
    GLOBAL["bootstrapped"] = GLOBAL.get("bootstrapped", 0) + 1


async def set_variable_async():
    await asyncio.sleep(0)
    set_variable()


@pytest.mark.parametrize("bootstrap", [set_variable, set_variable_async])
def test_bootstrap_runs_once_on_each_proc_before_any_actor(fresh, bootstrap):
    procs = fresh({"gpus": 2}, bootstrap=bootstrap)
    early = procs.spawn("early", AtInit)
    for facts in early.facts.call().get().values():
        assert facts["variable at init"] == str(facts["pid"])
    probe = procs.spawn("probe", Probe)
    assert probe.get_global.call("bootstrapped").get().values() == [1, 1]
    assert "SET_BY_BOOTSTRAP" not in os.environ


class AtInit(Actor):
    def __init__(self):
        self.variable = os.environ.get("SET_BY_BOOTSTRAP")

    @endpoint
    def facts(self):
        return {"variable at init": self.variable, "pid": os.getpid()}


def test_bootstrap_may_be_a_closure_with_context(fresh):
    port, receiver = Channel.open()

    def bootstrap():
        port.send((current_rank().rank, context().actor_instance.name, this_proc().size()))

    fresh({"gpus": 2}, bootstrap=bootstrap).initialized.get()
    seen = sorted(receiver.recv().get() for _ in range(2))
    assert [rank for rank, _, _ in seen] == [0, 1]
    assert {name for _, name, _ in seen} == {"setup"}


def failing_bootstrap():
    raise OSError("bootstrap went wrong")


async def failing_bootstrap_async():
    raise OSError("bootstrap went wrong")


@pytest.mark.parametrize("bootstrap", [failing_bootstrap, failing_bootstrap_async])
def test_a_failing_bootstrap_fails_initialized_and_every_call(bootstrap):
    procs = this_host().spawn_procs(bootstrap=bootstrap)
    with pytest.raises(ActorError, match="bootstrap went wrong") as caught:
        procs.initialized.get()
    assert isinstance(caught.value.exception, OSError)
    assert "setup" in caught.value.message
    with pytest.raises(ActorError, match="bootstrap went wrong"):
        procs.spawn("probe", Probe).env.call_one("PATH").get()
    with contextlib.suppress(ActorError):  # the reference raises the error again
        procs.stop().get()


# --- proc_bind -----------------------------------------------------------------------------------


def test_proc_bind_needs_one_entry_per_proc():
    with pytest.raises(ValueError, match="proc_bind"):
        this_host().spawn_procs({"gpus": 2}, proc_bind=[{"cpus": "0"}])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_proc_bind_cpus(fresh):
    cpus = sorted(os.sched_getaffinity(0))[:2]
    procs = fresh({"gpus": len(cpus)}, proc_bind=[{"cpus": str(cpu)} for cpu in cpus])
    affinity = procs.spawn("probe", Probe).affinity.call().get().values()
    assert affinity == [[cpu] for cpu in cpus]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_proc_bind_ignores_unknown_keys(fresh):
    procs = fresh(proc_bind=[{"colour": "blue"}])
    affinity = procs.spawn("probe", Probe).affinity.call_one().get()
    assert affinity == sorted(os.sched_getaffinity(0))


# --- BootstrapCommand ----------------------------------------------------------------------------


def test_the_default_command():
    command = default_bootstrap_cmd()
    assert isinstance(command, BootstrapCommand)
    assert command.program == sys.executable
    assert command.args == ["-m", "monarch._src.actor.bootstrap_main"]
    assert command.env == {}
    assert command.inherit_env is True


def test_bootstrap_command_is_a_record():
    command = BootstrapCommand("py", None, ["-c"], {"A": "1", "B": None})
    assert command.program == "py"
    assert command.arg0 is None
    assert command.args == ["-c"]
    assert command.env == {"A": "1", "B": None}
    assert command.inherit_env is True
    assert "program='py'" in repr(command)
    command.program = "other"
    command.env = {"C": "3"}
    command.inherit_env = False
    assert (command.program, command.env, command.inherit_env) == ("other", {"C": "3"}, False)


def test_with_env_merges_into_a_copy():
    command = BootstrapCommand("py", None, ["-c"], {"A": "1", "B": "2"})
    merged = command.with_env({"B": "3", "C": None})
    assert merged.env == {"A": "1", "B": "3", "C": None}
    assert command.env == {"A": "1", "B": "2"}


def test_a_command_with_an_environment(fresh, monkeypatch):
    monkeypatch.setenv("REMOVED_BY_COMMAND", "here")
    monkeypatch.setenv("REPLACED_BY_COMMAND", "old")
    command = default_bootstrap_cmd().with_env(
        {"ADDED": "yes", "REPLACED_BY_COMMAND": "new", "REMOVED_BY_COMMAND": None}
    )
    environ = fresh(bootstrap_command=command).spawn("probe", Probe).environ.call_one().get()
    assert environ["ADDED"] == "yes"
    assert environ["REPLACED_BY_COMMAND"] == "new"
    assert "REMOVED_BY_COMMAND" not in environ
    assert environ["PATH"] == os.environ["PATH"]
    plain = fresh().spawn("probe", Probe).environ.call_one().get()
    assert "ADDED" not in plain


def test_a_command_that_starts_from_an_empty_environment(fresh, monkeypatch):
    monkeypatch.setenv("NOT_INHERITED", "here")
    command = default_bootstrap_cmd()
    command.inherit_env = False
    command.env = {"PATH": "/usr/bin:/bin"}
    if "PYTHONPATH" in os.environ:  # so that the command finds the package under test
        command.env |= {"PYTHONPATH": os.environ["PYTHONPATH"]}
    environ = fresh(bootstrap_command=command).spawn("probe", Probe).environ.call_one().get()
    assert "NOT_INHERITED" not in environ
    assert environ["PATH"] == "/usr/bin:/bin"


def test_a_command_for_each_proc(fresh):
    asked = []

    def command(point):
        asked.append(point.rank)
        return default_bootstrap_cmd().with_env({"MY_POINT": f"{point['a']}{point['b']}"})

    procs = fresh({"a": 2, "b": 1}, bootstrap_command=command)
    values = procs.spawn("probe", Probe).env.call("MY_POINT").get().values()
    assert values == ["00", "10"]
    assert sorted(asked) == [0, 1]


def test_a_wrapper_program(fresh, tmp_path):
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\nexport WRAPPED=yes\nexec "$@"\n')
    wrapper.chmod(0o755)
    default = default_bootstrap_cmd()
    command = BootstrapCommand(str(wrapper), None, [default.program, *default.args], {})
    probe = fresh(bootstrap_command=command).spawn("probe", Probe)
    assert probe.env.call_one("WRAPPED").get() == "yes"


@pytest.mark.failures
def test_a_bad_program_fails_initialized():
    command = BootstrapCommand("/no/such/program", None, [], {})
    procs = this_host().spawn_procs(bootstrap_command=command)
    with pytest.raises(ValueError, match="error creating proc"):
        procs.initialized.get()
    with pytest.raises((ValueError, RuntimeError)):
        procs.spawn("probe", Probe).env.call_one("PATH").get()


@pytest.mark.failures
def test_with_python_executable(tmp_path):
    python = tmp_path / "mypython"
    python.write_text(f'#!/bin/sh\nexport THROUGH=mine\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    hosts = this_host().with_python_executable(str(python))
    procs = hosts.spawn_procs({"gpus": 1})
    probe = procs.spawn("probe", Probe)
    assert probe.env.call("THROUGH").get().values() == ["mine"]
    child = procs.spawn("nested", SpawnsProcs)
    assert child.env_of_child.call("THROUGH").get().values() == ["mine"]
    procs.stop().get()
    plain = this_host().spawn_procs()
    assert plain.spawn("probe", Probe).env.call_one("THROUGH").get() is None
    plain.stop().get()


class SpawnsProcs(Actor):
    @endpoint
    def env_of_child(self, name):
        procs = this_host().spawn_procs()
        value = procs.spawn("probe", Probe).env.call_one(name).get()
        procs.stop().get()
        return value


# --- the exit of procs ---------------------------------------------------------------------------


def test_python_finalises_when_procs_stop(tmp_path):
    procs = this_host().spawn_procs({"gpus": 2})
    procs.spawn("at_exit", AtExit).register.call(str(tmp_path)).get()
    procs.stop().get()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exit-0", "exit-1"]


class AtExit(Actor):
    @endpoint
    def register(self, folder):
        import atexit

        atexit.register((pathlib.Path(folder) / f"exit-{current_rank().rank}").touch)


@pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")
def test_stopping_leaves_no_process_behind(fresh):
    def children():
        return {
            int(pid)
            for path in pathlib.Path("/proc/self/task").glob("*/children")
            for pid in path.read_text().split()
        }

    fresh().initialized.get()  # starts the processes that the runtime keeps
    before = children()
    procs = fresh({"gpus": 4})
    everyone = procs.spawn("probe", Probe).facts.call().get().values()
    procs.stop().get()
    assert children() <= before
    for facts in everyone:
        with pytest.raises(ProcessLookupError):
            os.kill(facts["pid"], 0)


def test_procs_die_with_a_killed_client(program, tmp_path):
    done = program(
        """
        import os, signal
        from monarch.actor import Actor, endpoint, this_host

        class Pid(Actor):
            @endpoint
            def pid(self):
                return os.getpid()

        procs = this_host().spawn_procs({"gpus": 2})
        print(*procs.spawn("pid", Pid).pid.call().get().values(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    for pid in map(int, done.stdout.split()):
        _wait_for_death(pid)


def _wait_for_death(pid):
    import select

    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        readable, _, _ = select.select([fd], [], [], 30)
        assert readable, f"process {pid} still lives"
    finally:
        os.close(fd)


def test_a_program_ends_well_without_stopping_its_procs(program):
    done = program(
        """
        import os
        from monarch.actor import Actor, endpoint, this_host

        class Pid(Actor):
            @endpoint
            def pid(self):
                return os.getpid()

        procs = this_host().spawn_procs({"gpus": 2})
        print(*procs.spawn("pid", Pid).pid.call().get().values(), flush=True)
        """
    )
    for pid in map(int, done.stdout.split()):
        _wait_for_death(pid)


@pytest.mark.parametrize(
    ("ending", "code"),
    [("raise SystemExit(5)", 5), ("raise ValueError('uncaught')", 1), ("", 0)],
)
def test_the_exit_code_is_that_of_the_program(program, ending, code):
    done = program(
        f"""
        from monarch.actor import Actor, endpoint, this_host

        class Echo(Actor):
            @endpoint
            def echo(self, x):
                return x

        procs = this_host().spawn_procs()
        print(procs.spawn("echo", Echo).echo.call_one("ok").get())
        {ending}
        """,
        check=False,
    )
    assert done.stdout == "ok\n"
    assert done.returncode == code


def test_an_uncaught_actor_error_ends_the_program_with_1(program):
    done = program(
        """
        from monarch.actor import Actor, endpoint, this_host

        class Bad(Actor):
            @endpoint
            def boom(self):
                raise ValueError("the reason")

        procs = this_host().spawn_procs()
        procs.spawn("bad", Bad).boom.call_one().get()
        """,
        check=False,
    )
    assert done.returncode == 1
    assert "the reason" in done.stderr
    assert "ActorError" in done.stderr
    assert "prog.py" in done.stderr
