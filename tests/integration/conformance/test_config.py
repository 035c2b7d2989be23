"""Runtime configuration: layers, validation, and the pytest decorators."""

import asyncio
import inspect

import pytest

from monarch._rust_bindings.monarch_hyperactor.channel import BindSpec
from monarch.actor import Actor, ChannelTransport, endpoint
from monarch.config import (
    Encoding,
    clear_runtime_config,
    configure,
    configured,
    get_global_config,
    get_runtime_config,
    parametrize_config,
    parametrize_config_pointwise,
)

pytestmark = pytest.mark.filterwarnings("ignore:configure.* has no effect")


@pytest.fixture(autouse=True)
def _clean():
    clear_runtime_config()
    yield
    clear_runtime_config()


# --- layers --------------------------------------------------------------------------------------


def test_configure_sets_and_adds():
    assert configure(tail_log_lines=7) is None
    configure(cleanup_timeout="5s")
    config = get_global_config()
    assert config["tail_log_lines"] == 7
    assert config["cleanup_timeout"] == "5s"
    assert get_runtime_config()["tail_log_lines"] == 7


def test_clear_restores_the_defaults():
    configure(tail_log_lines=7)
    clear_runtime_config()
    assert get_global_config()["tail_log_lines"] == 0


def test_global_config_is_a_copy():
    get_global_config()["tail_log_lines"] = 99
    assert get_global_config()["tail_log_lines"] == 0


def test_configured_restores():
    configure(tail_log_lines=1)
    with configured(tail_log_lines=2, enable_log_forwarding=True) as config:
        assert config["tail_log_lines"] == 2
        assert get_global_config()["tail_log_lines"] == 2
        with configured(tail_log_lines=3):
            assert get_global_config()["tail_log_lines"] == 3
            assert get_global_config()["enable_log_forwarding"] is True
        assert get_global_config()["tail_log_lines"] == 2
    assert get_global_config()["tail_log_lines"] == 1
    assert get_global_config()["enable_log_forwarding"] is False


def test_configured_restores_after_an_exception():
    with pytest.raises(ZeroDivisionError), configured(tail_log_lines=2):
        raise ZeroDivisionError
    assert get_global_config()["tail_log_lines"] == 0


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("enable_log_forwarding", False),
        ("enable_file_capture", False),
        ("tail_log_lines", 0),
        ("force_file_log", False),
        ("prefix_with_rank", True),
        ("read_log_buffer", 100),
        ("codec_max_frame_length", 10737418240),
        ("message_delivery_timeout", "30s"),
        ("host_spawn_ready_timeout", "30s"),
        ("mesh_proc_spawn_max_idle", "30s"),
        ("actor_spawn_max_idle", "30s"),
        ("proc_stop_max_idle", "30s"),
        ("get_actor_state_max_idle", "30s"),
        ("get_proc_state_max_idle", "1m"),
        ("supervision_watchdog_timeout", "2m"),
        ("mesh_orphan_timeout", "1m"),
        ("mesh_attach_config_timeout", "1m"),
        ("cleanup_timeout", "3s"),
        ("stop_actor_timeout", "10s"),
        ("process_exit_timeout", "10s"),
        ("mesh_terminate_timeout", "10s"),
        ("mesh_terminate_concurrency", 16),
        ("mesh_bootstrap_enable_pdeathsig", True),
        ("small_write_threshold", 256),
    ],
)
def test_defaults(key, default):
    assert get_global_config()[key] == default


def test_the_default_transport_reads_back_as_a_bind_spec():
    assert get_global_config()["default_transport"] == BindSpec(ChannelTransport.Unix)
    with configured(default_transport=ChannelTransport.TcpWithLocalhost) as config:
        assert config["default_transport"] == BindSpec(ChannelTransport.TcpWithLocalhost)
    with configured(default_transport="tcp://127.0.0.1:0") as config:
        assert config["default_transport"] == BindSpec("tcp://127.0.0.1:0")


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("30s", "30s"),
        ("300s", "5m"),
        ("90s", "1m 30s"),
        ("1h 30m", "1h 30m"),
        ("1h30m", "1h 30m"),
        ("500ms", "500ms"),
        ("5m", "5m"),
        ("0s", "0s"),
        ("1day", "1day"),
        ("1500ms", "1s 500ms"),
    ],
)
def test_durations(given, read):
    configure(cleanup_timeout=given)
    assert get_global_config()["cleanup_timeout"] == read


