"""The functions that `monarch profile --wall` prints."""

from __future__ import annotations

from monarch._traces.stacks import ENGINE, Frame, Stacks


def test_actors_that_wait_for_messages_do_not_lead() -> None:
    root, engine = Frame("reward", "", 0), Frame(ENGINE, "", 0)
    select = Frame("select", "/usr/lib/python3.11/selectors.py", 450)
    score = Frame("score", "/home/me/train.py", 7)
    library = Frame("matmul", "/venv/lib/python3.11/site-packages/numpy/core.py", 3)
    stacks = Stacks()
    stacks.add((root, engine), 500)
    stacks.add((root, engine, select), 300)
    stacks.add((root, score), 20)
    stacks.add((root, score, engine), 30)  # it waits for an answer
    stacks.add((root, score, select), 5)
    stacks.add((root, library), 10)
    assert stacks.hottest(9, wall=True) == [(score, 50), (library, 10), (select, 5)]
    assert stacks.idle == 800
    assert stacks.hottest(1) == [(engine, 530)]
