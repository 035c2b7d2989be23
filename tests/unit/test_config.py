"""`monarch.config`, the table of its keys, and durations."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import monarch.config as mc
from monarch._engine.base.address import BindSpec, ChannelTransport
from monarch._engine.base.duration import format_duration, parse_duration
from monarch._engine.base.settings import KEYS, Settings, settings
from monarch.config import Encoding, parametrize_config, parametrize_config_pointwise

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.filterwarnings("ignore::monarch.config.UnusedSettingWarning")

DEFAULTS = {
    "actor_spawn_max_idle": "30s",
    "channel_tcp_keepalive_idle": "1m",
    "cleanup_timeout": "3s",
    "codec_max_frame_length": 10737418240,
    "default_encoding": Encoding.Multipart,
    "default_transport": BindSpec(ChannelTransport.Unix),
    "enable_log_forwarding": False,
    "get_actor_state_max_idle": "30s",
    "mesh_admin_addr": "127.0.0.1:1729",  # the reference: all interfaces
    "mesh_admin_query_child_timeout": "100ms",
    "mesh_attach_config_timeout": "1m",
    "message_latency_sampling_rate": 0.009999999776482582,
    "prefix_with_rank": True,
    "process_memory_metric_interval": "5m",
    "pyspy_bin": "",
    "rdma_max_chunk_size_mb": 64,
    "rdma_max_nics_per_buffer": None,
    "small_write_threshold": 256,
    "supervision_watchdog_timeout": "2m",
    "tokio_worker_threads": None,
}


@pytest.fixture
def fresh():
    """Settings without any environment variable."""
    return Settings({})


@pytest.fixture(autouse=True)
def _process_settings_restored():
    with settings.configured():
        yield


def test_defaults_are_those_of_the_reference(fresh):
    values = fresh.get_global()
    assert {name: values[name] for name in DEFAULTS} == DEFAULTS


def test_every_key_has_its_own_variable_and_a_line_of_documentation_if_code_reads_it():
    assert len({key.variable for key in KEYS.values()}) == len(KEYS)
    assert all(key.doc for key in KEYS.values() if key.is_read)


def test_a_class_that_travels_by_value_configures_the_process_it_arrives_in():
    """It has the `configure` that its script imported, which must not bring a copy along."""
    there = "from monarch._engine.base.settings import settings; import pickle, sys;"
    there += "pickle.load(sys.stdin.buffer)(cleanup_timeout='90s'); print(settings.cleanup_timeout)"
    done = subprocess.run(
        [sys.executable, "-c", there],
        check=True,
        input=pickle.dumps(mc.configure),
        capture_output=True,
    )
    assert done.stdout == b"90.0\n"
    assert pickle.loads(pickle.dumps(settings)) is settings


def test_facade_exports_the_names_of_the_reference():
    assert {
        "clear_runtime_config",
        "configure",
        "configured",
        "Encoding",
        "get_global_config",
        "get_runtime_config",
        "parametrize_config",
        "parametrize_config_pointwise",
    } == set(mc.__all__)


def test_importing_the_facade_loads_no_pytest():
    program = "import sys, monarch.config; print('pytest' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


# -- values that configure accepts


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"zzz": 1}, ValueError, "invalid configuration key: `zzz`"),
        (
            {"read_log_buffer": "x"},
            TypeError,
            r"invalid value `x` for configuration key `.*read_log_buffer` \(TypeError: 'str' obj",
        ),
        ({"read_log_buffer": 1.5}, TypeError, "'float' object cannot be interpreted"),
        ({"read_log_buffer": None}, TypeError, "'NoneType' object cannot be interpreted"),
        ({"read_log_buffer": -1}, TypeError, "OverflowError: can't convert negative int"),
        ({"read_log_buffer": 2**64}, TypeError, "OverflowError: int too big"),
        ({"message_ttl_default": 256}, TypeError, "OverflowError"),
        ({"tokio_worker_threads": -1}, TypeError, "OverflowError"),
        ({"enable_log_forwarding": 1}, TypeError, "'int' object cannot be cast as 'bool'"),
        ({"pyspy_bin": 3}, TypeError, "'int' object cannot be cast as 'str'"),
        ({"message_latency_sampling_rate": "1"}, TypeError, "must be real number, not str"),
        ({"cleanup_timeout": 30}, TypeError, "'int' object cannot be cast as 'str'"),
        (
            {"cleanup_timeout": "30"},
            TypeError,
            "Invalid duration format '30': time unit needed, for example 30sec or 30ms",
        ),
        ({"default_encoding": "Json"}, TypeError, "'str' object cannot be cast as 'Encoding'"),
        ({"default_transport": 3}, TypeError, "expected ChannelTransport enum, BindSpec, or str"),
        (
            {"default_transport": "weird"},
            ValueError,
            "invalid str for BindSpec 'weird': invalid bind spec: weird",
        ),
    ],
)
def test_bad_values_are_refused(fresh, values, error, text):
    with pytest.raises(error, match=text):
        fresh.configure(**values)
    assert fresh.snapshot() == {}


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ({"read_log_buffer": True}, 1),
        ({"message_latency_sampling_rate": 1}, 1.0),
        ({"message_latency_sampling_rate": -7.5}, -7.5),
        ({"message_latency_sampling_rate": 0.1}, 0.10000000149011612),
        ({"cleanup_timeout": "300s"}, "5m"),
        ({"tokio_worker_threads": 3}, 3),
        ({"tokio_worker_threads": None}, None),
        ({"default_encoding": Encoding.Json}, Encoding.Json),
        ({"default_transport": "tcp"}, BindSpec(ChannelTransport.TcpWithHostname)),
        ({"default_transport": ChannelTransport.Local}, BindSpec("local")),
    ],
)
def test_good_values_read_back_normalised(fresh, values, read):
    fresh.configure(**values)
    (name,) = values
    assert read == fresh.get(name)
    assert type(read) is type(fresh.get(name))
    assert read == fresh.get_global()[name] == fresh.get_runtime()[name]


def test_the_encodings_have_the_numbers_of_the_reference():
    assert {str(each): int(each) for each in Encoding} == {
        "Encoding.Bincode": 0,
        "Encoding.Json": 1,
        "Encoding.Multipart": 2,
    }


def test_configure_sets_all_keys_or_none(fresh):
    with pytest.raises(TypeError):
        fresh.configure(tail_log_lines=7, cleanup_timeout="soon")
    assert fresh.tail_log_lines == 0


@pytest.mark.parametrize(
    "name",
    [
        "actor_queue_dispatch",
        "remote_alloc_bind_to_inaddr_any",
        "remote_alloc_bootstrap_addr",
        "remote_alloc_allowed_port_range",
    ],
)
def test_retired_keys_are_taken_and_ignored(fresh, name):
    fresh.configure(**{name: "anything"})
    assert name not in fresh.get_global()


def test_attributes_are_what_the_engine_reads(fresh):
    fresh.configure(cleanup_timeout="1m 30s", shm_threshold=5)
    read = (fresh.cleanup_timeout, fresh.shm_threshold, fresh.prefix_with_rank)
    assert read == (90.0, 5, True)


# -- layers


def reads() -> set[str]:
    """Return the keys that code of the package reads, known or not, as attributes of `settings`."""
    found = set()
    for path in (ROOT / "src" / "monarch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if name == "settings":
                    found.add(node.attr)
    return {name for name in found if name in KEYS or not hasattr(Settings, name)}


def test_a_setting_is_listed_as_read_if_and_only_if_code_reads_it():
    assert {name for name, key in KEYS.items() if key.is_read} == reads()


def test_a_setting_that_changes_nothing_is_named_once_in_the_callers_line(fresh):
    with pytest.warns(mc.UnusedSettingWarning, match="message_delivery_timeout") as warned:
        fresh.configure(message_delivery_timeout="1m", tail_log_lines=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.configure(message_delivery_timeout="2m")
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]
    assert fresh.get("message_delivery_timeout") == "2m"


def test_so_is_one_of_a_block(fresh):
    with (
        pytest.warns(mc.UnusedSettingWarning, match="tokio_worker_threads") as warned,
        fresh.configured(tokio_worker_threads=4),
    ):
        pass
    assert [Path(warning.filename) for warning in warned] == [Path(__file__)]


def test_what_is_read_and_what_is_the_default_anyway_is_not_named(fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.configure(**fresh.get_global())
        fresh.configure(host_timeout="5s")


def test_each_setting_that_changes_nothing_is_named_and_a_program_can_silence_that(fresh):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", mc.UnusedSettingWarning)
        fresh.configure(actor_queue_dispatch=True, enable_otel_metrics=False)
    with pytest.warns(mc.UnusedSettingWarning) as warned:
        Settings({}).configure(actor_queue_dispatch=True, enable_otel_metrics=False)
    assert len(warned) == 2


def test_precedence():
    environ = {"HYPERACTOR_CLEANUP_TIMEOUT": "9s"}
    values = Settings(environ)
    steps = []

    def note():
        steps.append((values.get("cleanup_timeout"), values.origin("cleanup_timeout")))

    values.install_client_values({"cleanup_timeout": "1s"})
    with pytest.warns(RuntimeWarning, match="HYPERACTOR_CLEANUP_TIMEOUT='9s' comes first"):
        values.configure(cleanup_timeout="4s")
    note()
    environ.clear()
    note()
    values.reload_from_env()
    note()
    values.clear_runtime()
    note()
    values.install_client_values({})
    note()
    assert steps == [
        ("9s", "environment"),
        ("9s", "environment"),
        ("4s", "configure"),
        ("1s", "client"),
        ("3s", "default"),
    ]


def test_a_process_that_follows_a_client_has_exactly_its_values():
    """An agent outlives changes of the environment of the script that started it."""
    client = Settings({"MONARCH_HOST_TIMEOUT": "5s", "HYPERACTOR_MESH_TAIL_LOG_LINES": "4"})
    agent = Settings({"MONARCH_HOST_TIMEOUT": "2s", "HYPERACTOR_CLEANUP_TIMEOUT": "9s"})
    agent.follow_client(client.snapshot())
    assert agent.get_global() == client.get_global()
    assert agent.origin("host_timeout") == "client"


def test_reset_forgets_every_layer_until_the_environment_is_read_again():
    values = Settings({"HYPERACTOR_CLEANUP_TIMEOUT": "9s"})
    values.configure(tail_log_lines=4)
    values.reset_to_defaults()
    assert values.snapshot() == {}
    values.reload_from_env()
    assert values.snapshot() == {"cleanup_timeout": "9s"}


def test_runtime_config_does_not_show_other_layers():
    values = Settings({"HYPERACTOR_CLEANUP_TIMEOUT": "9s"})
    values.configure(tail_log_lines=4)
    runtime = values.get_runtime()
    assert (runtime["cleanup_timeout"], runtime["tail_log_lines"]) == ("3s", 4)
    assert list(values.get_global()) == list(runtime)


@pytest.mark.parametrize(
    ("variable", "text", "name", "read"),
    [
        ("HYPERACTOR_FORCE_FILE_LOG", "TRUE", "force_file_log", True),
        ("HYPERACTOR_FORCE_FILE_LOG", "1", "force_file_log", True),
        ("HYPERACTOR_PREFIX_WITH_RANK", "0", "prefix_with_rank", False),
        ("HYPERACTOR_READ_LOG_BUFFER", "+7", "read_log_buffer", 7),
        ("HYPERACTOR_CLEANUP_TIMEOUT", " 9s ", "cleanup_timeout", "9s"),
        ("HYPERACTOR_MESH_DEFAULT_TRANSPORT", "tcp(Localhost)", "default_transport", None),
        ("HYPERACTOR_DEFAULT_ENCODING", "serde_json", "default_encoding", Encoding.Json),
        ("HYPERACTOR_MESSAGE_LATENCY_SAMPLING_RATE", "1e3", "message_latency_sampling_rate", 1e3),
        ("HYPERACTOR_REMOTE_STOP_GRACE_PERIOD", "1m", "stop_grace_period", "1m"),
        ("MONARCH_TOKIO_WORKER_THREADS", "3", "tokio_worker_threads", 3),
        ("MONARCH_SHM_THRESHOLD", "1", "shm_threshold", 1),
        ("PYSPY_BIN", " q ", "pyspy_bin", " q "),
    ],
)
def test_environment_variables(variable, text, name, read):
    if read is None:
        read = BindSpec(ChannelTransport.TcpWithLocalhost)
    values = Settings({variable: text})
    assert read == values.get(name)
    assert values.origin(name) == "environment"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HYPERACTOR_FORCE_FILE_LOG", "yes"),
        ("HYPERACTOR_READ_LOG_BUFFER", "-7"),
        ("HYPERACTOR_READ_LOG_BUFFER", "1_000"),
        ("HYPERACTOR_CLEANUP_TIMEOUT", "9"),
        ("HYPERACTOR_MESH_DEFAULT_TRANSPORT", "metatls"),
        ("HYPERACTOR_MESSAGE_LATENCY_SAMPLING_RATE", "much"),
        ("HYPERACTOR_DEFAULT_ENCODING", "xml"),
    ],
)
def test_a_bad_environment_variable_is_named_once_and_has_no_effect(variable, text):
    with pytest.warns(RuntimeWarning, match=f"environment variable {variable}='{text}' is ignored"):
        values = Settings({variable: text})
    assert values.snapshot() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values.reload_from_env()


def test_the_process_reads_its_environment_at_import():
    program = (
        "import os, json, monarch.config as c\n"
        "k = 'cleanup_timeout'\n"
        "seen = [c.get_global_config()[k]]\n"
        "os.environ['HYPERACTOR_CLEANUP_TIMEOUT'] = '8s'\n"
        "seen.append(c.get_global_config()[k])\n"
        "c.reload_config_from_env()\n"
        "seen.append(c.get_global_config()[k])\n"
        "c.reset_config_to_defaults()\n"
        "seen.append(c.get_global_config()[k])\n"
        "print(json.dumps(seen))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"HYPERACTOR_CLEANUP_TIMEOUT": "9s", "PYTHONPATH": ":".join(sys.path)},
    )
    assert json.loads(done.stdout) == ["9s", "9s", "8s", "3s"]


# -- configured


def test_configured_restores_everything_the_block_changed(fresh):
    fresh.configure(tail_log_lines=1)
    with fresh.configured(cleanup_timeout="9s") as merged:
        assert (merged["cleanup_timeout"], merged["tail_log_lines"]) == ("9s", 1)
        assert set(merged) == set(KEYS)
        fresh.configure(tail_log_lines=2, read_log_buffer=3)
        with fresh.configured(tail_log_lines=4):
            assert (fresh.tail_log_lines, fresh.read_log_buffer) == (4, 3)
        assert fresh.tail_log_lines == 2
        fresh.clear_runtime()
        assert fresh.snapshot() == {}
        assert (fresh.tail_log_lines, fresh.read_log_buffer) == (0, KEYS["read_log_buffer"].default)
    assert fresh.snapshot() == {"tail_log_lines": "1"}


def test_configured_restores_after_an_error(fresh):
    with pytest.raises(ZeroDivisionError), fresh.configured(tail_log_lines=1):
        raise ZeroDivisionError
    with pytest.raises(TypeError), fresh.configured(tail_log_lines="x"):
        pytest.fail("the block must not run")
    assert fresh.snapshot() == {}


def test_blocks_that_overlap_do_not_undo_each_other(fresh):
    first, second = fresh.configured(tail_log_lines=1), fresh.configured(read_log_buffer=2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert fresh.snapshot() == {"read_log_buffer": "2"}
    second.__exit__(None, None, None)
    assert fresh.snapshot() == {}


def test_threads_that_configure_leave_attributes_and_layers_in_agreement(fresh):
    names = ["tail_log_lines", "read_log_buffer", "mailbox_limit", "split_max_buffer_size"]
    start = threading.Barrier(len(names))

    def work(name):
        start.wait()
        for number in range(200):
            fresh.configure(**{name: number})
            with fresh.configured(**{name: 1000 + number}):
                pass

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert {name: getattr(fresh, name) for name in names} == {
        name: fresh.get(name) for name in names
    }
    assert len(fresh._runtime) == 1


def test_a_writer_that_was_overtaken_does_not_publish_old_values(fresh, monkeypatch):
    derive = fresh._effective
    overtaking = [{"tail_log_lines": 2}]

    def derive_and_be_overtaken():
        values = derive()
        if overtaking:
            fresh.configure(**overtaking.pop())
        return values

    monkeypatch.setattr(fresh, "_effective", derive_and_be_overtaken)
    fresh.configure(tail_log_lines=1)
    assert fresh.tail_log_lines == 2


# -- forwarding to other processes


def test_a_snapshot_carries_what_differs_from_the_defaults():
    client = Settings({"HYPERACTOR_CLEANUP_TIMEOUT": "9s"})
    client.configure(
        tail_log_lines=3,
        prefix_with_rank=False,
        default_encoding=Encoding.Json,
        default_transport="tcp://127.0.0.1:0",
        message_latency_sampling_rate=0.1,
        tokio_worker_threads=2,
        read_log_buffer=100,
    )
    snapshot = client.snapshot()
    assert "read_log_buffer" not in snapshot
    proc = Settings({"HYPERACTOR_MESH_TAIL_LOG_LINES": "8"})
    proc.install_client_values(json.loads(json.dumps(snapshot)) | {"key_of_a_newer_release": "1"})
    assert client.get_global() | {"tail_log_lines": 8} == proc.get_global()
    assert proc.origin("cleanup_timeout") == "client"


# -- parametrize_config


@parametrize_config(tail_log_lines={10, 20}, prefix_with_rank=[True, False])
def test_parametrize_config_runs_inside_the_configuration(request):
    values = mc.get_global_config()
    name = (
        f"tail_log_lines={values['tail_log_lines']}-prefix_with_rank={values['prefix_with_rank']}"
    )
    assert f"[{name}]" in request.node.name


class TestMethod:
    @parametrize_config_pointwise(tail_log_lines=[1, 2], read_log_buffer=[10, 20])
    def test_parametrize_config_works_on_methods(self):
        values = mc.get_global_config()
        assert values["read_log_buffer"] == 10 * values["tail_log_lines"]


def test_parametrize_config_makes_every_combination_in_a_stable_order():
    @parametrize_config(tail_log_lines={2, 1}, prefix_with_rank={True, False})
    def test(a, b=1, **rest):
        return a, b, rest, settings.tail_log_lines

    (mark,) = test.pytestmark
    assert mark.args[0] == "_config_overrides"
    assert mark.kwargs["ids"] == [
        "tail_log_lines=1-prefix_with_rank=False",
        "tail_log_lines=1-prefix_with_rank=True",
        "tail_log_lines=2-prefix_with_rank=False",
        "tail_log_lines=2-prefix_with_rank=True",
    ]
    assert test(5, _config_overrides=mark.args[1][2], c=6) == (5, 1, {"c": 6}, 2)


def test_parametrize_config_wraps_async_tests():
    @parametrize_config(tail_log_lines={7})
    async def test():
        return settings.tail_log_lines

    body = test(_config_overrides={"tail_log_lines": 7})
    with pytest.raises(StopIteration) as stop:
        body.send(None)
    assert stop.value.value == 7


def test_parametrize_config_refuses_nonsense():
    with pytest.raises(
        ValueError, match=r"^parametrize_config requires at least one config option"
    ):
        parametrize_config()
    with pytest.raises(ValueError, match="pointwise requires at least one config option"):
        parametrize_config_pointwise()
    with pytest.raises(ValueError, match=r"same number of values; got lengths {'a': 1, 'b': 2}"):
        parametrize_config_pointwise(a=[1], b=[1, 2])


# -- durations


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("30s", "30s"),
        ("300s", "5m"),
        ("90s", "1m 30s"),
        ("1h30m", "1h 30m"),
        ("1h 30m", "1h 30m"),
        ("500ms", "500ms"),
        ("1m1s1ms1us1ns", "1m 1s 1ms 1us 1ns"),
        ("1hour 12min 5s", "1h 12m 5s"),
        ("2years 2min 12us", "2years 2m 12us"),
        ("1M", "1month"),
        ("1w", "7days"),
        ("1d", "1day"),
        ("365d", "11months 30days 3h 50m 24s"),
        ("400d", "1year 1month 4days 7h 26m 24s"),
        ("0ms", "0s"),
        ("0", "0s"),
        ("1h1h", "2h"),
        ("1.5h", "1h 30m"),
        ("30.44d", "1month"),
        (" 3 \n s ", "3s"),
        ("5µs", "5us"),
        ("18446744073709551615s", "584542046090years 7months 15days 17h 5m 3s"),
    ],
)
def test_durations_are_normalised(text, canonical):
    assert canonical == format_duration(parse_duration(text))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "value was empty"),
        ("  ", "value was empty"),
        ("x", "expected number at 0"),
        ("-3s", "expected number at 0"),
        ("٣s", "expected number at 0"),
        ("1h foo", "expected number at 3"),
        ("3 s s", "expected number at 4"),
        ("30", "time unit needed, for example 30sec or 30ms"),
        ("1s1", "time unit needed, for example 1sec or 1ms"),
        ("1.s", "invalid character at 1"),
        ("5m,3s", "expected number at 2"),
        ("1S", 'unknown time unit "S"'),
        ("1e3s", 'unknown time unit "e"'),
        ("99999999999999999999s", "number is too large"),
        ("0.5ns", "number is too large or finer than one nanosecond"),
    ],
)
def test_what_is_not_a_duration_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError) as refusal:
        parse_duration(text)
    assert str(refusal.value).startswith(f"Invalid duration format '{text}': {why}")


@given(st.integers(0, 2**64 * 10**9 - 1))
def test_duration_text_round_trips(nanoseconds):
    assert nanoseconds == parse_duration(format_duration(nanoseconds))


@given(st.text(max_size=12))
def test_duration_parser_fails_only_with_value_error(text):
    try:
        nanoseconds = parse_duration(text)
    except ValueError:
        return
    assert 0 <= nanoseconds < 2**64 * 10**9
