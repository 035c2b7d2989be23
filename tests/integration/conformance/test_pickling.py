"""Pickling of messages: values sent by value or by name, and the results received."""

import collections
import dataclasses
import decimal
import enum
import functools
import operator
import pathlib
import sys
import threading
from typing import NamedTuple

import pytest

from monarch._rust_bindings.monarch_hyperactor.channel import ChannelTransport
from monarch._rust_bindings.monarch_hyperactor.shape import Region, Shape, Slice
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, Extent, Point, context, endpoint


class Echo(Actor):
    @endpoint
    def echo(self, value):
        return value

    @endpoint
    def describe(self, value):
        return type(value).__name__, len(value)

    @endpoint
    def apply(self, function, *args, **kwargs):
        return function(*args, **kwargs)

    @endpoint
    def same_object_twice(self, pair):
        return pair[0] is pair[1]

    @endpoint
    def keep(self, value):
        self.kept = value

    @endpoint
    def kept_is(self, value):
        return self.kept is value

    @endpoint
    def mutate(self, array):
        array[0] = 77
        return array

    @endpoint
    def make_bytes(self, n):
        return b"\x05" * n

    @endpoint
    def loaded(self, module):
        return module in sys.modules

    @endpoint
    def raise_it(self, make):
        raise make()


@pytest.fixture(scope="module")
def echo(pair):
    return pair.slice(gpus=0).spawn("echo", Echo)


# --- values --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Record:
    name: str
    items: list


class Colour(enum.Enum):
    RED = 1


class Named(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -1,
        2**200,
        1.5,
        1j,
        "",
        "text ✓ \ud800".encode("utf-8", "surrogatepass"),
        "ünï",
        b"",
        b"bytes",
        bytearray(b"mutable"),
        (),
        (1, (2, (3,))),
        [1, [2, [3]]],
        {"a": {1, 2}, "b": frozenset([3])},
        range(5),
        slice(1, 2, 3),
        Ellipsis,
        decimal.Decimal("1.10"),
        pathlib.PurePosixPath("/a/b"),
        Record("r", [1]),
        Colour.RED,
        Named(1, 2),
        collections.OrderedDict(a=1),
        collections.defaultdict(list, a=[1]),
        collections.deque([1, 2], maxlen=2),
        functools.partial(operator.add, 1).args,
        int,
        Record,
    ],
    ids=lambda v: f"{type(v).__name__}",
)
def test_values_make_the_round_trip(echo, value):
    got = echo.echo.call_one(value).get()
    assert got == value
    assert type(got) is type(value)


def test_identity_inside_a_message_is_kept(echo):
    shared = [1]
    assert echo.same_object_twice.call_one((shared, shared)).get() is True
    back = echo.echo.call_one([shared, shared]).get()
    assert back[0] is back[1]


def test_identity_between_messages_is_not_kept(echo):
    value = [1]
    echo.keep.call_one(value).get()
    assert echo.kept_is.call_one(value).get() is False


def test_cycles(echo):
    cycle = [1]
    cycle.append(cycle)
    back = echo.echo.call_one(cycle).get()
    assert back[1] is back


@pytest.mark.parametrize("depth", [100, 300])
def test_deep_structures(echo, depth):
    value = None
    for _ in range(depth):
        value = [value]
    back = echo.echo.call_one(value).get()
    for _ in range(depth):
        (back,) = back
    assert back is None


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 4095, 65_536, 1_000_003, 20_000_000])
def test_buffers_of_every_size(echo, size):
    value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    assert echo.describe.call_one(value).get() == ("bytes", size)
    assert echo.echo.call_one(value).get() == value
    assert echo.make_bytes.call_one(size).get() == b"\x05" * size
    assert echo.echo.call_one(bytearray(value)).get() == bytearray(value)


def test_a_big_buffer_to_everyone(grid):
    value = bytes(range(256)) * 20_000
    mesh = grid.spawn("echo", Echo)
    assert all(got == value for got in mesh.echo.call(value).get().values())


def test_many_big_messages_in_flight(pair):
    mesh = pair.spawn("echo", Echo)
    futures = [mesh.echo.call(bytes([i]) * 1_000_000) for i in range(10)]
    for i, future in enumerate(futures):
        assert [(v[0], len(v)) for v in future.get().values()] == [(i, 1_000_000)] * 2


