"""The debugger without processes: its command language, table, sessions and console."""

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch._debug.commands import (
    HELP,
    Attach,
    Cast,
    CommandError,
    Continue,
    Help,
    ListCommand,
    OneOf,
    Quit,
    parse,
    selects,
)
from monarch._debug.console import BANNER, PROMPT, Console
from monarch._debug.grid import grid
from monarch._debug.io import DebugIO, DebugIOError
from monarch._debug.pauses import Pauses
from monarch._debug.sessions import DebugSessionInfo, DebugSessions

FOREVER = sys.maxsize


class TestParse:
    @pytest.mark.parametrize(
        ("line", "command"),
        [
            ("help", Help()),
            ("h", Help()),
            (" list ", ListCommand()),
            ("l", ListCommand()),
            ("continue", Continue()),
            ("c", Continue()),
            ("quit\r", Quit()),
            ("q", Quit()),
            ("attach b 1", Attach("b", 1)),
            ("a  b   12", Attach("b", 12)),
            ("attach data loader.2 0", Attach("data loader.2", 0)),
            ("attach b 3.2", Attach("b", 3, 2)),
            ("cast b ranks(3.2) n", Cast("b", OneOf(3, 2), "n")),
            ("cast b ranks(1, 3.2) n", Cast("b", [1, OneOf(3, 2)], "n")),
            ("cast b ranks(1) n", Cast("b", 1, "n")),
            ("cast b ranks( 1 ) p x", Cast("b", 1, "p x")),
            ("cast b ranks(1)n", Cast("b", 1, "n")),
            ("cast b ranks(1,4,6) p (1, 2)", Cast("b", [1, 4, 6], "p (1, 2)")),
            ("cast b ranks(1 , 2) n", Cast("b", [1, 2], "n")),
            ("cast b ranks(:) n", Cast("b", range(FOREVER), "n")),
            ("cast b ranks(2:) n", Cast("b", range(2, FOREVER), "n")),
            ("cast b ranks(:4) n", Cast("b", range(4), "n")),
            ("cast b ranks(1:8:2) n", Cast("b", range(1, 8, 2), "n")),
            ("cast b ranks(::3) n", Cast("b", range(0, FOREVER, 3), "n")),
            (
                "cast b ranks(dim1=1:5:2,dim2=3, dim4=(3,6)) p ranks(1)",
                Cast("b", {"dim1": range(1, 5, 2), "dim2": 3, "dim4": [3, 6]}, "p ranks(1)"),
            ),
            ("cast my ranks ranks(g=(1)) n", Cast("my ranks", {"g": 1}, "n")),
        ],
    )
    def test_command(self, line: str, command: object):
        assert parse(line) == command

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("bogus", "unknown command 'bogus'"),
            ("LIST", "unknown command"),
            ("list b", "'list' stands alone"),
            ("attach", "attach <actor_name> <rank>"),
            ("attach b", "attach <actor_name> <rank>"),
            ("attach b x", "attach <actor_name> <rank>"),
            ("attach b -1", "attach <actor_name> <rank>"),
            ("attach b 1.", "attach <actor_name> <rank>"),
            ("cast b ranks(g=0.2) n", "not the session of one"),
            ("cast b ranks(0.2:4) n", "expected a rank"),
            ("attach b " + "9" * 5000, "attach <actor_name> <rank>"),
            ("cast b ranks(" + "9" * 5000 + ") n", "expected a rank"),
            ("cast b ranks(:" + "9" * 5000 + ") n", "expected a rank"),
            ("cast b ranks(1)", "cast <actor_name> ranks"),
            ("cast b rank(1) n", "cast <actor_name> ranks"),
            ("cast ranks(1) n", "cast <actor_name> ranks"),
            ("cast b ranks() n", "expected a rank"),
            ("cast b ranks(-1) n", "'-1'"),
            ("cast b ranks(1,2:3) n", "'1,2:3'"),
            ("cast b ranks(1,) n", "'1,'"),
            ("cast b ranks(1:2:0) n", "step"),
            ("cast b ranks(g=) n", "expected a rank"),
            ("cast b ranks(g=()) n", "expected a rank"),
            ("cast b ranks(g=1,2) n", "'2'"),
            ("cast b ranks(g=1,g=2) n", "twice"),
            ("cast b ranks(1g=1) n", "dim=<which>"),
        ],
    )
    def test_what_is_wrong(self, line: str, says: str):
        with pytest.raises(CommandError) as error:
            parse(line)
        assert says in str(error.value)

    @given(st.text(st.sampled_from("cast attach b ranks(),:=0123dim\t\n\u0661")))
    def test_any_line_is_a_command_or_an_error(self, line: str):
        if line.strip():
            with suppress(CommandError):
                parse(line)

    @given(st.data())
    def test_what_is_written_is_what_is_meant(self, data: st.DataObject):
        number = st.integers(0, 30)
        numbers = st.lists(number, min_size=2, max_size=4)
        ranges = st.builds(range, number, number, st.integers(1, 4))
        dims = st.dictionaries(st.sampled_from(["hosts", "gpus", "x_1"]), number | numbers | ranges)
        ranks = data.draw(number | numbers | ranges | dims.filter(bool))

        def text(some: object, *, inside: bool) -> str:
            if isinstance(some, range):
                return f"{some.start}:{some.stop}:{some.step}"
            if isinstance(some, list):
                return f"({','.join(map(str, some))})" if inside else ", ".join(map(str, some))
            return str(some)

        if isinstance(ranks, dict):
            written = ",".join(f"{dim}={text(some, inside=True)}" for dim, some in ranks.items())
        else:
            written = text(ranks, inside=False)
        assert parse(f"cast b ranks({written}) n") == Cast("b", ranks, "n")


