"""The promises that the tests of real processes state hold in simulations as well.

Each function here is a test of `tests/integration`, run as the script of a simulation: its meshes
are on another host, over a network that loses and reorders packets, with a seed of its own. Tests
with further fixtures, which start programs or agents, are left out, and those of `LEFT_OUT`.
"""

from __future__ import annotations

import importlib
import inspect

import pytest

MODULES = {
    "conformance": (
        "adverbs",
        "config",
        "context",
        "controllers",
        "defining_actors",
        "future",
        "improvements",
        "meshes",
        "mock",
        "old_style_programs",
        "pickling",
        "ports",
        "spawn",
    ),
    "engine": (
        "answers",
        "busy",
        "deadlocks",
        "ends",
        "futures",
        "hostile_exceptions",
        "mistakes",
        "options",
        "order",
        "spans",
        "supervisor",
        "undeliverable",
        "unobserved",
    ),
}

FIXTURES = {"faults", "fresh", "grid", "monkeypatch", "pair", "proc", "single"}

LEFT_OUT = {
    "all processes of a simulation are in one interpreter": (
        "test_a_bad_program_fails_initialized",
        "test_a_command_for_each_proc",
        "test_a_command_that_starts_from_an_empty_environment",
        "test_a_command_with_an_environment",
        "test_async_actors_of_a_proc_have_different_loops_and_threads",
        "test_bootstrap_runs_once_on_each_proc_before_any_actor",
        "test_environment_is_taken_at_the_spawn",
        "test_modules_are_imported_once_per_proc",
        "test_proc_bind_cpus",
        "test_processes_that_never_began_are_failures",
        "test_procs_spawned_before_the_block_do_not",
        "test_python_in_a_proc",
        "test_the_bootstrap_callable_runs_in_a_replaced_process",
        "test_the_name_labels_the_procs",
        "test_variables_that_name_the_process",
        "test_what_a_proc_changes_stays_there",
    ),
    "about the operating system, real threads, real time, or garbage": (
        "test_a_constructor_that_never_returns_can_be_stopped",
        "test_a_mailbox_that_is_full",
        "test_a_payload_for_which_there_is_no_descriptor_is_refused_alone",
        "test_a_process_pool_in_an_actor",
        "test_a_proc_whose_link_broke_does_not_survive_its_mesh",
        "test_a_rank_that_does_not_end_is_killed_after_the_patience",
        "test_a_stopped_process_is_given_up",
        "test_a_stopped_process_that_goes_on_in_time_answers",
        "test_a_supervisor_forgets_a_mesh_that_was_stopped",
        "test_a_text_for_which_there_is_no_memory",
        "test_a_value_without_memory_to_send_it_is_an_error_of_the_call",
        "test_an_actor_supervises",
        "test_another_thread_may_answer",
        "test_each_rank_has_its_own_outcome",
        "test_messages_from_several_threads",
        "test_nothing_old_reaches_the_new_actor_of_a_process_that_lives_on",
        "test_on_restart_is_told_and_may_fail",
        "test_order_after_both_have_connected_to_each_other",
        "test_port_exception_is_raised_at_the_caller",
        "test_rref_wants_an_active_mesh",
        "test_too_many_failures_are_the_owners",
        "test_what_cannot_be_asked_or_made_is_not_waited_for",
        "test_without_a_sink_the_endpoint_is_called_as_it_is",
    ),
    "without the filters of their module they raise warnings": (
        "test_encodings",
        "test_lenient_values",
        "test_parametrized_pointwise",
    ),
}


def is_simulated(name, value):
    if not (name.startswith("test_") and inspect.isfunction(value)):
        return False
    wanted = set(inspect.signature(value).parameters)
    for mark in getattr(value, "pytestmark", ()):
        if mark.name == "parametrize":
            names = mark.args[0]
            wanted -= set(names.replace(" ", "").split(",") if isinstance(names, str) else names)
    return wanted <= FIXTURES and not any(name in names for names in LEFT_OUT.values())


def groups():
    """Yield a class of tests for each module."""
    for folder, names in MODULES.items():
        for name in names:
            module = importlib.import_module(f"tests.integration.{folder}.test_{name}")
            found = {
                key: staticmethod(value)
                for key, value in vars(module).items()
                if is_simulated(key, value)
            }
            group = type(f"Test_{folder}_{name}", (), found)
            yield group.__name__, pytest.mark.simulated(group)


globals().update(groups())


def test_all_that_is_left_out_exists():
    there = {
        name
        for folder, names in MODULES.items()
        for module in names
        for name in vars(importlib.import_module(f"tests.integration.{folder}.test_{module}"))
    }
    assert {name for names in LEFT_OUT.values() for name in names} <= there