def test_big_strings_and_many_small_objects(echo):
    text = "ä" * 3_000_000
    assert echo.echo.call_one(text).get() == text
    many = list(range(200_000))
    assert echo.echo.call_one(many).get() == many
    mapping = {str(i): (i, [i]) for i in range(20_000)}
    assert echo.echo.call_one(mapping).get() == mapping


# --- functions and classes -----------------------------------------------------------------------


def module_function(x):
    return x + 1


def test_functions_by_name_and_by_value(echo):
    factor = 3
    assert echo.apply.call_one(module_function, 1).get() == 2
    assert echo.apply.call_one(lambda x: x * factor, 2).get() == 6
    assert echo.apply.call_one(functools.partial(operator.mul, 5), 4).get() == 20

    def local(x, *, y):
        return module_function(x) + y

    assert echo.apply.call_one(local, 1, y=2).get() == 4


def test_functions_come_back(echo):
    add = echo.apply.call_one(lambda n: lambda x: x + n, 5).get()
    assert add(1) == 6


def test_recursive_closures(echo):
    def factorial(n):
        return 1 if n == 0 else n * factorial(n - 1)

    assert echo.apply.call_one(factorial, 5).get() == 120


def test_local_classes_keep_their_identity(echo):
    class Local:
        def __init__(self, x):
            self.x = x

        def double(self):
            return self.x * 2

    back = echo.echo.call_one(Local(4)).get()
    assert type(back) is Local
    assert back.double() == 8
    made = echo.apply.call_one(Local, 5).get()
    assert isinstance(made, Local)
    assert made.x == 5


def test_local_actor_classes(pair):
    base = 10

    class LocalActor(Actor):
        def __init__(self, x):
            self.x = x

        @endpoint
        def add(self, y):
            return base + self.x + y

    assert pair.spawn("local", LocalActor, 1).add.call(2).get().values() == [13, 13]


def test_a_bound_method_of_a_value(echo):
    assert echo.apply.call_one(Counter(3).add, 4).get() == 7


class Counter:
    def __init__(self, n):
        self.n = n

    def add(self, x):
        return self.n + x


def test_unpicklable_values_are_refused(echo):
    for value in (threading.Lock(), (i for i in range(3)), sys._getframe()):
        with pytest.raises(TypeError, match="pickle"):
            echo.echo.call_one(value)


# --- __main__ ------------------------------------------------------------------------------------


def test_classes_of_main_travel_by_value_and_keep_their_identity(program):
    done = program(
        """
        import dataclasses
        from monarch.actor import Actor, endpoint, this_host

        COUNT = 0
        CONFIG = {"base": 5}

        @dataclasses.dataclass
        class Item:
            x: int
            def double(self):
                return Item(helper(self.x))

        class Special(Item):
            pass

        def helper(x):
            return 2 * x + CONFIG["base"]

        class Worker(Actor):
            @endpoint
            def work(self, item):
                assert isinstance(item, Item)
                return item.double()
            @endpoint
            def make(self, x):
                return Special(x)
            @endpoint
            def count(self):
                global COUNT
                COUNT += 1
                return COUNT
            @endpoint
            def module(self):
                return Item.__module__, type(self).__module__

        class Second(Actor):
            @endpoint
            def count(self):
                global COUNT
                COUNT += 1
                return COUNT

        if __name__ == "__main__":
            procs = this_host().spawn_procs({"gpus": 2})
            workers = procs.spawn("workers", Worker)
            for item in workers.work.call(Item(3)).get().values():
                print(type(item) is Item, item.x)
            made = workers.slice(gpus=0).make.call_one(4).get()
            print(type(made) is Special, isinstance(made, Item), made.x)
            print(workers.slice(gpus=1).module.call_one().get())
            print(workers.count.call().get().values(), COUNT)
            workers.slice(gpus=1).count.call_one().get()
            print(workers.count.call().get().values(), COUNT)
            procs.stop().get()
        """
    )
    assert done.stdout.splitlines() == [
        "True 11",
        "True 11",
        "True True 4",
        "('__main__', '__main__')",
        "[1, 1] 0",
        "[2, 3] 0",
    ]


def test_a_program_without_a_main_guard(program):
    done = program(
        """
        from monarch.actor import Actor, endpoint, this_host

        class A(Actor):
            @endpoint
            def f(self, x):
                return x + 1

        print(this_host().spawn_procs({"gpus": 2}).spawn("a", A).f.call(1).get().values())
        """
    )
    assert done.stdout == "[2, 2]\n"


