"""Jobs: hosts of a scheduler, in named meshes. Source compatible with `monarch.job` for the names that both have.

```python
from monarch_rdma.job import ProcessJob

job = ProcessJob({"trainers": 2})
trainers = job.state(cached_path=None).trainers
procs = trainers.spawn_procs({"gpus": 4})
job.kill()
```
"""

from __future__ import annotations

from .detached import DetachedJob
from .folder import JobFolder
from .local import LocalJob, ProcessJob
from .scheduled import Launch, ScheduledJob
from .slurm import SlurmJob
from .spmd import SPMDActor, World, from_env, setup_torch_elastic_env, setup_torch_elastic_env_async
from .ssh import SSHJob
from .status import JobState, JobStatus
from .trait import DEFAULT_JOB_PATH, JobTrait, job_load, job_loads, load_current_job

__all__ = [
    "DEFAULT_JOB_PATH",
    "DetachedJob",
    "JobFolder",
    "JobState",
    "JobStatus",
    "JobTrait",
    "Launch",
    "LocalJob",
    "ProcessJob",
    "SPMDActor",
    "SSHJob",
    "ScheduledJob",
    "SlurmJob",
    "World",
    "from_env",
    "job_load",
    "job_loads",
    "load_current_job",
    "setup_torch_elastic_env",
    "setup_torch_elastic_env_async",
]
