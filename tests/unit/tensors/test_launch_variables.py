"""The environment variables of the processes of a tensor mesh."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from monarch._tensors.worker.launch_variables import _limited, launch_variables  # noqa: E402


def of(rank: int, sizes: dict[str, int], devices: int, visible: str | None) -> list[str]:
    names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    found = launch_variables(rank, sizes, devices, visible, "host")
    assert found["RANK"] == str(rank)
    return [found[name] for name in names]


@pytest.mark.parametrize(
    ("rank", "sizes", "devices", "visible", "expected"),
    [
        (0, {}, 0, None, ["1", "0", "1", "0"]),
        (5, {"hosts": 2, "gpus": 4}, 8, None, ["8", "1", "4", "1"]),
        (5, {"gpu": 4, "replicas": 2}, 8, None, ["8", "2", "4", "2"]),
        (3, {"x": 4}, 0, None, ["4", "3", "4", "3"]),
        (3, {"x": 4}, 2, None, ["4", "1", "2", "1"]),
        (3, {"gpus": 4}, 1, None, ["4", "3", "4", "0"]),
        (1, {"gpus": 2}, 2, "6,7", ["2", "1", "2", "7"]),
        (1, {"gpus": 2}, 1, "5", ["2", "1", "2", "5"]),
        (1, {"gpus": 2}, 0, "", ["2", "1", "2", ""]),
        (1, {"gpus": 2}, 2, "GPU-a,GPU-b", ["2", "1", "2", "GPU-b"]),
    ],
)
def test_variables(
    rank: int, sizes: dict[str, int], devices: int, visible: str | None, expected: list[str]
) -> None:
    assert of(rank, sizes, devices, visible) == expected


def test_every_process_of_a_host_has_its_own_device_and_local_rank() -> None:
    found = [of(rank, {"hosts": 3, "gpus": 4}, 4, None) for rank in range(12)]
    for host in range(3):
        assert [row[1] for row in found[4 * host : 4 * host + 4]] == ["0", "1", "2", "3"]
        assert [row[3] for row in found[4 * host : 4 * host + 4]] == ["0", "1", "2", "3"]


def test_set_device_takes_the_local_rank_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    set_device = _limited(taken.append)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for device in (3, "cuda:3", torch.device("cuda"), torch.device("cuda", 3), -1):
        set_device(device)
    assert taken == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="are available to monarch worker"):
        set_device(0)
