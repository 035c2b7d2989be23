"""The activations of a context, which may end in any order."""

from __future__ import annotations

import contextvars
import gc
import weakref

from hypothesis import given
from hypothesis import strategies as st

from monarch._tensors.active import Guard, active, adopt, enter, leave

STEPS = st.lists(
    st.tuples(st.sampled_from(["mesh", "stream", "collection", "end"]), st.integers(0, 20))
)


@given(STEPS)
def test_the_last_one_that_lasts_counts(steps: list[tuple[str, int]]) -> None:
    def walk() -> None:
        lasting: list[tuple[object, str, int | None]] = []
        for kind, number in steps:
            if kind == "end":
                if lasting:
                    leave(lasting.pop(number % len(lasting))[0])
            else:
                value = None if kind == "mesh" and number % 3 == 0 else number
                key = object()
                enter(key, kind, value)
                lasting.append((key, kind, value))
            for name in ("mesh", "stream", "collection"):
                values = [value for _, kind, value in lasting if kind == name]
                assert getattr(active(), name) == (values[-1] if values else None)

    contextvars.Context().run(walk)


def test_contexts_do_not_see_each_other() -> None:
    one, other = contextvars.Context(), contextvars.Context()
    one.run(enter, "key", "mesh", 1)
    copied = one.copy()
    one.run(leave, "key")
    other.run(leave, "key")  # there is no such activation there
    found = [context.run(lambda: active().mesh) for context in (one, other, copied)]
    assert found == [None, None, 1]
    assert active().mesh is None


class _Presence:
    pass


def test_presence_lasts_as_long_as_a_context_has_the_mesh() -> None:
    presence = _Presence()
    seen = weakref.ref(presence)
    context = contextvars.Context()
    context.run(enter, "mesh", "mesh", 1, presence)
    context.run(enter, "none", "mesh", None)  # within: the outer mesh is to come back
    context.run(enter, "stream", "stream", 2)
    del presence
    copied = context.copy()
    context.run(leave, "mesh")
    context.run(leave, "none")
    gc.collect()
    assert seen() is not None  # the copy has it
    del copied
    gc.collect()
    assert seen() is None
    assert context.run(lambda: active().stream) == 2


def test_what_is_active_elsewhere_is_adopted_for_a_while() -> None:
    context = contextvars.Context()
    context.run(enter, "key", "mesh", 1)
    end = adopt(context.run(active))
    assert active().mesh == 1
    end()
    assert active().mesh is None


def test_a_guard_ends_once() -> None:
    ends: list[int] = []
    guard = Guard()
    guard.end = lambda: ends.append(1)
    with guard:
        guard.__exit__()
    guard.__exit__()
    assert ends == [1]
