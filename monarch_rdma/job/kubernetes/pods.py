"""What a pod is to a job, read from what the API says of it: which host of its mesh, where, what ails it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Ailment", "address_of", "ailment_of", "current", "event_ailments", "history_of", "is_ready", "ordinal_of"]

Pod = Mapping[str, Any]

_JOB_INDEX = "batch.kubernetes.io/job-completion-index"

# What a container waits for that does not come by itself, and what to do about it.
_IMAGE = "check the image's name and tag, and that the pods may pull it (image_pull_secrets)"
_HOPELESS = {
    "InvalidImageName": _IMAGE,
    "ErrImageNeverPull": "image_pull_policy is Never, so the image must be on the node already",
    "CreateContainerConfigError": "something that the pod refers to is missing, or the image's user is not allowed",
    "CreateContainerError": "the container runtime refuses it; the message says why",
    "RunContainerError": "the container runtime cannot start it; has the image the command `monarch-rdma`?",
    "CrashLoopBackOff": "the worker ends as soon as it starts; its last lines say why",
}
_PULLS = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError")
# Of an image that cannot be pulled, words that say that it never will be.
_NO_SUCH_IMAGE = re.compile(r"not ?found|manifest unknown|unauthori[sz]ed|denied|forbidden|does not exist", re.I)


@dataclass(frozen=True)
class Ailment:
    """Why a pod does not run: the cluster's own words, and what to try. `is_final`: it will not get well by itself."""

    words: str
    advice: str
    is_final: bool = False

    def __str__(self) -> str:
        return f"{self.words}; {self.advice}"


def ordinal_of(pod: Pod, rank_label: str) -> int | None:
    """Its number in its mesh, from 0 on; None for a pod without one.

    The label is there from Kubernetes 1.28 on. Before that a StatefulSet's pods are known by their names alone, and an
    Indexed Job's by an annotation.
    """
    metadata = pod["metadata"]
    for found in (metadata.get("labels") or {}, metadata.get("annotations") or {}):
        for key in (rank_label, _JOB_INDEX):
            if str(found.get(key, "")).isdecimal():
                return int(found[key])
    name = (pod.get("spec") or {}).get("hostname") or metadata["name"]
    match = re.search(r"-(\d+)$", name)
    return int(match[1]) if match else None


def address_of(pod: Pod, port: int) -> str:
    """Where its worker listens, as `host:port`. MONARCH_PORT in the pod says which port, where it is set."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == "MONARCH_PORT" and str(variable.get("value", "")).isdecimal():
                port = int(variable["value"])
    ip = pod["status"]["podIP"]
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def is_ready(pod: Pod) -> bool:
    status = pod.get("status") or {}
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    return bool(
        status.get("podIP")
        and conditions.get("Ready") == "True"
        and not pod["metadata"].get("deletionTimestamp")
        and status.get("phase", "Running") == "Running"
    )


def ailment_of(pod: Pod) -> Ailment | None:
    """What keeps it from running, if anything."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    for container in [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        words = f"pod {name}: {reason}: {message or 'no more is said'}"
        if reason in _PULLS:
            return Ailment(words, _IMAGE, is_final=bool(_NO_SUCH_IMAGE.search(message)))
        if reason in _HOPELESS:
            ended = (container.get("lastState") or {}).get("terminated")
            return Ailment(f"{words}; {_exit_of(ended)}" if ended else words, _HOPELESS[reason], is_final=True)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            gated = condition.get("reason") == "SchedulingGated"
            advice = "it waits in its queue" if gated else "ask for less, or wait until there is room"
            return Ailment(f"pod {name}: {condition.get('reason')}: {condition.get('message', '')}", advice)
    return None


def event_ailments(events: Iterable[Mapping[str, Any]]) -> list[Ailment]:
    """What kept pods from being made: what admission, a quota or a limit said."""
    found: dict[str, Ailment] = {}
    for event in events:
        if event.get("type") == "Warning" and str(event.get("reason", "")).startswith("Failed"):
            message = event.get("message", "")
            advice = "look at the events of the workload"
            if "quota" in message:
                advice = "ask for less, free something of the namespace's quota, or have it raised"
            found[message] = Ailment(f"{event['reason']}: {message}", advice)
    return list(found.values())


def history_of(pod: Pod) -> str:
    """What has happened to it and its containers, in the cluster's words; "" for one that just runs."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    said = [f"{status['reason']}: {status.get('message', '')}".strip(": ")] if status.get("reason") else []
    for condition in status.get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            said.append(f"{condition.get('reason')}: {condition.get('message', '')}".strip(": "))
    for container in status.get("containerStatuses") or ():
        now, before = container.get("state") or {}, container.get("lastState") or {}
        if now.get("terminated"):
            said.append(_exit_of(now["terminated"]))
        elif before.get("terminated"):
            said.append(f"{_exit_of(before['terminated'])} and was started again ({container.get('restartCount')})")
    if pod["metadata"].get("deletionTimestamp"):
        said.append("it is being deleted")
    return f"pod {name}: {'; '.join(said)}" if said else ""


def current(pods: Iterable[Pod], rank_label: str, count: int) -> dict[int, Pod]:
    """Of each ordinal below `count` the pod that counts: one that is ready, else the newest."""
    found: dict[int, Pod] = {}
    for pod in pods:
        ordinal = ordinal_of(pod, rank_label)
        if ordinal is not None and ordinal < count:
            found[ordinal] = max(pod, found.get(ordinal, pod), key=_rank)
    return found


def _rank(pod: Pod) -> tuple[bool, bool, str]:
    metadata = pod["metadata"]
    return is_ready(pod), not metadata.get("deletionTimestamp"), str(metadata.get("creationTimestamp", ""))


def _exit_of(terminated: Mapping[str, Any]) -> str:
    reason = terminated.get("reason")
    return f"its container ended with exit code {terminated.get('exitCode')}" + (f" ({reason})" if reason else "")