def test_modules_beside_the_program_are_importable(program, tmp_path):
    (tmp_path / "beside.py").write_text("class Thing:\n    value = 5\n\ndef f():\n    return 7\n")
    done = program(
        """
        import beside
        from monarch.actor import Actor, endpoint, this_host

        class A(Actor):
            @endpoint
            def f(self, thing):
                import beside
                return beside.f() + thing.value, type(thing) is beside.Thing

        print(this_host().spawn_procs().spawn("a", A).f.call_one(beside.Thing()).get())
        """
    )
    assert done.stdout == "(12, True)\n"


def test_an_exception_class_of_main_keeps_its_identity(program):
    done = program(
        """
        from monarch.actor import Actor, ActorError, endpoint, this_host

        class MyError(Exception):
            pass

        class A(Actor):
            @endpoint
            def f(self):
                raise MyError("mine", 3)

        a = this_host().spawn_procs().spawn("a", A)
        try:
            a.f.call_one().get()
        except ActorError as error:
            print(type(error.exception) is MyError, error.exception.args)
            print("prog.py" in str(error), 'raise MyError("mine", 3)' in str(error))
        """
    )
    assert done.stdout.splitlines() == ["True ('mine', 3)", "True True"]


# --- exceptions ----------------------------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b


class KeywordOnly(Exception):
    def __init__(self, *, code):
        super().__init__(f"code {code}")
        self.code = code


class WithState(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.extra = {"more": [1, 2]}


class WithReduce(Exception):
    def __init__(self, a, b):
        super().__init__(a, b)
        self.a, self.b = a, b

    def __reduce__(self):
        return WithReduce, (self.a, self.b)


class StrictNew(Exception):
    def __new__(cls, a):
        if not isinstance(a, int):
            raise TypeError("StrictNew wants an int")
        return super().__new__(cls, f"number {a}")

    def __init__(self, a):
        super().__init__(f"number {a}")


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: KeyError("k"), KeyError, "k"),
        (lambda: WithState("state"), WithState, "state"),
        (lambda: WithReduce(1, 2), WithReduce, "2"),
        (lambda: FileNotFoundError(2, "gone", "/x"), FileNotFoundError, "gone"),
        (lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad byte"), UnicodeDecodeError, "bad"),
        (lambda: StopIteration("stop"), (StopIteration, RuntimeError), "stop"),
        (lambda: TimeoutError("time"), TimeoutError, "time"),
    ],
    ids=["KeyError", "WithState", "WithReduce", "OSError", "Unicode", "StopIteration", "Timeout"],
)
def test_exceptions_arrive_whole(echo, make, kind, text):
    with pytest.raises(ActorError, match=text) as caught:
        echo.raise_it.call_one(make).get()
    assert isinstance(caught.value.exception, kind)


def test_the_state_of_an_exception_arrives(echo):
    with pytest.raises(ActorError) as caught:
        echo.raise_it.call_one(lambda: WithState("state")).get()
    assert caught.value.exception.extra == {"more": [1, 2]}
    with pytest.raises(ActorError) as caught:
        echo.raise_it.call_one(lambda: FileNotFoundError(2, "gone", "/x")).get()
    assert caught.value.exception.errno == 2
    assert caught.value.exception.filename == "/x"


ODD = [
    (lambda: TwoArguments("first", "second"), "first and second"),
    (lambda: KeywordOnly(code=7), "code 7"),
    (lambda: StrictNew(5), "number 5"),
]


@pytest.mark.ours("on the reference the caller sees only the TypeError of the constructor")
@pytest.mark.parametrize(("make", "text"), ODD, ids=["two", "keyword", "new"])
def test_exceptions_with_odd_constructors_are_actor_errors(echo, make, text):
    with pytest.raises(ActorError, match=text) as caught:
        echo.raise_it.call_one(make).get()
    assert text in str(caught.value.exception)
    assert echo.echo.call_one(1).get() == 1


@pytest.mark.parametrize(("make", "text"), ODD, ids=["two", "keyword", "new"])
def test_exceptions_with_odd_constructors_are_some_error(echo, make, text):
    with pytest.raises((ActorError, TypeError)):
        echo.raise_it.call_one(make).get()
    assert echo.echo.call_one(1).get() == 1


