"""Objects to payloads and back: by name or by value, large buffers separately, errors unchanged."""

from __future__ import annotations

import array
import collections
import copyreg
import datetime as dt
import decimal
import enum
import fractions
import io
import pickle
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.wire import codec
from monarch._engine.wire.bulk import BULK, is_bulk
from monarch._engine.wire.codec import (
    Payload,
    decode,
    encode,
    encode_call,
    encode_result,
    register_reducer,
)

THRESHOLD = 65536
NEVER = 1 << 62


def arrive(payload: Payload) -> Any:
    """Decode a payload as another process does, which has its own memory."""
    stream = b"".join(bytes(chunk) for chunk in payload.chunks)
    return decode(stream, [bytearray(buffer) for buffer in payload.buffers])


def there(obj: Any, threshold: int = THRESHOLD) -> Any:
    return arrive(encode(obj, threshold))


class Colour(enum.Enum):
    RED = 1


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]

    def method(self) -> Any:
        return self.value


class Pair(NamedTuple):
    left: int
    right: int


# -- plain ---------------------------------------------------------------------------------------

PLAIN = [
    None,
    True,
    -1,
    1 << 200,
    0.1,
    float("inf"),
    1j,
    "text \ud800",
    b"",
    b"bytes",
    bytearray(b"mutable"),
    (),
    (1,),
    [[], {}],
    {"key": {1: 2}},
    {1, 2},
    frozenset({3}),
    range(3),
    slice(1, 2, 3),
    ...,
    Colour.RED,
    Plain([1]),
    Pair(1, 2),
    dt.datetime(2020, 1, 2, tzinfo=dt.timezone.utc),
    decimal.Decimal("0.1"),
    fractions.Fraction(1, 3),
    collections.OrderedDict(a=1),
    collections.deque([1], 5),
    array.array("d", [1.0]),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values(value: Any) -> None:
    for threshold in (0, THRESHOLD, NEVER):
        found = there(value, threshold)
        assert (type(found), found) == (type(value), value)


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.binary())


@given(
    st.lists(SCALARS, max_size=5),
    st.dictionaries(st.text(max_size=3), SCALARS),
    st.sampled_from([0, 1, 16, THRESHOLD]),
)
def test_calls_and_results_of_scalars(args: list[Any], kwargs: Any, threshold: int) -> None:
    assert arrive(encode_call(tuple(args), kwargs, threshold)) == (tuple(args), kwargs)
    for value in args:
        assert arrive(encode_result(value, threshold)) == value


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000])
def test_any_number_of_arguments(count: int) -> None:
    args = tuple(range(count))
    assert arrive(encode_call(args, {}, THRESHOLD)) == (args, {})


def test_small_payloads_are_one_stream_and_big_ones_are_not_joined() -> None:
    small, big = encode("x", THRESHOLD), encode([b"x" * THRESHOLD], THRESHOLD)
    assert small.stream is not None
    assert decode(small.stream) == "x"
    assert small.nbytes == len(small.stream)
    assert big.stream is None
    assert big.nbytes == sum(map(len, big.chunks)) > THRESHOLD


def test_a_stream_just_below_the_threshold_is_small() -> None:
    overhead = encode([b"x" * 1000], NEVER).nbytes - 1000
    for size, small in ((THRESHOLD - overhead - 1, True), (THRESHOLD - overhead, False)):
        payload = encode([b"x" * size], THRESHOLD)
        assert (payload.nbytes < THRESHOLD, payload.stream is not None) == (small, small)


def test_big_bytes_inside_containers_are_not_copied() -> None:
    data = b"x" * 1_000_000
    payload = encode([data], THRESHOLD)
    assert any(chunk is data for chunk in payload.chunks)


def test_one_object_twice_arrives_as_one() -> None:
    shared = [1]
    left, right = there((shared, shared))
    assert left is right


def test_a_cycle() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    found = there(cycle)
    assert found[0] is found


