"""Programs with distributed tensors, as they are written for the reference."""

import importlib
import json
import logging
import traceback
from typing import ClassVar

import pytest

pytest.importorskip("torch")

import torch

from monarch import inspect, remote, set_meta
from monarch.builtins import log
from monarch.opaque_module import OpaqueModule
from monarch.opaque_object import OpaqueObject
from monarch.simulator.ir import Command, IRGraph
from monarch.simulator.task import Borrow, EventTask, Task, TaskState

pytestmark = pytest.mark.torch


# -- modules and objects in the processes ----------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(3, width)
        torch.nn.init.constant_(self.linear.weight, 0.5)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return self.linear(x)

    def scaled(self, x, *, factor):
        return {"y": self.linear(x) * factor}


class Total:
    def __init__(self):
        self.value = 0.0

    def add(self, x):
        self.value = self.value + x
        return self.value


def test_the_propagator_of_a_module_gets_the_module_first(pair):
    with pair.activate():
        layer = OpaqueModule(Layer, 2)
        x = torch.ones(4, 3, requires_grad=True)
        y = layer(x, propagator=lambda self, x: x.new_empty(len(x), 2))
        y.sum().backward()
        assert inspect(y.detach()).tolist() == [[1.5, 1.5]] * 4
        assert inspect(x.grad).tolist() == [[1.0, 1.0, 1.0]] * 4
        assert inspect(layer.parameters()[0].grad).tolist() == [[4.0, 4.0, 4.0]] * 2


def test_the_propagator_of_a_method_gets_the_module_first(pair):
    seen = []

    def shape(self, x, *, factor):
        seen.append(factor)
        return {"y": x.new_empty(len(x), 2)}

    with pair.activate():
        layer = OpaqueModule(Layer, 2)
        result = layer.call_method("scaled", shape, torch.ones(1, 3), factor=2.0)
        assert inspect(result["y"].detach()).tolist() == [[3.0, 3.0]]
    assert seen == [2.0]


def test_the_propagation_of_an_objects_method_gets_the_object_first(pair):
    seen = []

    def shape(self, x):
        seen.append(self)
        return torch.empty_like(x)

    with pair.activate():
        total = OpaqueObject(Total)
        for _ in range(2):
            result = total.call_method("add", shape, torch.ones(2))
        assert inspect(result).tolist() == [2.0, 2.0]
    assert all(one is total for one in seen)


# -- the log of the processes ----------------------------------------------------------------------


class Log(logging.Handler):
    """Keeps what this process logs."""

    kept: ClassVar[list] = []

    def emit(self, record):
        self.kept.append((record.name, record.levelname, str(record.args[0])))


def listen():
    log.logger.addHandler(Log())


def heard():
    return log.logger.level, Log.kept


def test_a_program_listens_to_the_logger_of_the_processes(pair):
    with pair.activate():
        remote(listen, propagate="inspect")()
        log.log_remote("hello %s", torch.ones(2), level=logging.WARNING)
        log.log_remote("below the level: %s", "this", level=logging.DEBUG)
        log.set_logging_level_remote(logging.DEBUG)
        log.log_remote("at %s", "last", level=logging.DEBUG)
        answers = remote(heard).call().get()
    expected = [
        ("monarch.builtins.log", "WARNING", "tensor([1., 1.])"),
        ("monarch.builtins.log", "DEBUG", "last"),
    ]
    assert [value for _, value in answers.items()] == [(logging.DEBUG, expected)] * 2
    assert log.logger is logging.getLogger("monarch.builtins.log")


class Recorder:
    """Stands in for the logger of a process."""

    calls: ClassVar[list] = []

    def log(self, level, *args):
        self.calls.append((level, *args))


def replace():
    module = importlib.import_module("monarch.builtins.log")
    module.logger = Recorder()


def test_a_program_replaces_the_logger_of_the_processes(pair):
    def restored():
        module = importlib.import_module("monarch.builtins.log")
        module.logger = logging.getLogger("monarch.builtins.log")
        return list(Recorder.calls)

    with pair.activate():
        remote(replace, propagate="inspect")()
        log.log_remote("to the recorder", level=logging.ERROR)
        answers = remote(restored).call().get()
    expected = [(logging.ERROR, "to the recorder")]
    assert [value for _, value in answers.items()] == [expected] * 2


# -- the graph of a program ------------------------------------------------------------------------


def graph():
    made = IRGraph()
    stack = traceback.extract_stack(limit=1)
    for rank in (0, 1):
        made.insert_node(
            worker_rank=rank,
            stream_name="main",
            command_id=0,
            command_name="CallFunction: aten.mm",
            devices=[0, 1],
            control_dependencies=[],
            traceback=stack,
        )
    made.insert_node(0, "main", 1, "Reduce: all_reduce", [0, 1], [0], [])
    made.insert_node(0, "other", 2, "CallFunction: aten.cos", [0], [1], [])
    return made


