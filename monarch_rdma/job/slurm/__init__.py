"""Jobs of SLURM."""

from __future__ import annotations

from .slurm_job import SlurmJob

__all__ = ["SlurmJob"]