def test_subclasses_of_scalars_stay_what_they_are() -> None:
    class Text(str):
        __slots__ = ()

    class Bytes(bytes):
        pass

    for value in (Text("x"), Bytes(b"x"), Bytes(b"x" * BULK)):
        for payload in (encode_call((value,), {}, THRESHOLD), encode_result(value, THRESHOLD)):
            found = arrive(payload)
            found = found[0][0] if isinstance(found, tuple) else found
            assert (type(found).__name__, found) == (type(value).__name__, value)


# -- by name and by value ------------------------------------------------------------------------


def uses_cloudpickle(obj: Any) -> bool:
    try:
        codec._Pickler(codec._Chunks(), 5).dump(obj)
    except codec._ByValue:
        return True
    return False


@pytest.mark.parametrize(
    "obj",
    [len, Plain, Plain.method, Plain(Colour.RED), collections.OrderedDict, test_a_cycle, Colour],
    ids=lambda obj: getattr(obj, "__qualname__", "an object"),
)
def test_what_can_be_imported_travels_by_name(obj: Any) -> None:
    assert not uses_cloudpickle(obj)
    assert b"cloudpickle" not in b"".join(encode(obj, NEVER).chunks)
    assert there(obj) == obj


def test_functions_and_classes_that_cannot_be_imported_travel_by_value() -> None:
    factor = 3

    def times(value: int) -> int:
        return value * factor

    class Local:
        value = times(2)

    assert uses_cloudpickle(times)
    assert there(times)(2) == 6
    assert there([lambda: factor])[0]() == 3
    assert there(Local)().value == 6
    assert there(Local()).value == 6


def test_code_that_travels_by_value_keeps_the_name_of_its_file() -> None:
    """cloudpickle has dropped it since 3.1.3; here its reducer is one that does so."""
    code = compile("1", "there.py", "exec")
    reduced = codec._with_file(lambda _: (tuple, (1, b"x", "<dynamic-code>", "name")), code)
    assert reduced == (tuple, (1, b"x", "there.py", "name"))
    function = types.FunctionType(compile("lambda: 1", "there.py", "eval").co_consts[0], {})
    function.__module__ = "__main__"
    assert there(function).__code__.co_filename == "there.py"


def test_a_function_whose_name_leads_to_another_travels_by_value() -> None:
    """A decorator or a reload leaves such functions."""

    def impostor() -> str:
        return "impostor"

    impostor.__module__, impostor.__qualname__ = __name__, "test_a_cycle"
    assert there(impostor)() == "impostor"


