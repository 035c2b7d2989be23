"""Components of jobs: their checks, and what they ask of the features behind them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from monarch._mounts import gather
from monarch._observer import handle
from monarch._spi import settings
from monarch.job.mesh_admin import MeshAdminConfig
from monarch.job.mounts import GatherMountOption, names_of, remote_mount_option
from monarch.job.telemetry import TelemetryConfig


@pytest.mark.parametrize("address", [None, "127.0.0.1:0"])
def test_the_admin_api_has_the_address_of_the_job_or_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    asked: list[str] = []

    def observe(*, admin: str) -> Any:
        asked.append(admin)
        place = SimpleNamespace(admin_url="url", link=lambda url: f"http://{url}")
        return SimpleNamespace(wait=lambda _: place)

    monkeypatch.setattr(handle, "observe", observe)
    state: Any = SimpleNamespace(admin_url=None)
    MeshAdminConfig(address).state(None, state)  # type: ignore[arg-type]
    assert asked == [address or settings.mesh_admin_addr]
    assert state.admin_url == "http://url"


def test_the_limits_of_telemetry() -> None:
    TelemetryConfig(retention_secs=0, snapshot_interval_secs=0.0, dashboard_port=0)
    TelemetryConfig(dashboard_port=65535)
    for bad in ({"retention_secs": -1}, {"snapshot_interval_secs": -0.5}):
        with pytest.raises(ValueError, match="are 0 or more seconds"):
            TelemetryConfig(**bad)  # type: ignore[arg-type]
    for port in (-1, 65536):
        with pytest.raises(ValueError, match="dashboard_port is 0 to 65535"):
            TelemetryConfig(dashboard_port=port)


@pytest.mark.parametrize("meshes", [["a"], ["a", "b"]])
def test_a_directory_of_several_meshes_appears_below_their_names(
    monkeypatch: pytest.MonkeyPatch, meshes: list[str]
) -> None:
    mounted: list[Any] = []
    monkeypatch.setattr(gather, "gather_mount", lambda *arguments: mounted.append(arguments))
    monkeypatch.setattr("monarch.job.mounts._open", {})
    job: Any = SimpleNamespace(apply_id="job")
    hosts: Any = {name: f"hosts of {name}" for name in (*meshes, "other")}
    option = GatherMountOption("/logs", "/here", names_of(meshes))
    for _ in range(2):  # once each
        assert option.connect(job, hosts) is hosts
    where = ["/here"] if len(meshes) == 1 else ["/here/a", "/here/b"]
    assert mounted == [
        (f"hosts of {name}", "/logs", path) for name, path in zip(meshes, where, strict=True)
    ]


def test_what_is_no_directory_cannot_be_mounted(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "missing"):
        with pytest.raises(ValueError, match="there is no directory"):
            remote_mount_option(str(tmp_path / name), None, None, None)
    option = remote_mount_option(str(tmp_path), None, ["a"], None)
    assert (option.source, option.path, option.meshes) == (str(tmp_path), str(tmp_path), ("a",))
    assert remote_mount_option(str(tmp_path), "/there", None, None).meshes is None
    with pytest.raises(TypeError, match="must be a list of names"):
        names_of("a")
