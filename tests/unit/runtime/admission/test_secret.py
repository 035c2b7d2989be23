"""The secret file: its required owner, permissions and length."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from monarch._engine.runtime.admission import secret
from monarch._engine.runtime.admission.secret import (
    SecretError,
    find_secret,
    settings_of,
    take_settings,
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("MONARCH_JOB_SECRET_FILE", "MONARCH_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def file(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = home / "chosen"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    monkeypatch.setenv("MONARCH_SECRET_FILE", str(path))
    return path


def test_its_text_counts_without_space_around_it(file: Path) -> None:
    key = find_secret()
    file.write_text("  0123456789abcdef")
    assert find_secret() == key
    assert len(key) == 32
    file.write_text("0123456789abcdeF\n")
    assert find_secret() != key


@pytest.mark.parametrize("bit", [0o040, 0o020, 0o010, 0o004, 0o002, 0o001])
def test_a_file_that_is_open_to_others_is_refused(file: Path, bit: int) -> None:
    file.chmod(0o600 | bit)
    with pytest.raises(SecretError, match=f"MONARCH_SECRET_FILE .* chmod 600 {file}"):
        find_secret()
    with pytest.raises(SecretError, match=f"of a job is open to others: chmod 600 {file}"):
        find_secret(str(file))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 65534, 65534)
    with pytest.raises(SecretError, match=f"belongs to another user: {file}"):
        find_secret()


@pytest.mark.parametrize("text", ["", "\n", "0123456789abcde\n", "0123456789abcde" + " " * 16])
def test_a_file_with_less_than_16_characters_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(SecretError, match="less than 16 characters"):
        find_secret()


def test_a_file_that_is_not_there_is_named(file: Path) -> None:
    file.unlink()
    with pytest.raises(SecretError, match=f"{file}: No such file"):
        find_secret()


def test_that_of_the_user_is_made_for_the_user_alone(home: Path) -> None:
    before = os.umask(0)
    try:
        key = find_secret()
    finally:
        os.umask(before)
    path = home / "pymonarch" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert len(path.read_text().strip()) == 64
    assert find_secret() == key
    assert os.listdir(path.parent) == ["secret"]


def test_without_a_directory_for_settings_it_is_in_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(home / "new"))
    find_secret()
    assert (home / "new" / ".config" / "pymonarch" / "secret").exists()


def test_one_that_cannot_be_made_is_named(home: Path) -> None:
    (home / "pymonarch").touch()
    with pytest.raises(SecretError, match=f"{home}/pymonarch/secret cannot be made .*name a file"):
        find_secret()


def test_the_settings_of_another_process_replace_ones_own(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/here")
    found = settings_of({"MONARCH_JOB_SECRET_FILE": "theirs", "HOME": "/there"})
    monkeypatch.setenv("MONARCH_JOB_SECRET_FILE", "ours")
    take_settings(found)
    assert settings_of(os.environ) == found
    assert found["MONARCH_JOB_SECRET_FILE"] == "theirs"
    assert "MONARCH_SECRET_FILE" not in os.environ


def test_of_several_processes_that_make_it_all_have_the_same(home: Path) -> None:
    path = home / "pymonarch" / "secret"
    start, keys = threading.Barrier(4), list[bytes]()

    def make() -> None:
        start.wait()
        secret._make(path)
        keys.append(find_secret())

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*keys}) == 1
    assert len(keys) == 4


def test_what_a_process_left_that_was_killed_is_in_the_way_of_none(home: Path) -> None:
    (home / "pymonarch").mkdir()
    (home / "pymonarch" / f"secret.{os.getpid()}").touch()
    assert len(find_secret()) == 32


def test_a_job_that_was_ended_on_purpose_is_known_to_be(file: Path) -> None:
    assert not secret.is_revoked(str(file))
    for _ in range(2):  # by two scripts
        secret.revoke(str(file))
        assert secret.is_revoked(str(file))
    assert file.exists()
