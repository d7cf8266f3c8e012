"""The goodput of a training that was watched, beside what the model of `monarch-rdma simulate` makes of its faults."""

from __future__ import annotations

import json
from pathlib import Path

from monarch_rdma.ft import History
from monarch_rdma.ft.measured_run import measured_run
from monarch_rdma.ft.simulate.measured import read, replay
from monarch_rdma.ft.simulate.report import replay_text

__all__ = ["held_against_the_model"]


def held_against_the_model(history: History, path: Path, *, replicas: int, every: int) -> str:
    """Both, in a table. `path`: where the run is written for `monarch-rdma simulate --measured`."""
    title = f"{replicas} replicas, synchronised every {every} steps"
    try:
        run = measured_run(history, title=title, groups=replicas, steps_per_round=every)
    except ValueError as error:
        return f"Too short to be held against the model: {error}"
    path.write_text(json.dumps(run, indent=1))
    return f"The model of goodput, given the same faults ({path}):\n{replay_text(replay(read(path)))}"
