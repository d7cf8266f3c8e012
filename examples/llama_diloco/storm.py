"""Faults that are put on a training while it runs."""

from __future__ import annotations

import threading
import time

from monarch_rdma.actor.chaos import Injector
from monarch_rdma.ft import History, Report, Synchronised, TrainingPlan
from monarch_rdma.supervision.chaos import Plan

from .faults import faults, struck_by
from .live import Live

__all__ = ["Storm"]

_PATIENCE = 0.25  # seconds for a fault that is just being done


class Storm:
    """Puts faults on a training from the end of its first round until shortly before its end."""

    def __init__(
        self, seed: int, plan: TrainingPlan, every: float | None, round_steps: int, history: History, live: Live
    ) -> None:
        """`every`: seconds between two, on average; None for none. `round_steps`: of a replica in a round."""
        self._history, self._live = history, live
        self._last_total = plan.steps - 2 * round_steps * plan.replicas
        self._is_over = threading.Event()
        self._planned = [] if every is None else faults(
            seed, duration=3600, every=every, replicas=plan.replicas, trainers=plan.trainers
        )  # fmt: skip
        self._thread: threading.Thread | None = None

    def see(self, report: Report) -> None:
        if not isinstance(report, Synchronised):
            return
        if self._thread is None and self._planned:
            self._thread = threading.Thread(target=self._blow, name="storm", daemon=True)
            self._thread.start()
        if report.total >= self._last_total:
            self._is_over.set()

    def end(self) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)

    def _blow(self) -> None:
        injector, began = Injector(Plan(())), time.monotonic()
        for name, fault in self._planned:
            if self._is_over.wait(max(0.0, began + fault.at - time.monotonic())):
                return
            at = time.time()
            struck = struck_by(name, injector.inject(fault), at)
            if struck is not None:  # else its target is just not there
                self._history.struck.append(struck)
                self._live.struck(struck)
