"""Saved jobs as JSON: what is kept, what is refused, and which code a file can run."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.job import JobState, JobTrait, job_load, job_loads, savable
from monarch.job.batch import BATCH_VARIABLE, BatchJob


@savable
class Address(NamedTuple):
    host: str
    port: int = 0


@savable
@dataclasses.dataclass(frozen=True)
class Options:
    names: tuple[str, ...]
    where: Address | None = None


class AJob(JobTrait):
    """A kind of job as programs define it."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    def _create(self, client_script: str | None) -> None:
        pass

    def _state(self) -> JobState:
        return JobState({})

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, AJob)

    def _kill(self) -> None:
        pass

    class Inner(JobTrait):
        """Its name has two parts. Abstract, so it cannot be made by calling it."""


class WithoutClient(AJob):
    """Has a connection that is not saved."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        del state["client"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.client = "made again"


def again(value: Any) -> Any:
    job: Any = job_loads(AJob(value=value).dumps())
    return job.value


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$tuple", "$value", "fields"]), inner)
    ),
    max_leaves=20,
)


def kinds(value: Any) -> Any:
    """Return a value together with its types, since ``(1,) != [1]`` but ``1 == True``."""
    if isinstance(value, dict):
        return {key: kinds(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [kinds(one) for one in value]
    return type(value), value


@given(values)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert kinds(again(value)) == kinds(value)


def test_odd_values_come_back() -> None:
    assert math.isnan(again(math.nan))
    assert again([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert again("\udcff /a path that is no UTF-8") == "\udcff /a path that is no UTF-8"
    assert again(Options(("a",), Address("b", 1))) == Options(("a",), Address("b", 1))
    assert type(again((Address("b"),))[0]) is Address


def test_a_field_that_a_later_release_adds_has_its_default() -> None:
    data = AJob(value=Address("b", 1)).dumps().replace(b'"port": 1', b'"host": "c"')
    job: Any = job_loads(data)
    assert job.value == Address("c", 0)


def test_a_job_inside_of_a_job_is_saved() -> None:
    job: Any = job_loads(BatchJob(AJob(x=1)).dumps())
    assert type(job) is BatchJob
    assert type(job._job) is AJob
    assert job._job.x == 1


def test_a_kind_of_job_chooses_what_is_saved() -> None:
    job: Any = job_loads(WithoutClient(client=object(), x=1).dumps())
    assert (job.client, job.x) == ("made again", 1)
    assert b"client" not in WithoutClient(client=object()).dumps()


class Str(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "where", "why"),
    [
        (object(), "value", "of type object"),
        ({"a": [1, {2}]}, r"value\['a'\]\[1\]", "of type set"),
        ({1: 2}, "value", "its key 1 is no str"),
        (Path("x"), "value", "of type PosixPath"),
        (b"x", "value", "of type bytes"),
        (Str("x"), "value", "of type Str"),
        (Options((object(),)), r"value\.names\[0\]", "of type object"),  # type: ignore[arg-type]
        (AJob(inside=object()), r"value\.inside", "of type object"),
    ],
)
def test_an_attribute_that_cannot_be_saved_is_named(value: Any, where: str, why: str) -> None:
    with pytest.raises(
        TypeError, match=rf"^attribute {where} of AJob cannot be saved: .*{why}.* __getstate__"
    ):
        AJob(value=value).dumps()


def test_a_value_inside_of_itself_is_named() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(TypeError, match=r"attribute value of AJob .* it contains itself"):
        AJob(value=value).dumps()


def test_a_job_that_cannot_be_saved_is_ended(tmp_path: Path) -> None:
    job = AJob(value=object())
    with pytest.raises(TypeError, match="attribute value of AJob cannot be saved"):
        job.state(str(tmp_path / "job.pkl"))
    assert not job.active
    assert not (tmp_path / "job.pkl").exists()


def test_a_class_that_cannot_be_found_again_is_refused() -> None:
    class Local(AJob):
        pass

    with pytest.raises(ValueError, match="Local is defined in a function"):
        Local().dumps()
    other = type("AJob", (AJob,), {"__module__": __name__})
    with pytest.raises(ValueError, match=r"test_format:AJob is another class now"):
        other().dumps()
    with pytest.raises(TypeError, match="NotSaved is neither a NamedTuple nor a frozen dataclass"):
        savable(type("NotSaved", (), {}))


def test_a_class_inside_of_another_is_found() -> None:
    data = AJob().dumps().replace(b":AJob", b":AJob.Inner")
    with pytest.raises(TypeError, match="abstract"):
        job_loads(data)


def test_jobs_are_copied_and_pickled_by_programs_themselves() -> None:
    job = pickle.loads(pickle.dumps(AJob(x=1)))
    assert vars(job) == {"x": 1}


SCRIPT = """
import sys
from monarch.job import JobState, JobTrait, job_load

