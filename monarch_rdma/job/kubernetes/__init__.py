"""Jobs on Kubernetes. The official client (extra `kubernetes`) is imported when a cluster is first talked to."""

from .job import KubernetesJob
from .spec import ImageSpec

__all__ = ["ImageSpec", "KubernetesJob"]
