"""`BootstrapCommand`."""

from __future__ import annotations

import copy
import pickle

import pytest

from monarch._engine.base.bootstrap_command import BootstrapCommand


@pytest.fixture
def command():
    return BootstrapCommand("py", None, ["-c"], {"A": "1", "B": None})


def test_repr(command):
    assert repr(command) == (
        'BootstrapCommand(program=\'py\', args=["-c"], env={"A": Some("1"), "B": None}, '
        "inherit_env=True)"
    )
    odd = BootstrapCommand("p\"'\\", "x", ["a\"'b\t", "\x01é", "\n\\"], {}, inherit_env=False)
    assert repr(odd) == (
        'BootstrapCommand(program=\'p"\'\\\', args=["a\\"\'b\\t", "\\u{1}é", "\\n\\\\"], env={}, '
        "inherit_env=False)"
    )


def test_attributes_can_be_assigned(command):
    command.program, command.arg0, command.args = "p", "zero", ("a", "b")
    command.env, command.inherit_env = {"C": "3"}, False
    assert (command.program, command.arg0, command.args) == ("p", "zero", ["a", "b"])
    assert (command.env, command.inherit_env) == ({"C": "3"}, False)
    with pytest.raises(AttributeError):
        command.argz = []


def test_args_and_env_are_copies(command):
    command.args.append("x")
    command.env["X"] = "1"
    assert (command.args, command.env) == (["-c"], {"A": "1", "B": None})


def test_with_env_merges_into_a_copy(command):
    merged = command.with_env({"A": None, "C": "3"})
    assert merged.env == {"A": None, "B": None, "C": "3"}
    assert command.env == {"A": "1", "B": None}
    assert (merged.program, merged.args, merged.inherit_env) == ("py", ["-c"], True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("program", 3),
        ("program", None),
        ("arg0", 3),
        ("args", "abc"),
        ("args", [1]),
        ("env", None),
        ("env", {"a": 1}),
        ("env", {1: "a"}),
        ("inherit_env", 1),
    ],
)
def test_wrong_types_are_refused(command, name, value):
    with pytest.raises(TypeError, match=f"argument '{name}'"):
        setattr(command, name, value)
    arguments = {"program": "p", "arg0": None, "args": [], "env": {}, name: value}
    with pytest.raises(TypeError, match=f"argument '{name}'"):
        BootstrapCommand(**arguments)


def test_it_travels(command):
    assert repr(command) == repr(copy.copy(command))
    pytest.importorskip(type(command).__module__, reason="pickles name the reference's path")
    assert repr(command) == repr(pickle.loads(pickle.dumps(command)))
