"""`Errors`: the error of a healthy rank is not taken for the cause of a failure."""

from __future__ import annotations

from monarch.spmd.errors import Errors


def test_all_hosts_answer_first() -> None:
    errors = Errors(hosts=2)
    errors.raised(3, certain=False)
    assert errors.take_question()
    assert not errors.take_question()
    errors.settled()
    assert errors.take_culprit() is None
    errors.settled()
    assert errors.take_culprit() == 3
    assert errors.take_culprit() is None


def test_an_error_after_the_question_needs_another() -> None:
    errors = Errors(hosts=1)
    errors.raised(3, certain=False)
    assert errors.take_question()
    errors.raised(0, certain=False)
    errors.settled()
    assert errors.take_culprit() == 3
    assert errors.take_question()
    errors.exited(3)
    assert errors.take_culprit() is None
    errors.settled()
    assert errors.take_culprit() == 0


def test_the_next_rank_is_the_cause_if_the_first_ends_well() -> None:
    errors = Errors(hosts=1)
    for rank in (2, 1):
        errors.raised(rank, certain=False)
    assert errors.take_question()
    errors.settled()
    assert errors.take_culprit() == 2
    errors.exited(0)
    assert errors.take_culprit() is None
    errors.exited(2)
    assert errors.take_culprit() == 1


def test_a_rank_that_exits_by_its_error_is_the_cause() -> None:
    errors = Errors(hosts=1)
    errors.raised(0, certain=False)
    errors.raised(1, certain=True)
    assert errors.take_question()
    errors.settled()
    assert errors.take_culprit() is None


def test_there_is_no_question_without_an_error() -> None:
    errors = Errors(hosts=1)
    assert not errors.take_question()
    assert errors.take_culprit() is None
