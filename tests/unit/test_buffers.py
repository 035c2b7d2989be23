"""`Buffer` and `FrozenBuffer`."""

from __future__ import annotations

import array
import io
import pickle
import sys

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._engine.base.settings import settings
from monarch._reference.buffers import Buffer, FrozenBuffer


def frozen(*pieces):
    buffer = Buffer()
    for piece in pieces:
        buffer.write(piece)
    return buffer.freeze()


def test_write_gives_lengths_and_freeze_empties():
    buffer = Buffer()
    strided = memoryview(b"abcdef")[::2]
    numbers = array.array("i", [1, 2])
    pieces = [b"abc", bytearray(b"de"), memoryview(b"fgh"), numbers, strided, b""]
    assert [buffer.write(piece) for piece in pieces] == [3, 2, 3, 8, 3, 0]
    assert len(buffer) == 19
    assert buffer.freeze().read() == b"abcdefgh" + numbers.tobytes() + b"ace"
    assert len(buffer) == 0
    assert len(buffer.freeze()) == 0


@pytest.mark.parametrize("value", ["x", 3, None])
def test_only_bytes_are_written(value):
    buffer = Buffer()
    kind = type(value).__name__
    message = f"^memoryview: a bytes-like object is required, not '{kind}'$"
    with pytest.raises(TypeError, match=message):
        buffer.write(value)
    assert len(buffer) == 0


def test_large_bytes_are_kept_by_reference_and_everything_else_is_copied():
    large, small = b"l" * 256, b"s" * 255
    mutable = bytearray(b"m" * 1000)
    before = [sys.getrefcount(large), sys.getrefcount(small)]
    buffer = Buffer()
    for piece in (large, small, mutable):
        buffer.write(piece)
    mutable[:] = b"x" * 1000
    assert [sys.getrefcount(large), sys.getrefcount(small)] == [before[0] + 1, before[1]]
    assert buffer.freeze().read() == large + small + b"m" * 1000


def test_the_threshold_is_configurable():
    piece = b"p" * 20
    before = sys.getrefcount(piece)
    with settings.configured(small_write_threshold=20):
        buffer = Buffer()
        buffer.write(piece)
        assert sys.getrefcount(piece) == before + 1
        assert len(buffer) == 20


def test_reading_advances():
    source = frozen(b"line1\nline2\n", b"X" * 300, b"\nend")
    assert source.read(2) == b"li"
    assert source.readline() == b"ne1\n"
    assert source.readline(3) == b"lin"
    assert source.readline(100) == b"e2\n"
    assert len(source) == 304
    target = bytearray(10)
    assert (source.readinto(target), target) == (10, bytearray(b"X" * 10))
    assert source.readline() == b"X" * 290 + b"\n"
    assert source.readinto(target) == 3
    assert target == b"end" + b"X" * 7
    assert (source.read(), source.readline(), source.readinto(target), len(source)) == (
        b"",
        b"",
        0,
        0,
    )


def test_readinto_needs_a_writable_target():
    source = frozen(b"abcdef")
    with pytest.raises(BufferError, match="cannot write to read-only buffer"):
        source.readinto(bytes(3))
    target = array.array("h", [0])
    assert (source.readinto(target), target.tobytes(), len(source)) == (2, b"ab", 4)


def test_the_buffer_protocol_exports_the_unread_part():
    source = frozen(b"skip", pickle.dumps([1, 2]))
    source.read(4)
    assert pickle.loads(source) == [1, 2]
    with memoryview(source) as view:
        assert (view.nbytes, view.contiguous) == (len(source), True)
        with pytest.raises(BufferError):
            source.read(1)
    assert bytes(source) == pickle.dumps([1, 2])


def test_text_shows_the_unread_part():
    source = frozen(b"a\n\x00\xff\"'\\")
    source.read(1)
    assert str(source) == r'''b"\n\x00\xff\"'\\"'''
    assert repr(source) == "<FrozenBuffer, 6 bytes unread>"


@pytest.mark.parametrize("pickler", [pickle.Pickler, cloudpickle.Pickler])
def test_picklers_write_and_unpicklers_read(pickler):
    value = {"a": [1, 2], "b": b"z" * 1_000_000}
    buffer = Buffer()
    pickler(buffer, protocol=5).dump(value)
    pickler(buffer, protocol=5).dump("second")
    source = buffer.freeze()
    assert value == pickle.Unpickler(source).load()
    assert pickle.Unpickler(source).load() == "second"


def test_classes_claim_the_path_programs_know():
    modules = {Buffer.__module__, FrozenBuffer.__module__}
    assert modules == {"monarch._rust_bindings.monarch_hyperactor.buffers"}


@given(
    st.lists(st.binary(max_size=400).map(lambda data: data.replace(b"a", b"\n")), max_size=6),
    st.lists(st.tuples(st.sampled_from(["read", "readline"]), st.integers(-1, 500)), max_size=12),
)
def test_reads_like_a_file(pieces, reads):
    source, model = frozen(*pieces), io.BytesIO(b"".join(pieces))
    for method, size in reads:
        assert getattr(model, method)(size) == getattr(source, method)(size)
    assert len(source) == len(model.getbuffer()) - model.tell()