@pytest.mark.parametrize(
    ("ranks", "chosen"),
    [
        (3, [3]),
        ([1, 5, 9], [1, 5]),
        (range(1, FOREVER, 2), [1, 3, 5]),
        ({"hosts": 1}, [3, 4, 5]),
        ({"hosts": 1, "gpus": [0, 2]}, [3, 5]),
        ({"gpus": range(1, 9)}, [1, 2, 4, 5]),
        ({"racks": 0}, []),
    ],
)
def test_selects(ranks: object, chosen: list[int]):
    places = {rank: {"hosts": rank // 3, "gpus": rank % 3} for rank in range(6)}
    assert [rank for rank, coords in places.items() if selects(ranks, rank, coords)] == chosen


def test_grid_without_rows_is_its_heads():
    assert grid(["A", "Line No."], []) == (
        "+-----+------------+\n| A   | Line No.   |\n+=====+============+\n+-----+------------+"
    )


def info(actor_name: str = "b", rank: int = 0) -> DebugSessionInfo:
    return DebugSessionInfo(actor_name, rank, {"g": rank}, "vm", None, None)


async def settle() -> None:
    """Let every task run until it blocks."""
    for _ in range(200):
        await asyncio.sleep(0)


class TestSessions:
    def test_a_stop_makes_it_pending_and_a_line_answers(self):
        async def scene():
            sessions = DebugSessions()
            pending = asyncio.ensure_future(sessions.some())
            number = sessions.start(info())
            await settle()
            assert not pending.done()
            assert sessions.infos() == []

            read = asyncio.ensure_future(sessions.read(number, "> here\n", "m.f", 7))
            await settle()
            assert pending.done()
            assert sessions.infos() == [DebugSessionInfo("b", 0, {"g": 0}, "vm", "m.f", 7)]
            session = sessions.find("b", 0)
            assert session.stopped

            session.send("n")
            assert not session.stopped
            assert await read == "n"
            assert not session.stopped

            sessions.end(number, "")
            sessions.end(number, "")
            assert session.ended
            assert sessions.infos() == []
            with pytest.raises(LookupError):
                await sessions.read(number, "", None, None)

        asyncio.run(scene())

    def test_lines_for_a_busy_rank_are_taken_up_in_order(self):
        async def scene():
            sessions = DebugSessions()
            number = sessions.start(info())
            session = sessions.find("b", 0)
            session.send("1")
            session.send("2")
            assert [await sessions.read(number, "", "f", 1) for _ in range(2)] == ["1", "2"]

        asyncio.run(scene())

    def test_release_drops_lines_and_answers_none_once(self):
        async def scene():
            sessions = DebugSessions()
            number = sessions.start(info())
            session = sessions.find("b", 0)
            read = asyncio.ensure_future(sessions.read(number, "", "f", 1))
            await settle()
            session.send("p x")
            session.release()
            assert sessions.infos() == []
            assert await read is None
            session.send("n")
            assert await sessions.read(number, "", "f", 2) == "n"

        asyncio.run(scene())

    def test_the_oldest_of_one_name_and_rank_is_meant(self):
        async def scene():
            sessions = DebugSessions()
            first, second = sessions.start(info()), sessions.start(info())
            oldest = sessions.find("b", 0)
            sessions.end(first, "")
            assert oldest.ended
            assert not sessions.find("b", 0).ended
            sessions.end(second, "")
            with pytest.raises(LookupError, match="No debug sessions for actor b"):
                sessions.find("b", 0)

        asyncio.run(scene())

    def test_numbers_tell_sessions_of_one_rank_apart(self):
        """A number stays as long as its session, and is free again afterwards."""

        async def scene():
            sessions = DebugSessions()
            keys = [sessions.start(info()) for _ in range(3)]
            third = sessions.find("b", 0, 3)
            sessions.end(keys[1], "")
            assert sessions.find("b", 0, 3) is third
            with pytest.raises(LookupError, match=r"No debug session 0\.2 .*; there is 0, 0\.3"):
                sessions.find("b", 0, 2)
            sessions.start(info())
            assert sessions.find("b", 0, 2).info.place == "0.2"
            assert sessions.select("b", OneOf(0, 3)) == [third]
            assert len(sessions.select("b", 0)) == 3

        asyncio.run(scene())

    def test_a_process_that_exits_takes_its_sessions_along(self):
        async def scene():
            sessions = DebugSessions()
            for peer in (7, 8):
                sessions.start(info(rank=peer), peer)
            sessions.lost(7)
            assert [session.info.rank for session in sessions] == [8]

        asyncio.run(scene())

    def test_a_session_that_waits_for_a_line_is_a_pause(self):
        async def scene():
            pauses = Pauses()
            sessions = DebugSessions(pauses)
            key = sessions.start(replace(info(), function="m.f", lineno=1))
            assert pauses.within(0)[1]
            read = asyncio.ensure_future(sessions.read(key, "", "m.f", 1))
            await settle()
            sessions.find("b", 0).send("n")
            assert await read == "n"
            assert not pauses.within(0)[1]
            read = asyncio.ensure_future(sessions.read(key, "", "m.f", 2))
            await settle()
            assert pauses.within(0)[1]
            sessions.end(key, "")
            assert not pauses.within(0)[1]
            with pytest.raises(LookupError):
                await read

        asyncio.run(scene())

    def test_one_that_has_stopped_is_meant_before_an_older_one(self):
        async def scene():
            sessions = DebugSessions()
            sessions.start(info())
            second = sessions.start(info())
            read = asyncio.ensure_future(sessions.read(second, "", "f", 1))
            await settle()
            sessions.find("b", 0).send("n")
            assert await read == "n"

        asyncio.run(scene())

    def test_the_end_of_a_session_answers_who_waits_for_a_line(self):
        async def scene():
            sessions = DebugSessions()
            number = sessions.start(info())
            read = asyncio.ensure_future(sessions.read(number, "", "f", 1))
            await settle()
            sessions.end(number, "")
            with pytest.raises(LookupError, match="was stopped"):
                await read

        asyncio.run(scene())

    def test_a_debugger_that_comes_late_finds_what_the_last_line_brought(self):
        async def scene():
            sessions = DebugSessions()
            number = sessions.start(info())
            session = sessions.find("b", 0)
            for line in "12":
                session.send(line)
            assert await sessions.read(number, "stopped\n", "f", 1) == "1"
            assert await sessions.read(number, "did 1\n", "f", 1) == "2"
            read = asyncio.ensure_future(sessions.read(number, "did 2\n", "f", 1))
            await settle()
            assert session.take_output() == "did 2\n"
            read.cancel()

        asyncio.run(scene())

    def test_output_is_bounded(self):
        async def scene():
            sessions = DebugSessions()
            number = sessions.start(info())
            for _ in range(100):
                sessions.write(number, "x" * 65536)
            output = sessions.find("b", 0).take_output()
            assert output.startswith("<earlier output is dropped>")
            assert len(output) < 2**21

        asyncio.run(scene())


class Script(DebugIO):
    """A debugger interface that types the test's lines and records the output."""

    def __init__(self):
        self.lines: asyncio.Queue[str | None] = asyncio.Queue()
        self.text = ""

    async def input(self, prompt: str = "") -> str:
        line = await self.lines.get()
        if line is None:
            raise DebugIOError
        return line

    async def output(self, msg: str) -> None:
        self.text += msg

    async def quit(self) -> None:
        pass

    async def type(self, *lines: str | None) -> str:
        """Type lines and return the output once every task blocks again."""
        self.text = ""
        for line in lines:
            self.lines.put_nowait(line)
        await settle()
        return self.text


async def rank(sessions: DebugSessions, number: int, lines: list) -> None:
    """A pdb that echoes each line and exits at ``c``."""
    output = f"{number} stopped\n(Pdb) "
    while True:
        line = await sessions.read(number, output, "m.f", 7)
        lines.append((number, line))
        if line in {None, "c"}:
            break
        output = f"did {line}\n(Pdb) "
    sessions.end(number, "bye\n")


async def play(scene) -> None:
    """Run ``scene(script, lines)`` with two ranks at a breakpoint and a console."""
    sessions, script, lines = DebugSessions(), Script(), []
    ranks = [
        asyncio.ensure_future(rank(sessions, sessions.start(info(rank=r)), lines)) for r in (0, 1)
    ]
    console = asyncio.ensure_future(Console(sessions, script).run())
    await settle()
    assert script.text == BANNER + PROMPT
    await scene(script, lines)
    for task in ranks:
        task.cancel()
    if not console.done():
        await script.type(None)
    await console
    await asyncio.gather(*ranks, return_exceptions=True)


class TestConsole:
    def test_banner(self):
        banner = BANNER.strip().splitlines()[0]
        assert banner == "*" * 24 + " MONARCH DEBUGGER " + "*" * 24

    def test_simple_commands(self):
        async def scene(script, lines):
            assert await script.type("") == PROMPT
            assert await script.type("help") == HELP + PROMPT
            assert await script.type("x") == (
                "Error parsing input: unknown command 'x'; 'help' shows what there is\n" + PROMPT
            )
            table = await script.type("list")
            assert "| b            |      1 | {'g': 1} | vm         | m.f        |" in table
            assert await script.type("quit") == "Quitting debug session...\n"
            assert lines == []

        asyncio.run(play(scene))

    def test_attach_talk_detach_and_come_back(self):
        async def scene(script, lines):
            attached = "Attached to debug session for b 1 (vm)\n"
            left = (
                "Detaching from debug session for b 1 (vm)\n"
                "Detached from debug session for b 1 (vm)\n" + PROMPT
            )
            assert await script.type("attach b 1") == attached + "2 stopped\n(Pdb) "
            assert await script.type("p x") == "did p x\n(Pdb) "
            assert await script.type("detach") == left
            assert await script.type("attach b 1") == (
                attached + "<last pdb output for b 1 follows>\ndid p x\n(Pdb) "
            )
            assert await script.type("c") == "bye\n" + left
            assert lines == [(2, "p x"), (2, "c")]
            assert await script.type("attach b 1") == (
                "Error processing command: No debug session for rank 1 for actor b\n" + PROMPT
            )

        asyncio.run(play(scene))

    def test_all_lines_at_once(self):
        """Lines typed while the rank is busy wait for it, and survive the end of its session."""

        async def scene(script, lines):
            text = await script.type("attach b 0", "n", "n", "c", "attach b 1", "c", "list", "quit")
            assert lines == [(1, "n"), (1, "n"), (1, "c"), (2, "c")]
            assert text.count("Detached from") == 2
            assert text.endswith("+\n" + PROMPT + "Quitting debug session...\n")

        asyncio.run(play(scene))

    def test_cast(self):
        async def scene(script, lines):
            assert await script.type("cast b ranks(g=0:2) n") == PROMPT
            assert lines == [(1, "n"), (2, "n")]
            assert "meant" in await script.type("cast b ranks(7) n")
            assert "meant" in await script.type("cast c ranks(0) n")
            assert (await script.type("attach b 0")).endswith("did n\n(Pdb) ")

        asyncio.run(play(scene))

    def test_continue_releases_all(self):
        async def scene(script, lines):
            assert await script.type("continue") == PROMPT
            assert lines == [(1, None), (2, None)]
            assert "m.f" not in await script.type("list")

        asyncio.run(play(scene))

    def test_lost_connection_leaves_the_rank_where_it_is(self):
        async def scene(script, lines):
            await script.type("attach b 0", None)
            assert lines == []

        asyncio.run(play(scene))