def test_exception_groups(echo):
    if sys.version_info < (3, 11):
        pytest.skip("no exception groups")
    with pytest.raises(ActorError, match="in the group") as caught:
        echo.raise_it.call_one(
            lambda: ExceptionGroup("group", [ValueError("in the group")])  # noqa: F821
        ).get()
    assert len(caught.value.exception.exceptions) == 1


def test_notes_of_exceptions_are_in_the_text(echo):
    def make():
        error = ValueError("noted")
        error.add_note("a note beside it")
        return error

    if sys.version_info < (3, 11):
        pytest.skip("no notes")
    with pytest.raises(ActorError, match="a note beside it"):
        echo.raise_it.call_one(make).get()


def test_an_error_as_a_value(echo):
    error = echo.echo.call_one(ValueError("just a value")).get()
    assert isinstance(error, ValueError)
    assert error.args == ("just a value",)


def test_supervision_errors_pickle():
    import pickle

    again = pickle.loads(pickle.dumps(SupervisionError("it died", "w.ping()")))
    assert type(again) is SupervisionError
    assert "it died" in str(again)
    assert "w.ping()" in str(again)
    assert again.args == ("it died", "w.ping()")
    assert isinstance(again, RuntimeError)


@pytest.mark.ours("write-only on the reference")
def test_the_endpoint_of_a_supervision_error_can_be_read():
    assert SupervisionError("it died", "w.ping()").endpoint == "w.ping()"
    assert SupervisionError("it died").endpoint is None


def test_actor_errors_are_made_like_any_exception():
    error = ActorError(ValueError("inner"))
    assert error.message == "A remote actor call has failed."
    assert error.exception.args == ("inner",)
    assert isinstance(error, Exception)
    assert "inner" in str(error)


# --- objects of the interface --------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        Extent(["a"], [2]),
        Point(1, Extent(["a"], [2])),
        Slice.new_row_major([2, 3]),
        Shape(["a"], Slice.new_row_major([2])),
        Shape(["a"], Slice.new_row_major([2])).region,
        ChannelTransport.Unix,
    ],
    ids=lambda v: type(v).__name__,
)
def test_shapes_travel(echo, value):
    got = echo.echo.call_one(value).get()
    assert got == value
    assert type(got).__name__ == type(value).__name__
    assert Region is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda mesh: mesh.echo,
        lambda mesh: mesh.echo.call_one(1),
        lambda mesh: context(),
        lambda mesh: context().actor_instance,
    ],
    ids=["endpoint", "future", "context", "instance"],
)
def test_what_does_not_travel(echo, make):
    with pytest.raises(TypeError, match="pickle"):
        echo.echo.broadcast(make(echo))  # (here a call takes a future, and sends its value)


# --- numpy ---------------------------------------------------------------------------------------


def test_numpy_arrays(echo):
    np = pytest.importorskip("numpy")
    for array in (
        np.arange(10),
        np.arange(12, dtype="f4").reshape(3, 4),
        np.asfortranarray(np.arange(12).reshape(3, 4)),
        np.arange(20)[::2],
        np.array([]),
        np.array(5.0),
        np.array(["a", "b"]),
        np.array([1, "x", None], dtype=object),
        np.zeros((300, 1000)),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    ):
        got = echo.echo.call_one(array).get()
        assert got.dtype == array.dtype
        assert got.shape == array.shape
        assert np.array_equal(got, array)


@pytest.mark.parametrize("n", [10, 1_000_000])
def test_numpy_arrays_are_private_and_writable(echo, n):
    np = pytest.importorskip("numpy")
    mine = np.zeros(n)
    got = echo.mutate.call_one(mine).get()
    assert got[0] == 77
    assert mine[0] == 0
    got[1] = 5
    assert got.flags.writeable


def test_a_numpy_array_to_everyone_is_private(grid):
    np = pytest.importorskip("numpy")
    mesh = grid.spawn("echo", Echo)
    array = np.arange(500_000)
    got = mesh.mutate.call(array).get().values()
    assert all(g[0] == 77 and g[1] == 1 and g[-1] == 499_999 for g in got)
    assert array[0] == 0


@pytest.mark.ours("on the reference equal results of a call are one object")
def test_results_of_different_ranks_are_different_objects(pair):
    mesh = pair.spawn("echo", Echo)
    first, second = mesh.echo.call([1]).get().values()
    first.append(2)
    assert second == [1]


def test_numpy_scalars(echo):
    np = pytest.importorskip("numpy")
    got = echo.echo.call_one(np.float32(1.5)).get()
    assert type(got) is np.float32
    assert got == 1.5


