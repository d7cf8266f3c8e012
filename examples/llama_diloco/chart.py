"""One picture: the loss of a training under faults beside one without, who took part, and what recoveries took."""

from __future__ import annotations

from pathlib import Path

from monarch_rdma.ft import History

from .replicas import HELD_OUT

__all__ = ["draw"]

_COLOURS = {
    "kill a trainer": "tab:orange",
    "kill a replica": "tab:red",
    "stop a process": "tab:purple",
    "abort a communicator": "tab:brown",
    "cut a link": "tab:cyan",
}


def draw(path: Path, calm: History, faulted: History, *, replicas: int) -> bool:
    """False where there is no matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, (losses, members) = pyplot.subplots(2, 1, figsize=(10, 7), height_ratios=(3, 2), layout="constrained")
    for history, label, style in ((calm, "without failures", "-"), (faulted, "under faults", "--")):
        totals = {each.rounds: each.total for each in history.rounds()}
        held_out = history.measured(HELD_OUT)
        known = [number for number in held_out if number in totals]
        losses.plot([totals[n] for n in known], [held_out[n] for n in known], style, marker=".", label=label)
    losses.set(xlabel="steps of all replicas", ylabel="loss on held-out text, nats a byte")
    losses.set_title("A training under faults, beside the same without", loc="left")
    losses.grid(alpha=0.3)
    began = min((report.at for report in faulted.reports), default=0.0)
    active = faulted.active()
    members.step([at - began for at, _ in active], [count for _, count in active], where="post", color="black", lw=1)
    members.set(xlabel="seconds", ylabel="replicas that train", ylim=(0, replicas + 0.9), yticks=range(replicas + 1))
    for kind, colour in _COLOURS.items():
        times = [struck.at - began for struck in faulted.struck if struck.kind == kind]
        members.plot(times, [replicas + 0.5] * len(times), "v", color=colour, label=f"{kind} ({len(times)})")
    totals_at = sorted((each.at, each.total) for each in faulted.rounds())
    for recovered in faulted.recoveries():
        members.axvspan(recovered.began - began, recovered.ended - began, color="tab:red", alpha=0.12, lw=0)
        total = max((total for at, total in totals_at if at <= recovered.ended), default=0)
        losses.axvline(total, color="tab:red", alpha=0.25, lw=1)
    members.legend(loc="lower right", ncols=3, fontsize="small")
    losses.plot([], [], color="tab:red", alpha=0.4, lw=1, label="a replica is back, healed by its peers")
    losses.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