class Mine(JobTrait):
    def _create(self, client_script): self.asked = 1
    def _state(self): return JobState({})
    def can_run(self, spec): return type(spec) is type(self)
    def _kill(self): pass

if __name__ == "__main__":
    job = Mine()
    job.state()
    assert type(job_load()) is Mine
    print(job.apply_id)
"""


def test_the_class_of_a_script_is_found_in_that_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    def run() -> str:
        command = [sys.executable, "train.py"]
        return subprocess.run(
            command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    assert run() == run()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"its class Mine is defined in train.py, and not in the"):
        job_load()


def test_reading_runs_no_code_but_that_of_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that holds no job is imported, as a spec would do, and no object of it is used."""
    (tmp_path / "a_module_of_tests.py").write_text(
        "class Meta(type):\n"
        "    def __call__(cls, *_): raise SystemExit('called')\n"
        "class Thing(metaclass=Meta):\n"
        "    def __setstate__(self, state): raise SystemExit('called')\n"
        "    class Nested:\n"
        "        @property\n"
        "        def x(self): raise SystemExit('called')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("Thing", "Thing.Nested", "Thing.Nested.x"):
        document = {**json.loads(AJob(x=1).dumps()), "class": f"a_module_of_tests:{name}"}
        with pytest.raises((TypeError, ValueError)):
            job_loads(json.dumps(document).encode())
    sys.modules.pop("a_module_of_tests", None)


BASE = AJob(a=(1, 2.5), b={"$x": None}, c=[Address("h")], d="text").dumps()


@given(st.data())
def test_damaged_bytes_are_an_error_or_a_job(data: st.DataObject) -> None:
    """Only ValueError and TypeError are raised for bytes that were changed in some places."""
    content = bytearray(BASE)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=4))
    try:
        job = job_loads(bytes(content))
    except (TypeError, ValueError):
        return
    assert isinstance(job, JobTrait)


@given(
    values, st.sampled_from(["_status", "_apply_id", "_folder", "_components", "x", "__class__"])
)
def test_attributes_of_any_type_are_an_error_or_a_job(value: Any, name: str) -> None:
    document = {
        "pymonarch_job": 3,
        "class": "monarch.job:ProcessJob",
        "attributes": {"_hosts": value, name: value},
    }
    try:
        job = job_loads(json.dumps(document).encode())
    except (TypeError, ValueError):
        return
    assert isinstance(job, JobTrait)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it "):
        job_loads(content)


def test_a_batch_job_serves_its_own_script_only(monkeypatch: pytest.MonkeyPatch) -> None:
    job = BatchJob(AJob())
    at_exit: list[Any] = []
    monkeypatch.setattr("monarch.job.batch.atexit.register", at_exit.append)
    monkeypatch.delenv(BATCH_VARIABLE, raising=False)
    monkeypatch.setattr(AJob, "_is_running", lambda self: True)
    with pytest.raises(RuntimeError, match="a batch job that still runs, for its own script"):
        job.can_run(AJob())
    monkeypatch.setattr(AJob, "_is_running", lambda self: False)
    assert not job.can_run(AJob())
    assert at_exit == []
    monkeypatch.setenv(BATCH_VARIABLE, "1")
    assert job.can_run(AJob())
    assert at_exit == [job._kill]