def test_kept_arrays_survive_later_messages(pair):
    np = pytest.importorskip("numpy")
    mesh = pair.slice(gpus=0).spawn("keeper", Keeper)
    for i in range(5):
        mesh.keep.call_one(np.full(200_000, i)).get()
    assert mesh.first_values.call_one().get() == [0, 1, 2, 3, 4]
    mine = [mesh.echo.call_one(np.full(200_000, i)).get() for i in range(5)]
    assert [int(m[-1]) for m in mine] == [0, 1, 2, 3, 4]


class Keeper(Actor):
    def __init__(self):
        self.arrays = []

    @endpoint
    def keep(self, array):
        self.arrays.append(array)

    @endpoint
    def first_values(self):
        return [int(a[0]) for a in self.arrays]

    @endpoint
    def echo(self, array):
        return array


# --- torch ---------------------------------------------------------------------------------------


def test_torch_tensors(echo):
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.arange(10),
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor(5.0),
        torch.zeros(0),
        torch.randn(300, 1000),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
    ):
        got = echo.echo.call_one(tensor).get()
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert torch.equal(got, tensor)


def test_a_torch_tensor_twice_in_a_message_is_one_tensor(echo):
    torch = pytest.importorskip("torch")
    base = torch.zeros(4)
    first, second = echo.echo.call_one((base, base)).get()
    assert first is second
    first[1] = 5
    assert base[1] == 0


@pytest.mark.ours("the reference cannot load a bare storage")
@pytest.mark.parametrize("n", [0, 5, 100_000], ids=["empty", "short", "long"])
def test_torch_storages(echo, n):
    """As an argument and as a result, in any place of a message."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(float(n))
    storage = tensor.untyped_storage()
    typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.float32, _internal=True)
    assert torch.equal(_of_storage(torch, echo.echo.call_one(storage).get()), tensor)
    back = echo.echo.call_one({"parts": [storage, (typed, tensor, storage)]}).get()["parts"]
    bare, (wrapped, view, again) = back
    assert bare is again
    assert type(bare) is torch.storage.UntypedStorage
    assert type(wrapped) is torch.storage.TypedStorage
    assert wrapped.dtype is torch.float32
    assert torch.equal(view, tensor)
    for found in (bare, wrapped._untyped_storage):
        assert torch.equal(_of_storage(torch, found), tensor)
    bare.fill_(1)
    assert torch.equal(tensor, torch.arange(float(n)))


@pytest.mark.ours("the reference cannot load a bare storage")
def test_two_tensors_of_one_storage(echo):
    torch = pytest.importorskip("torch")
    base = torch.arange(50_000)
    parts = [base[:10], base[40_000:], base.untyped_storage(), base]
    *tensors, storage, whole = echo.echo.call_one(parts).get()
    assert torch.equal(tensors[0], base[:10])
    assert torch.equal(tensors[1], base[40_000:])
    assert torch.equal(whole, base)
    assert torch.equal(_of_storage(torch, storage, torch.int64), base)


def _of_storage(torch, storage, dtype=None):
    return torch.empty(0, dtype=dtype or torch.float32).set_(storage)


def test_torch_parameters_and_modules(echo):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(3, 2)
    got = echo.echo.call_one(model).get()
    assert torch.equal(got.weight, model.weight)
    assert got.weight.requires_grad
    state = echo.echo.call_one(model.state_dict()).get()
    assert torch.equal(state["bias"], model.bias)
    assert echo.echo.call_one(torch.float32).get() is torch.float32
    assert echo.echo.call_one(torch.device("cpu")).get() == torch.device("cpu")


@pytest.mark.parametrize("n", [10, 1_000_000])
def test_torch_tensors_are_private(echo, n):
    torch = pytest.importorskip("torch")
    mine = torch.zeros(n)
    got = echo.mutate.call_one(mine).get()
    assert got[0] == 77
    assert mine[0] == 0
    got[1] = 5
    assert mine[1] == 0


def test_torch_is_imported_only_where_needed(program):
    done = program(
        """
        import sys
        from monarch.actor import Actor, endpoint, this_host

        class A(Actor):
            @endpoint
            def loaded(self):
                return "torch" in sys.modules

        a = this_host().spawn_procs().spawn("a", A)
        print(a.loaded.call_one().get(), "torch" in sys.modules)
        """
    )
    assert done.stdout == "False False\n"
