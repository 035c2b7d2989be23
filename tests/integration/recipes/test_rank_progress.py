"""`progress` without items: one bar of the script that all ranks advance."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from monarch import _spi
from monarch.actor import Actor, SupervisionError, current_rank, endpoint, this_host
from monarch.recipes import ProgressBar, progress, rank_progress
from tests.terminal import Terminal


class Trainer(Actor):
    @endpoint
    def train(self, bar: ProgressBar, batches: int) -> int:
        return sum(bar.track(range(batches)))

    @endpoint
    def advance(self, bar: ProgressBar, *counts: int) -> ProgressBar:
        for count in counts:
            bar.advance(count)
        return bar

    @endpoint
    def advance_in_a_thread(self, bar: ProgressBar, count: int) -> None:
        thread = threading.Thread(target=lambda: [bar.advance() for _ in range(count)])
        thread.start()
        thread.join()

    @endpoint
    def die(self, bar: ProgressBar) -> None:
        bar.advance(3)
        if current_rank().rank == 1:
            os._exit(1)


class AsyncTrainer(Actor):
    @endpoint
    async def train(self, bar: ProgressBar, batches: int) -> int:
        async def numbers() -> AsyncIterator[int]:
            for number in range(batches):
                yield number

        return sum([number async for number in bar.track(numbers())])


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines on stderr, without times."""
    lines = capsys.readouterr().err.splitlines()
    return [re.sub(r" in \d+ s, .*?(/s|each)", "", line) for line in lines]


def test_all_ranks_advance_one_bar(capsys: pytest.CaptureFixture[str]) -> None:
    procs = this_host().spawn_procs({"gpus": 3})
    trainers = procs.spawn("trainers", Trainer)
    others = procs.spawn("others", AsyncTrainer)
    with progress(label="batches", total=28) as bar:
        assert trainers.train.call(bar, 4).get().values() == [6, 6, 6]
        assert others.train.call(bar, 4).get().values() == [6, 6, 6]
        trainers.slice(gpus=0).advance_in_a_thread.call_one(bar, 2).get()
        assert list(bar.track("a")) == ["a"]
        bar.advance()
    assert said(capsys) == ["batches: 28/28"]
    procs.stop().get()


def test_a_bar_is_itself_when_it_comes_back(capsys: pytest.CaptureFixture[str]) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    trainer = procs.spawn("trainers", Trainer)
    with progress() as bar:
        back = trainer.advance.call_one(bar, 1, 2).get()
        back.advance(4)
    assert said(capsys) == ["7"]
    trainer.advance.call_one(bar, 5).get()  # after the end
    bar.advance()
    trainer.advance.call_one(back, 5).get().advance()
    with progress() as other:
        trainer.advance.call_one(other, 1).get()
    assert said(capsys) == ["1"]
    procs.stop().get()


@pytest.mark.failures
def test_the_bar_shows_what_a_lost_rank_has_done(capsys: pytest.CaptureFixture[str]) -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    trainers = procs.spawn("trainers", Trainer)
    with progress(total=10) as bar:
        for call in [trainers.slice(gpus=rank).die.call_one(bar) for rank in (1, 0)]:
            try:
                call.get()
            except SupervisionError:
                bar.advance(0)
    assert said(capsys)[-1] == "6/10"
    procs.stop().get()


def test_an_error_in_the_block(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with progress(total=5) as bar:
            bar.advance(2)
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        fail()
    assert said(capsys) == ["2/5"]
    assert not [thread for thread in threading.enumerate() if "progress" in thread.name]


def test_items_and_ranks_are_two_things() -> None:
    with pytest.raises(TypeError, match=r"use bar\.track\(items\)"):
        progress(range(3)).__enter__()
    with pytest.raises(TypeError, match=r"with progress\(total=\.\.\.\) as bar"):
        list(progress(total=3))


def test_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum goes at once, and then one for all that is advanced in the next tenth of a second."""
    now = 100.0
    sent: list[tuple[float, int]] = []
    later: list[tuple[float, Callable[[], None]]] = []
    monkeypatch.setattr(rank_progress.time, "monotonic", lambda: now)

    def tell(uid: int, name: str, body: bytes) -> bool:
        assert (uid, name) == (7, "progress")
        ident, count = json.loads(body)
        assert ident == 3
        sent.append((now, count))
        return True

    monkeypatch.setattr(_spi, "tell", tell)
    monkeypatch.setattr(_spi, "call_later", lambda delay, call: later.append((delay, call)))
    sender = rank_progress._Sender(7, 3)
    for _ in range(1000):
        sender.add(1)
    assert sent == [(100.0, 1)]
    (delay, call), *others = later
    assert (delay, others) == (pytest.approx(0.1), [])
    now = 100.1
    call()
    assert sent == [(100.0, 1), (100.1, 999)]
    sender.send()
    assert len(sent) == 2
    now = 101.0
    sender.add(5)
    assert sent[2:] == [(101.0, 5)]


SCRIPT = """
import sys
from monarch.actor import Actor, endpoint, this_host
from monarch.recipes import progress

class Trainer(Actor):
    @endpoint
    def train(self, bar, count):
        bar.advance(count)

if __name__ == "__main__":
    trainers = this_host().spawn_procs({"gpus": 2}).spawn("trainers", Trainer)
    with progress(label="steps", total=8) as bar:
        for line in sys.stdin:
            trainers.train.call(bar, int(line)).get()
            print("said", line.strip())
    print("end")
"""


def test_in_a_terminal(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    script = tmp_path / "steps.py"
    script.write_text(SCRIPT)
    screen = Terminal(sys.executable, str(script), TERM="xterm")
    try:
        screen.expect(r"steps.*━.*0/8 in \d+ s")
        screen.type("1\n")
        screen.expect(r"steps.*━.*2/8 in \d+ s, .* left")
        screen.type("3\n")
        screen.expect(r"steps.*━.*8/8 in \d+ s")
        screen.type("\x04")
        screen.expect("end")
        assert screen.process.wait(60) == 0
    finally:
        screen.close()
