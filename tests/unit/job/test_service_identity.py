"""Identities of hosts: made, passed on in variables, found by rank."""

from __future__ import annotations

import pytest

from monarch._engine.base.worker_address import parse_worker_address
from monarch.job import (
    SERVICE_PROC_IDS_ENV,
    SERVICE_PROC_RANK_ENV,
    deserialize_service_proc_ids,
    new_service_proc_id,
    ranked_service_proc_id_from_env,
    serialize_service_proc_ids,
    service_proc_addr,
    service_proc_addrs,
)
from monarch.job.service_identity import allocate_service_proc_ids


def test_identities_are_new_and_consecutive() -> None:
    assert new_service_proc_id() != new_service_proc_id()
    ids = allocate_service_proc_ids(3)
    numbers = [one.uid.instance_value or 0 for one in ids]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
    assert {one.label for one in ids} == {"service"}
    assert allocate_service_proc_ids(0) == []
    with pytest.raises(ValueError, match="must not be negative"):
        allocate_service_proc_ids(-1)


def test_addresses_have_identities_in_front() -> None:
    ids = allocate_service_proc_ids(2)
    urls = ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"]
    assert service_proc_addrs(urls, ids) == [f"{i}@{u}" for i, u in zip(ids, urls, strict=True)]
    assert service_proc_addr(urls[0], None) == urls[0]
    assert service_proc_addrs(urls, None) == urls
    assert parse_worker_address(service_proc_addr(urls[0], ids[0])).url == urls[0]
    with pytest.raises(ValueError, match="there are 2 addresses and 1 identities"):
        service_proc_addrs(urls, ids[:1])


def test_a_host_finds_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = allocate_service_proc_ids(2)
    assert ranked_service_proc_id_from_env() is None
    monkeypatch.setenv(SERVICE_PROC_IDS_ENV, serialize_service_proc_ids(ids))
    assert ranked_service_proc_id_from_env() is None
    monkeypatch.setenv(SERVICE_PROC_RANK_ENV, "1")
    assert ranked_service_proc_id_from_env() == ids[1]
    monkeypatch.setenv("SLURM_NODEID", "0")
    assert ranked_service_proc_id_from_env(rank_env="SLURM_NODEID") == ids[0]


@pytest.mark.parametrize("rank", ["2", "-1", "", "one"])
def test_a_rank_without_identity_is_an_error(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv(
        SERVICE_PROC_IDS_ENV, serialize_service_proc_ids(allocate_service_proc_ids(2))
    )
    monkeypatch.setenv(SERVICE_PROC_RANK_ENV, rank)
    with pytest.raises(ValueError, match=f"RANK is '{rank}', and there are 2 identities"):
        ranked_service_proc_id_from_env()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '["a b"]', '["service<0>"]', '"service<2>"'])
def test_other_texts_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(ValueError, match=r"expected a JSON list|Expecting value|invalid proc id"):
        deserialize_service_proc_ids(text)
    monkeypatch.setenv(SERVICE_PROC_IDS_ENV, text)
    monkeypatch.setenv(SERVICE_PROC_RANK_ENV, "0")
    with pytest.raises(ValueError, match=f"^{SERVICE_PROC_IDS_ENV} cannot be read"):
        ranked_service_proc_id_from_env()