def test_nodes_of_a_graph_are_commands():
    first, *_, last = graph().control_dag
    assert isinstance(first, Command)
    assert last == Command(0, "other", 2, "CallFunction: aten.cos", [0], [1], [], duration=0)
    assert first[:4] == (0, "main", 0, "CallFunction: aten.mm")
    assert len(first.traceback) == 1


def test_a_graph_is_a_trace_for_chrome(tmp_path):
    path = tmp_path / "graph.json"
    graph().export_dag_json(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert [(event["name"], event["pid"], event["tid"]) for event in events] == [
        ("CallFunction: aten.mm", 0, "main"),
        ("CallFunction: aten.mm", 1, "main"),
        ("Reduce: all_reduce", 0, "main"),
        ("CallFunction: aten.cos", 0, "other"),
    ]
    assert {event["ph"] for event in events} == {"X"}
    assert [event["ts"] for event in events] == [0, 0, 5000, 0]
    args = events[2]["args"]
    assert (args["command_id"], args["command_type"]) == (1, "Reduce")
    assert (args["devices"], args["control dependencies"]) == ([0, 1], [0])
    assert __file__ in events[0]["args"]["traceback"][0]


def test_a_graph_takes_times_by_types_of_commands(tmp_path):
    made, path = graph(), tmp_path / "file.json"
    made.export_command_types(str(path))
    types = json.loads(path.read_text())["command_types"]
    assert [(each["timing_key"], each["count"], each.get("num_devices")) for each in types] == [
        ("CallFunction:aten.mm:unknown", 2, None),
        ("Reduce:all_reduce:unknown:2", 1, 2),
        ("CallFunction:aten.cos:unknown", 1, None),
    ]
    path.write_text(json.dumps({types[0]["timing_key"]: 25}))
    made.import_timing(str(path))
    made.import_timing({types[1]["timing_key"]: 40, types[2]["timing_key"]: 7})
    assert [node.duration for node in made.control_dag] == [25, 25, 40, 7]
    made.export_dag_json_timed(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["dur"] for event in events] == [25, 25, 40, 7]


@pytest.mark.parametrize(
    ("types", "left"), [("CallFunction", 1), (["Reduce", "Send"], 3), ("CallFunction: aten.mm", 2)]
)
def test_nodes_are_removed_by_the_begin_of_their_names(types, left):
    made = graph()
    assert made.remove_dag_item_type(types) == 4 - left
    assert len(made.control_dag) == left


# -- tasks of a simulation -------------------------------------------------------------------------


def done(*tasks):
    """Return which of the tasks end, if each is tried once."""
    for task in tasks:
        task.maybe_set_ready()
        task.maybe_execute()
    return [task.maybe_finish() for task in tasks]


def test_a_task_goes_from_state_to_state_once():
    task = Task([1], [2], 5, start_time=100, runtime=10, meta=["aten.mm"])
    states = [task.state]
    for step in (task.maybe_set_ready, task.maybe_execute, task.maybe_finish):
        assert step()
        assert not step()
        states.append(task.state)
    assert states == [*TaskState]
    assert [state.name for state in TaskState] == ["PENDING", "READY", "EXECUTING", "EXECUTED"]
    assert (task.inputs, task.outputs, task.command_id, task.end_time) == ([1], [2], 5, 110)


def test_a_task_begins_after_its_dependencies():
    first, second = Task([], [], 0, 5, 10, ["a"]), Task([], [], 1, 0, 10, ["b"])
    second.dependencies.append(first)
    assert done(second) == [False]
    assert second.state is TaskState.PENDING
    assert done(first, second) == [True, False]
    assert done(second) == [True]
    assert (second.start_time, second.end_time) == (15, 25)


def test_a_collective_ends_when_all_have_begun():
    one, two = Task([], [], 0, 0, 10, ["all_reduce"]), Task([], [], 0, 100, 20, ["all_reduce"])
    one.collectives, two.collectives = [two], [one]
    assert done(one) == [False]
    assert done(two, one) == [True, True]
    assert (one.end_time, two.end_time) == (110, 120)


def test_a_stream_waits_for_a_task_of_another():
    task = Task([], [], 0, 5, 100, ["aten.mm"])
    borrow = Borrow(1, 2, 3, from_stream=4, to_stream=5)
    wait = EventTask(task, 4, "main", 5, "other", 7, 3, runtime=50, borrow=borrow)
    assert (wait.meta, wait.waits, wait.borrow) == (["waiting for", "main"], [task], borrow)
    assert done(wait) == [False]
    copy = wait.clone()
    assert done(task, wait) == [True, True]
    assert (wait.start_time, wait.end_time) == (7, 105)
    assert (type(copy), copy.state) == (EventTask, TaskState.EXECUTING)


def test_tasks_have_the_tags_of_set_meta():
    with set_meta("forward"):
        assert Task([], [], 0, 0, 1, ["aten.mm"]).meta == ["aten.mm", "forward"]
