"""Test doubles: patch_actor replaces a class wherever it is spawned."""

import asyncio

import pytest

from monarch._src.actor.mock import patch_actor
from monarch.actor import Actor, endpoint, this_host, this_proc


class Service(Actor):
    def __init__(self, x=0):
        self.x = x

    @endpoint
    def ask(self):
        return "real", self.x


class MockService(Actor):
    def __init__(self, x=0):
        self.x = x

    @endpoint
    def ask(self):
        return "mock", self.x

    @endpoint
    def only_in_mock(self):
        return "only here"


class OtherMock(Actor):
    def __init__(self, x=0):
        pass

    @endpoint
    def ask(self):
        return "other", 0


class Client(Actor):
    """An actor that spawns the service itself."""

    def __init__(self):
        self.service = this_proc().spawn("service", Service, 7)

    @endpoint
    def ask(self):
        return self.service.ask.call_one().get()


class ClientWithProcs(Actor):
    @endpoint
    def ask(self):
        procs = this_host().spawn_procs()
        answer = procs.spawn("service", Service, 8).ask.call_one().get()
        procs.stop().get()
        return answer


def test_the_mock_is_spawned_inside_the_block_only(single):
    with patch_actor(Service, MockService):
        inside = single.spawn("service", Service, 1)
    outside = single.spawn("service", Service, 2)
    assert inside.ask.call_one().get() == ("mock", 1)
    assert inside.only_in_mock.call_one().get() == "only here"
    assert outside.ask.call_one().get() == ("real", 2)


def test_other_classes_are_left_alone(single):
    with patch_actor(Service, MockService):
        assert single.spawn("other", OtherMock).ask.call_one().get() == ("other", 0)


def test_nested_patches_restore(single):
    with patch_actor(Service, MockService):
        with patch_actor(Service, OtherMock):
            assert single.spawn("s", Service).ask.call_one().get()[0] == "other"
        assert single.spawn("s", Service).ask.call_one().get()[0] == "mock"
    assert single.spawn("s", Service).ask.call_one().get()[0] == "real"


def test_an_exception_restores(single):
    with pytest.raises(ZeroDivisionError), patch_actor(Service, MockService):
        raise ZeroDivisionError
    assert single.spawn("s", Service).ask.call_one().get()[0] == "real"


def test_async_block(single):
    async def main():
        async with patch_actor(Service, MockService):
            return await single.spawn("s", Service).ask.call_one()

    assert asyncio.run(main()) == ("mock", 0)
    assert single.spawn("s", Service).ask.call_one().get()[0] == "real"


def test_decorator(single):
    @patch_actor(Service, MockService)
    def decorated(x):
        return single.spawn("s", Service, x).ask.call_one().get()

    assert decorated(3) == ("mock", 3)
    assert single.spawn("s", Service).ask.call_one().get()[0] == "real"
    assert decorated(4) == ("mock", 4)


def test_async_decorator(single):
    @patch_actor(Service, MockService)
    async def decorated():
        return await single.spawn("s", Service).ask.call_one()

    assert asyncio.run(decorated()) == ("mock", 0)


def test_procs_spawned_inside_the_block_know_the_patch():
    with patch_actor(Service, MockService):
        procs = this_host().spawn_procs()
        assert procs.spawn("client", Client).ask.call_one().get() == ("mock", 7)
        assert procs.spawn("client", ClientWithProcs).ask.call_one().get() == ("mock", 8)
        procs.stop().get()


def test_procs_spawned_before_the_block_do_not(single):
    with patch_actor(Service, MockService):
        assert single.spawn("client", Client).ask.call_one().get() == ("real", 7)
