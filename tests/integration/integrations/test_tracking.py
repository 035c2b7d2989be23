"""examples/tracking.py: the files of Weights & Biases and of TensorBoard have each rank's curve."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("wandb", reason="needs wandb")
pytest.importorskip("tensorboard", reason="needs tensorboard")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PROGRAM = Path(__file__).resolve().parents[3] / "examples" / "tracking.py"
BLOCK, HEADER = 32768, 7  # of a log in the format of LevelDB


def payloads(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of wandb: seven bytes, then a log in the format of LevelDB.

    A record is in one part or several, each with a header: checksum, length, type.
    """
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, record = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK  # the rest of the block is too small for a header
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""
    assert record == b""


def read_run(path: Path) -> dict[str, Any]:
    """Return what a run has recorded."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, Any] = {"losses": []}
    for payload in payloads(path):
        record = Record()
        record.ParseFromString(payload)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            found |= {"group": record.run.run_group, "name": record.run.display_name}
            found |= {"rank": config["rank"], "procs": config["procs"]}
        elif kind == "history":
            values = {"".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            found["losses"].append(json.loads(values["loss"]))
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def test_each_rank_has_its_curve_in_both(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ("--procs", "2", "--steps", "30", "--group", "of the test", "--out", "out")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    paths = (tmp_path / "out" / "wandb").glob("offline-run-*/run-*.wandb")
    runs = sorted((read_run(path) for path in paths), key=lambda run: run["rank"])
    expected = {"group": "of the test", "procs": 2, "exit": 0}
    losses = [run.pop("losses") for run in runs]
    assert runs == [{**expected, "rank": rank, "name": f"rank{rank}"} for rank in range(2)]
    for rank, curve in enumerate(losses):
        board = EventAccumulator(str(tmp_path / "out" / "tensorboard" / f"rank{rank}"))
        board.Reload()
        events = board.Scalars("loss")
        assert [event.step for event in events] == list(range(30))
        assert curve == pytest.approx([event.value for event in events])
    assert losses[0] != losses[1]
    assert f"wandb sync {tmp_path}/out/wandb/offline-run-*" in done.stdout
