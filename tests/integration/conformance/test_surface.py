"""The names that programs import, their modules, and the cost of an import."""

import importlib
import subprocess
import sys
import typing
import warnings

import pytest

ACTOR = """
Accumulator Actor ActorError Channel ChannelTransport Context Endpoint Extent Future HostMesh
MeshFailure Point Port PortReceiver ProcId ProcMesh Uid ValueMesh as_endpoint attach
attach_to_workers concurrent_endpoint config context current_actor_name current_rank current_size
debug_controller default_bootstrap_cmd enable_transport endpoint get_meter get_or_spawn_controller
returns_future run_worker_loop_forever run_worker_loop_until_shutdown send shutdown_context span
start_worker_loop_forever this_host this_proc traced unhandled_fault_hook
""".split()

CONFIG = """
Encoding clear_runtime_config configure configured get_global_config get_runtime_config
parametrize_config parametrize_config_pointwise
""".split()

OLD_PATHS = {
    "monarch._src.actor.actor_mesh": "context Actor ActorMesh Channel Port PortReceiver ValueMesh "
    "current_rank current_size Context Instance ActorError attach Point Accumulator send",
    "monarch._src.actor.host_mesh": "this_host this_proc HostMesh default_bootstrap_cmd",
    "monarch._src.actor.proc_mesh": "ProcMesh get_or_spawn_controller get_active_proc_meshes "
    "register_proc_mesh_spawn_callback unregister_proc_mesh_spawn_callback",
    "monarch._src.actor.endpoint": "endpoint Endpoint EndpointProperty Extent",
    "monarch._src.actor.bootstrap": "attach_to_workers run_worker_loop_forever",
    "monarch._src.actor.bootstrap_main": "",
    "monarch._src.actor.future": "Future",
    "monarch._src.actor.shape": "Shape NDSlice Slice MeshTrait ShapeExt Extent",
    "monarch._src.actor.mock": "patch_actor patch_tensor_engine",
    "monarch._src.actor.supervision": "unhandled_fault_hook UnhandledFaultHookException",
    "monarch._src.actor.concurrent": "concurrent_endpoint",
    "monarch._rust_bindings.monarch_hyperactor.supervision": "SupervisionError MeshFailure",
    "monarch._rust_bindings.monarch_hyperactor.shape": "Shape Slice Extent Point Region",
    "monarch._rust_bindings.monarch_hyperactor.channel": "ChannelTransport BindSpec ChannelAddr",
    "monarch._rust_bindings.monarch_hyperactor.host_mesh": "BootstrapCommand HostMesh",
    "monarch._rust_bindings.monarch_hyperactor.buffers": "Buffer FrozenBuffer",
    "monarch._rust_bindings.monarch_hyperactor.mailbox": "UndeliverableMessageEnvelope",
    "monarch._rust_bindings.monarch_hyperactor.proc": "ActorAddr ProcId Uid",
    "monarch._rust_bindings.monarch_hyperactor.config": "configure get_global_config "
    "get_runtime_config clear_runtime_config reload_config_from_env reset_config_to_defaults",
    "monarch.actor.concurrent": "concurrent_endpoint",
}


def test_every_public_name_of_the_actor_module():
    import monarch.actor

    assert len(ACTOR) == 44
    assert set(ACTOR) <= set(monarch.actor.__all__)
    for name in ACTOR:
        assert hasattr(monarch.actor, name), name


def test_every_public_name_of_the_config_module():
    import monarch.config

    assert set(CONFIG) <= set(monarch.config.__all__)
    for name in CONFIG:
        assert hasattr(monarch.config, name), name


@pytest.mark.parametrize(
    ("module", "name"),
    [(m, n) for m, names in OLD_PATHS.items() for n in (names.split() or [None])],
)
def test_old_paths(module, name):
    found = importlib.import_module(module)
    assert name is None or hasattr(found, name)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("monarch._src.actor.actor_mesh", "ActorError"),
        ("monarch._src.actor.actor_mesh", "context"),
        ("monarch._src.actor.actor_mesh", "Point"),
        ("monarch._src.actor.endpoint", "endpoint"),
        ("monarch._src.actor.host_mesh", "this_host"),
        ("monarch._src.actor.proc_mesh", "ProcMesh"),
        ("monarch._src.actor.future", "Future"),
        ("monarch._rust_bindings.monarch_hyperactor.shape", "Extent"),
        ("monarch._rust_bindings.monarch_hyperactor.supervision", "MeshFailure"),
        ("monarch._rust_bindings.monarch_hyperactor.channel", "ChannelTransport"),
    ],
)
def test_old_paths_lead_to_the_same_objects(module, name):
    import monarch.actor

    assert getattr(importlib.import_module(module), name) is getattr(monarch.actor, name)


@pytest.mark.parametrize("name", ["SupervisionError", "BootstrapCommand", "Shape", "Slice"])
@pytest.mark.ours("the reference has these at private paths only")
def test_names_with_a_public_home_of_ours(name):
    import monarch.actor

    assert hasattr(monarch.actor, name)


@pytest.mark.parametrize(
    "name",
    [
        "configure",
        "configured",
        "clear_runtime_config",
        "get_global_config",
        "get_runtime_config",
        "Extent",
        "Shape",
        "NDSlice",
    ],
)
def test_lazy_names_of_the_top_module(name):
    import monarch

    assert getattr(monarch, name) is not None


def test_unknown_names_of_the_top_module():
    import monarch

    with pytest.raises(AttributeError, match="module 'monarch' has no attribute 'nosuch'"):
        monarch.nosuch  # noqa: B018


@pytest.mark.parametrize("alias", ["monarch.actor_mesh", "monarch.proc_mesh"])
def test_old_public_aliases_warn(alias):
    sys.modules.pop(alias, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(alias)
    assert module is not None
    assert any(
        issubclass(w.category, DeprecationWarning) and "deprecated" in str(w.message)
        for w in caught
    )


@pytest.mark.parametrize("module", ["monarch", "monarch.actor", "monarch.config"])
def test_an_import_does_not_load_torch(module):
    code = f"import {module}, sys; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_an_import_starts_nothing():
    code = """if True:
        import threading, os
        import monarch.actor
        print(threading.active_count())
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "1\n"


def test_python_dash_m_bootstrap_is_found():
    spec = importlib.util.find_spec("monarch._src.actor.bootstrap_main")
    assert spec is not None


def test_telemetry_helpers():
    from monarch.actor import span, traced

    with span("a span"):
        pass

    @traced
    def plain(x):
        """Doc."""
        return x

    @traced(name="named")
    def named(x):
        return x

    assert plain(1) == named(1) == 1
    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Doc."


@pytest.mark.parametrize("path", ["monarch._src.actor.actor_mesh", "monarch.actor_mesh"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_types_for_annotations_are_subscriptable_at_run_time(path):
    module = importlib.import_module(path)
    for name in ("ActorMesh", "Port", "PortReceiver", "Channel", "ValueMesh"):
        assert getattr(module, name)[int] is not None
    element = typing.TypeVar("element")
    assert (module.ActorMesh[element] | None)[int] == module.ActorMesh[int] | None
