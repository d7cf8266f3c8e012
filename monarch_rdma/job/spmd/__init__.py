"""Programs that a launcher starts once for each rank (torchrun, srun, mpirun); plain torch.distributed in actors."""

from __future__ import annotations

from .spmd_actor import SPMDActor, setup_torch_elastic_env, setup_torch_elastic_env_async
from .world import World, from_env

__all__ = ["SPMDActor", "World", "from_env", "setup_torch_elastic_env", "setup_torch_elastic_env_async"]