@pytest.mark.parametrize(
    ("values", "error", "fragment"),
    [
        ({"zzz": 1}, ValueError, "invalid configuration key: `zzz`"),
        ({"tail_log_lines": "x"}, TypeError, "invalid value"),
        ({"tail_log_lines": -1}, TypeError, "negative"),
        ({"cleanup_timeout": 30}, TypeError, None),
        ({"cleanup_timeout": "30"}, TypeError, "Invalid duration format"),
        ({"cleanup_timeout": "soon"}, TypeError, "Invalid duration format"),
        ({"enable_log_forwarding": 1}, TypeError, None),
        ({"enable_log_forwarding": "yes"}, TypeError, None),
        ({"default_encoding": "json"}, TypeError, None),
        ({"default_transport": 5}, TypeError, "expected ChannelTransport enum, BindSpec, or str"),
        ({"default_transport": "weird"}, ValueError, "invalid str for BindSpec"),
        ({"proc_launcher_kind": 5}, TypeError, None),
    ],
    ids=str,
)
def test_invalid_values(values, error, fragment):
    with pytest.raises(error, match=fragment):
        configure(**values)
    with pytest.raises(error, match=fragment), configured(**values):
        pass


def test_lenient_values():
    configure(tail_log_lines=True)
    assert get_global_config()["tail_log_lines"] == 1
    configure(message_latency_sampling_rate=1)
    assert get_global_config()["message_latency_sampling_rate"] == 1.0


def test_encodings():
    for encoding in (Encoding.Bincode, Encoding.Json, Encoding.Multipart):
        with configured(default_encoding=encoding) as config:
            assert config["default_encoding"] == encoding
    assert get_global_config()["default_encoding"] == Encoding.Multipart


# --- environment ---------------------------------------------------------------------------------


def test_the_environment_is_read_at_import_and_wins(program):
    done = program(
        """
        import os
        from monarch.config import configure, get_global_config
        print(get_global_config()["cleanup_timeout"], get_global_config()["tail_log_lines"])
        configure(cleanup_timeout="4s", tail_log_lines=5)
        print(get_global_config()["cleanup_timeout"], get_global_config()["tail_log_lines"])
        from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
        os.environ["HYPERACTOR_CLEANUP_TIMEOUT"] = "8s"
        print(get_global_config()["cleanup_timeout"])
        reload_config_from_env()
        print(get_global_config()["cleanup_timeout"])
        """,
        env={"HYPERACTOR_CLEANUP_TIMEOUT": "9s"},
    )
    assert done.stdout.splitlines() == ["9s 0", "9s 5", "9s", "8s"]


@pytest.mark.parametrize(
    ("variable", "key", "text", "value"),
    [
        ("HYPERACTOR_MESH_ENABLE_LOG_FORWARDING", "enable_log_forwarding", "true", True),
        ("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", "codec_max_frame_length", "1000000", 1000000),
        ("HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE", "mesh_proc_spawn_max_idle", "1m 5s", "1m 5s"),
        ("HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT", "message_delivery_timeout", "45s", "45s"),
        ("MONARCH_HYPERACTOR_SMALL_WRITE_THRESHOLD", "small_write_threshold", "1024", 1024),
    ],
)
def test_variables(program, variable, key, text, value):
    done = program(
        f"""
        from monarch.config import get_global_config
        print(repr(get_global_config()[{key!r}]))
        """,
        env={variable: text},
    )
    assert done.stdout == f"{value!r}\n"


class ReadsConfig(Actor):
    @endpoint
    def get(self, key):
        return get_global_config()[key]


def test_procs_receive_the_configuration_of_the_client(fresh):
    with configured(cleanup_timeout="7s"):
        reader = fresh().spawn("reader", ReadsConfig)
        assert reader.get.call_one("cleanup_timeout").get() == "7s"
    assert fresh().spawn("reader", ReadsConfig).get.call_one("cleanup_timeout").get() == "3s"


# --- decorators ----------------------------------------------------------------------------------


@parametrize_config(tail_log_lines={11, 12})
def test_parametrized():
    assert get_global_config()["tail_log_lines"] in (11, 12)


@parametrize_config(tail_log_lines={11}, cleanup_timeout={"6s"})
@pytest.mark.parametrize("other", [1])
def test_parametrized_with_others(other):
    assert get_global_config()["tail_log_lines"] == 11
    assert get_global_config()["cleanup_timeout"] == "6s"
    assert other == 1


@parametrize_config_pointwise(tail_log_lines=[1, 2], read_log_buffer=[10, 20])
def test_parametrized_pointwise():
    config = get_global_config()
    assert config["read_log_buffer"] == 10 * config["tail_log_lines"]


def test_bad_parametrisations():
    with pytest.raises(ValueError, match="requires at least one config option"):
        parametrize_config()
    with pytest.raises(ValueError, match="same number of values"):
        parametrize_config_pointwise(tail_log_lines=[1, 2], read_log_buffer=[1])


def test_parametrize_config_of_a_coroutine():
    @parametrize_config(tail_log_lines={13})
    async def test():
        await asyncio.sleep(0)
        return get_global_config()["tail_log_lines"]

    assert inspect.iscoroutinefunction(test)
    assert asyncio.run(test(_config_overrides={"tail_log_lines": 13})) == 13