def test_modules_registered_by_value_travel_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("codec_by_value")
    exec("def answer(): return 42\nclass Thing: pass", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert not uses_cloudpickle(module.answer)
    cloudpickle.register_pickle_by_value(module)
    try:
        assert uses_cloudpickle(module.answer)
        assert uses_cloudpickle(module.Thing())
        data = b"".join(encode(module.answer, NEVER).chunks)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    monkeypatch.delitem(sys.modules, module.__name__)
    assert decode(data)() == 42


def test_what_lives_in_main_travels_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's main program may have a different object under that name."""

    def mine() -> str:
        return "mine"

    mine.__module__, mine.__qualname__ = "__main__", "mine"
    monkeypatch.setattr(sys.modules["__main__"], "mine", mine, raising=False)
    data = b"".join(encode(mine, NEVER).chunks)
    monkeypatch.setattr(sys.modules["__main__"], "mine", None)
    assert decode(data)() == "mine"


def test_the_script_of_a_child_of_multiprocessing_travels_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the child it belongs to a module that the receiver lacks."""
    script = types.ModuleType("__mp_main__")
    exec("class Thing: answer = 42", vars(script))
    exec("def function(): return Thing.answer", vars(script))
    with monkeypatch.context() as child:
        child.setattr(codec, "_by_value_class", None)
        child.setattr(cloudpickle.cloudpickle, "_PICKLE_BY_VALUE_MODULES", set())
        for name in ("__main__", "__mp_main__"):
            child.setitem(sys.modules, name, script)
        data = b"".join(encode((script.Thing(), script.function), NEVER).chunks)
    thing, function = decode(data)
    assert (thing.answer, function()) == (42, 42)


def test_a_class_that_comes_home_stays_as_it_is() -> None:
    script: dict[str, Any] = {"__name__": "__main__", "level": 1}
    exec("class Thing:\n    def level(self): return level", script)
    data = b"".join(encode(script["Thing"](), NEVER).chunks)
    script["level"] = 2
    script["Thing"].name = "new"
    thing = decode(data)
    assert type(thing) is script["Thing"]
    assert (thing.level(), thing.name) == (2, "new")


def test_a_class_from_elsewhere_follows_its_definition() -> None:
    program = """
import sys
from monarch._engine.wire.codec import encode
class Thing:
    value = 1
for Thing.value in (1, 2):
    sys.stdout.buffer.write(b"".join(encode(Thing, 1 << 62).chunks))
"""
    child = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    stream = io.BytesIO(child.stdout)
    first = pickle.load(stream)
    assert first.value == 1
    again = decode(b"".join(encode(first, NEVER).chunks))  # the received object can be sent on, too
    assert pickle.load(stream) is again is first
    assert first.value == 2


def test_buffers_stay_apart_when_cloudpickle_does_the_rest() -> None:
    data = np.arange(100_000)
    payload = encode((lambda: 1, data), THRESHOLD)
    assert len(payload.buffers) == 1
    function, found = arrive(payload)
    assert function() == 1
    assert np.array_equal(found, data)


def test_plain_arguments_do_not_load_cloudpickle() -> None:
    program = (
        "import sys; from monarch._engine.wire.codec import *;"
        "encode_call((1, 'x', [2.0]), {'k': b'v'}, 65536); encode_result({'a': 1}, 65536);"
        "print('cloudpickle' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "False\n"


# -- what cannot be pickled ----------------------------------------------------------------------


class Refuses:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


class Mine(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), Mine("m"), OSError(2, "gone"), ZeroDivisionError(), KeyboardInterrupt()],
    ids=repr,
)
def test_an_error_while_pickling_is_the_callers(error: BaseException) -> None:
    for obj in (Refuses(error), [Refuses(error)], {"k": (lambda: 1, Refuses(error))}):
        with pytest.raises(type(error)) as caught:
            encode(obj, THRESHOLD)
        assert caught.value is error
    with pytest.raises(type(error)):
        encode_call((1, Refuses(error)), {}, THRESHOLD)
    with pytest.raises(type(error)):
        encode_call((), {"k": Refuses(error)}, THRESHOLD)
    with pytest.raises(type(error)):
        encode_result(Refuses(error), THRESHOLD)


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (threading.Lock, TypeError, "lock"),
        (lambda: (_ for _ in ()), TypeError, "generator"),
        (lambda: threading.local(), TypeError, "local"),
        (sys._getframe, TypeError, "frame"),
        (socket.socket, TypeError, "socket"),
    ],
    ids=["lock", "generator", "local", "frame", "socket"],
)
def test_system_objects_say_what_they_are(
    make: Callable[[], Any], kind: type[Exception], says: str
) -> None:
    obj = make()
    for value in (obj, {"deep": [obj]}):
        with pytest.raises(kind, match=says):
            encode(value, THRESHOLD)
    if isinstance(obj, socket.socket):
        obj.close()


def test_nesting_without_end_is_an_error_and_not_a_crash() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises((RecursionError, pickle.PicklingError)):
        encode(deep, THRESHOLD)


def test_a_failed_attempt_leaves_no_buffers_behind() -> None:
    """Plain pickle set a buffer aside before it met the object that made it give up."""
    data = np.arange(100_000)
    payload = encode((data, lambda: 1), THRESHOLD)
    assert len(payload.buffers) == 1
    assert np.array_equal(arrive(payload)[0], data)


# -- reducers ------------------------------------------------------------------------------------


class Awkward:
    def __reduce__(self) -> Any:
        raise TypeError("not like this")


class MoreAwkward(Awkward):
    pass


def test_a_registered_reducer_is_for_exactly_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "reducers", dict(codec.reducers))
    register_reducer(Awkward, lambda obj: (str, ("awkward",)))
    assert there(Awkward()) == "awkward"
    assert there((lambda: 1, Awkward()))[1] == "awkward"
    with pytest.raises(TypeError, match="not like this"):
        encode(MoreAwkward(), THRESHOLD)


# -- large bytes ---------------------------------------------------------------------------------

SIZES = [0, 1, 1023, 1024, THRESHOLD - 1, THRESHOLD, BULK - 1, BULK, BULK + 1, 5 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_any_size_in_any_place(size: int) -> None:
    data = b"\xa5" * size
    cases = [
        ((data,), {}),
        ((1, data, "x"), {}),
        ((), {"k": data}),
        ((data,), {"k": data, "l": 1}),
        (([data],), {"k": {"d": data}}),
    ]
    for threshold in (THRESHOLD, NEVER):
        for args, kwargs in cases:
            found = arrive(encode_call(args, kwargs, threshold))
            assert found == (args, kwargs)
            assert all(type(value) is bytes for value in found[1].values() if value == data)
        found = arrive(encode_result(data, threshold))
        assert (type(found), found) == (bytes, data)


def address(buffer: Any) -> int:
    return np.frombuffer(buffer, np.uint8).ctypes.data


@pytest.mark.parametrize("size", [BULK, 5 << 20])
def test_large_bytes_stay_out_of_the_stream_without_a_copy(size: int) -> None:
    data = b"\x5a" * size
    for payload in (
        encode_call((data,), {}, THRESHOLD),
        encode_call((), {"k": data}, THRESHOLD),
        encode_result(data, THRESHOLD),
    ):
        (buffer,) = payload.buffers
        assert is_bulk(buffer)
        assert (
            np.frombuffer(buffer, np.uint8).ctypes.data == np.frombuffer(data, np.uint8).ctypes.data
        )
        assert sum(map(len, payload.chunks)) < 1000


def test_a_payload_keeps_its_large_bytes_alive() -> None:
    payload = encode_result(bytes([7]) * (2 << 20), THRESHOLD)
    assert arrive(payload) == bytes([7]) * (2 << 20)


def test_large_bytes_are_new_bytes() -> None:
    """They are built in place through the C API: hash and length must be those of any bytes."""
    data = bytes(range(256)) * (5 << 12)
    found = arrive(encode_result(data, THRESHOLD))
    assert hash(found) == hash(data)
    assert {found: 1}[data] == 1
    assert found[-1:] == b"\xff"
    assert found + b"" == data


# -- arrays --------------------------------------------------------------------------------------


def arrays() -> dict[str, Any]:
    base = np.arange(60_000, dtype=np.float64)
    frozen = base.copy()
    frozen.flags.writeable = False
    return {
        "plain": base,
        "read-only": frozen,
        "fortran": np.asfortranarray(base.reshape(200, 300)),
        "transposed": base.reshape(200, 300).T,
        "reversed": base[::-1],
        "strided": base[::2],
        "view": base[100:50_000],
        "broadcast": np.broadcast_to(np.float64(1), (60_000,)),
        "zero-size": np.zeros((0, 5)),
        "zero-dim": np.array(3.5),
        "big-endian": base.astype(">f8"),
        "half": base.astype(np.float16),
        "complex": base.astype(np.complex128),
        "bool": base > 3,
        "structured": np.zeros(10_000, dtype=[("a", "i4"), ("b", "f8")]),
        "text": np.array(["ä", "bc"] * 20_000),
        "bytes": np.array([b"a", b"bc"] * 20_000),
        "void": np.zeros(60_000, "V3"),
        "datetime": np.zeros(60_000, "M8[ns]"),
        "object": np.array([1, "a", None, [2]], dtype=object),
        "masked": np.ma.array(base, mask=base > 5),
        "matrix-like": base.reshape(200, 300).view(np.recarray),
    }


@pytest.mark.parametrize("threshold", [1, THRESHOLD, NEVER])
@pytest.mark.parametrize("name", list(arrays()))
def test_arrays(name: str, threshold: int) -> None:
    sent = arrays()[name]
    payload = encode(sent, threshold)
    found = arrive(payload)
    assert (type(found), found.dtype, found.shape) == (type(sent), sent.dtype, sent.shape)
    assert np.array_equal(found, sent)
    if name == "masked":
        assert np.array_equal(found.mask, sent.mask)
    if name != "broadcast":
        assert found.flags.writeable == sent.flags.writeable
    if sent.flags.contiguous and name not in ("object", "masked", "datetime", "matrix-like"):
        assert len(payload.buffers) == (sent.nbytes >= max(threshold, 1))


def test_a_view_sends_its_elements_and_not_its_base() -> None:
    base = np.zeros(10_000_000, np.uint8)
    payload = encode(base[10:100_010], THRESHOLD)
    assert 100_000 <= payload.nbytes < 101_000


def test_several_buffers_keep_their_order() -> None:
    sent = [np.full(20_000, n, np.float64) for n in range(5)]
    payload = encode(sent, THRESHOLD)
    assert len(payload.buffers) == 5
    assert payload.nbytes == sum(map(len, payload.chunks)) + 5 * 160_000
    assert [found[0] for found in arrive(payload)] == [0, 1, 2, 3, 4]


def test_one_array_twice_is_sent_once() -> None:
    data = np.zeros(20_000)
    payload = encode((data, data), THRESHOLD)
    assert len(payload.buffers) == 1
    left, right = arrive(payload)
    assert left is right


@pytest.mark.parametrize("writable", [True, False])
def test_pickle_buffers(writable: bool) -> None:
    content = b"\x11" * 100_000
    sent = pickle.PickleBuffer(bytearray(content) if writable else content)
    found = memoryview(there(sent))
    assert found == content
    assert found.readonly is not writable


# -- tensors -------------------------------------------------------------------------------------


def tensors() -> dict[str, Callable[[Any], Any]]:
    return {
        "float32": lambda torch: torch.randn(200, 300),
        "bfloat16": lambda torch: torch.randn(200, 300).bfloat16(),
        "float8": lambda torch: torch.randn(100_000).to(torch.float8_e4m3fn),
        "int64": lambda torch: torch.arange(20_000),
        "uint16": lambda torch: torch.arange(20_000).to(torch.uint16),
        "bool": lambda torch: torch.arange(100_000) % 3 == 0,
        "complex64": lambda torch: torch.randn(200, 300, dtype=torch.complex64),
        "conjugate": lambda torch: torch.randn(200, 300, dtype=torch.complex64).conj(),
        "negative": lambda torch: torch.randn(200, 300, dtype=torch.complex64).conj().imag,
        "expanded": lambda torch: torch.ones(1).expand(100_000),
        "transposed": lambda torch: torch.randn(200, 300).T,
        "channels last": lambda torch: torch.randn(1, 3, 100, 100).to(
            memory_format=torch.channels_last
        ),
        "view": lambda torch: torch.randn(1000, 1000)[3:50],
        "odd offset": lambda torch: torch.arange(100_001, dtype=torch.uint8)[1:],
        "scalar": lambda torch: torch.tensor(3.0),
        "empty": lambda torch: torch.empty(0, 3),
        "with gradient": lambda torch: torch.randn(200, 300, requires_grad=True),
        "not a leaf": lambda torch: torch.randn(200, 300, requires_grad=True) * 2,
        "parameter": lambda torch: torch.nn.Parameter(torch.randn(200, 300)),
        "frozen parameter": lambda torch: torch.nn.Parameter(
            torch.randn(200, 300), requires_grad=False
        ),
        "sparse": lambda torch: torch.eye(100).to_sparse(),
        "quantised": lambda torch: torch.quantize_per_tensor(torch.randn(10), 0.1, 0, torch.qint8),
        "meta": lambda torch: torch.empty(3, 4, device="meta"),
        "from numpy": lambda torch: torch.from_numpy(np.arange(20_000)),
    }


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*", "ignore:.*TypedStorage.*")
@pytest.mark.parametrize("threshold", [THRESHOLD, NEVER])
@pytest.mark.parametrize("name", list(tensors()))
def test_tensors(name: str, threshold: int) -> None:
    torch = pytest.importorskip("torch")
    sent = tensors()[name](torch)
    found = there(sent, threshold)
    assert type(found) is type(sent)
    assert (found.dtype, found.shape, found.layout) == (sent.dtype, sent.shape, sent.layout)
    assert found.requires_grad == sent.requires_grad
    assert found.is_leaf
    if sent.is_meta:
        assert found.is_meta
        return
    left, right = (
        (found.float(), sent.float())
        if sent.dtype == torch.float8_e4m3fn
        else (found.to_dense(), sent.to_dense())
        if sent.is_sparse
        else (found, sent)
    )
    assert torch.equal(left, right)


@pytest.mark.torch
def test_the_memory_of_a_tensor_stays_out_of_the_stream() -> None:
    torch = pytest.importorskip("torch")
    whole = torch.randn(1000, 1000)
    for sent in (whole, whole[3:50], torch.nn.Parameter(whole)):
        payload = encode(sent, THRESHOLD)
        (buffer,) = payload.buffers
        assert buffer.nbytes == sent.numel() * 4
        assert sum(map(len, payload.chunks)) < 2000


@pytest.mark.torch
def test_a_received_tensor_is_ones_own() -> None:
    torch = pytest.importorskip("torch")
    for sent in (torch.zeros(20_000), torch.zeros(2), torch.from_numpy(np.zeros(20_000))):
        found = there(sent)
        found += 1
        assert found.sum() == found.numel()
        assert sent.sum() == 0


@pytest.mark.torch
def test_a_read_only_array_under_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    data = np.arange(20_000)
    tensor = torch.from_numpy(data)
    data.flags.writeable = False
    found = there(tensor)
    found += 1
    assert torch.equal(found, tensor + 1)


@pytest.mark.torch
def test_a_subclass_of_tensor_is_torchs_business() -> None:
    torch = pytest.importorskip("torch")
    sent = torch.zeros(20_000).as_subclass(TaggedTensor(torch))
    found = there(sent)
    assert type(found).__name__ == "Tagged"
    assert torch.equal(found, sent)


def TaggedTensor(torch: Any) -> type:
    class Tagged(torch.Tensor):
        pass

    return Tagged


@pytest.mark.torch
def test_what_hangs_on_a_tensor_comes_along() -> None:
    torch = pytest.importorskip("torch")
    sent = torch.zeros(20_000)
    sent.tag = "mine"
    assert there(sent).tag == "mine"


@pytest.mark.torch
def test_a_module_keeps_its_tied_parameters() -> None:
    torch = pytest.importorskip("torch")
    sent = torch.nn.ModuleList([torch.nn.Linear(200, 200), torch.nn.Linear(200, 200)])
    sent[1].weight = sent[0].weight
    found = there(sent)
    assert found[0].weight is found[1].weight
    assert torch.equal(found[0].weight, sent[0].weight)


# -- storages ------------------------------------------------------------------------------------


def bytes_of(torch: Any, storage: Any) -> list[int]:
    found: list[int] = torch.empty(0, dtype=torch.uint8).set_(storage).tolist()
    return found


@pytest.mark.torch
@pytest.mark.parametrize("threshold", [0, THRESHOLD, NEVER])
@pytest.mark.parametrize("nbytes", [0, 1, 200, 1000, 100_000])
def test_a_storage_arrives_as_its_bytes(nbytes: int, threshold: int) -> None:
    torch = pytest.importorskip("torch")
    sent = (torch.arange(nbytes) % 251).to(torch.uint8).untyped_storage()
    found = there([{"bare": sent}], threshold)[0]["bare"]
    assert type(found) is torch.UntypedStorage
    assert bytes_of(torch, found) == bytes_of(torch, sent)
    before = bytes_of(torch, sent)
    found.fill_(7)
    assert bytes_of(torch, sent) == before


@pytest.mark.torch
def test_the_memory_of_a_storage_stays_out_of_the_stream() -> None:
    torch = pytest.importorskip("torch")
    sent = torch.zeros(100_000).untyped_storage()
    payload = encode([sent, sent], THRESHOLD)
    (buffer,) = payload.buffers
    assert buffer.nbytes == 400_000
    first, second = arrive(payload)
    assert first is second


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64"])
def test_typed_storages_share_theirs_as_before(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    memory = torch.arange(64, dtype=torch.uint8).untyped_storage()
    sent = [
        torch.TypedStorage(wrap_storage=memory, dtype=dtype, _internal=True)
        for dtype in (kind, torch.uint8)
    ]
    found, other = there(sent)
    assert type(found) is torch.TypedStorage
    assert (found.dtype, other.dtype) == (kind, torch.uint8)
    assert found._untyped_storage is other._untyped_storage
    assert bytes_of(torch, found._untyped_storage) == list(range(64))


@pytest.mark.torch
def test_storages_beside_a_function_that_travels_by_value() -> None:
    torch = pytest.importorskip("torch")
    sent = torch.arange(9, dtype=torch.uint8).untyped_storage()
    assert bytes_of(torch, there(lambda: sent)()) == list(range(9))


@pytest.mark.torch
def test_a_storage_without_memory_stays_one() -> None:
    torch = pytest.importorskip("torch")
    found = there(torch.UntypedStorage(12, device="meta"))
    assert (found.device.type, found.nbytes()) == ("meta", 12)


@pytest.mark.torch
@pytest.mark.parametrize("nbytes", [0, 10, 1000])
def test_another_default_device_changes_no_storage(nbytes: int) -> None:
    torch = pytest.importorskip("torch")
    sent = torch.UntypedStorage(nbytes)
    sent.fill_(3)
    with torch.device("meta"):
        found = there(sent)
        empty = there(torch.zeros(0, device="cpu"))
    assert bytes_of(torch, found) == [3] * nbytes
    assert empty.device.type == "cpu"


@pytest.mark.cuda
def test_a_storage_of_a_gpu_arrives_on_the_cpu() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = there(torch.arange(100, dtype=torch.uint8, device="cuda").untyped_storage())
    assert bytes_of(torch, found) == list(range(100))


@pytest.mark.torch
def test_a_class_with_the_name_of_one_of_torch_is_no_storage() -> None:
    torch = pytest.importorskip("torch")
    UntypedStorage = type("UntypedStorage", (), {"__module__": "torch"})
    assert codec.reducer_of(UntypedStorage) is None
    assert codec.reducer_of(torch.UntypedStorage) is not None


class Meta(type):
    """Its classes cannot be hashed, and are equal to anything."""

    def __eq__(cls, other: object) -> bool:
        return True


class Odd(metaclass=Meta):
    pass


def test_a_class_that_cannot_be_hashed_travels_by_name() -> None:
    assert there((Odd, Payload, Odd))[0] is Odd


def test_a_class_whose_objects_were_sent_is_not_kept() -> None:
    class Made(Plain):
        pass

    assert there(Made(1)).value == 1
    assert Made not in codec.reducers
    assert Plain not in codec.reducers


def test_reducers_that_are_registered_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what goes beside a function that travels by value."""
    there(lambda: 0)
    monkeypatch.setitem(copyreg.dispatch_table, Plain, lambda plain: (Plain, (plain.value + 1,)))
    plain, function = there((Plain(1), lambda: 5))
    assert plain.value == 2
    assert function() == 5


def test_a_class_that_travels_by_value_may_have_annotations_with_parameters() -> None:
    """Python 3.10 counts `dict[str, int]` among the types."""

    class Annotated:
        def method(self, counts: dict[str, int]) -> list[str]:
            return list(counts)

    Annotated.method.__annotations__ = {"counts": dict[str, int], "return": list[str]}
    Annotated.__module__ = "__main__"
    assert decode(encode(Annotated, THRESHOLD).stream)().method({"a": 1}) == ["a"]
