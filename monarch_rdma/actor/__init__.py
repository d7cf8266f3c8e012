"""Actors: objects in other processes that are called by messages. Source compatible with `monarch.actor`.

```python
from monarch_rdma.actor import Actor, endpoint, this_host

class Adder(Actor):
    def __init__(self, base):
        self.base = base

    @endpoint
    def add(self, x):
        return self.base + x

procs = this_host().spawn_procs({"gpus": 4})
adders = procs.spawn("adders", Adder, 10)
print(adders.add.call(1).get())
procs.stop().get()
```
"""

from __future__ import annotations

from .actor import Actor
from .context import Context, context, current_actor_name, current_rank, current_size
from .debugging.debug_controller import debug_controller
from .endpoint import Accumulator, Endpoint, as_endpoint, concurrent_endpoint, endpoint, send
from .failure import MeshFailure, StateError, SupervisionError, unhandled_fault_hook
from .future import Future, returns_future
from .hosting.host import BootstrapCommand, default_bootstrap_cmd, this_host
from .identity import ProcId, Uid
from .joining.attach import attach, attach_to_workers, shutdown_context
from .joining.controller import get_or_spawn_controller
from .joining.transport import ChannelTransport, enable_transport
from .joining.worker_loop import run_worker_loop_forever, run_worker_loop_until_shutdown, start_worker_loop_forever
from .mesh import ActorMesh, HostMesh, ProcMesh, this_proc
from .port import Channel, Port, PortReceiver
from .remote_error import ActorError
from .shape import Extent, Point
from .telemetry import get_meter, span, traced
from .value_mesh import ValueMesh

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "BootstrapCommand",
    "Channel",
    "ChannelTransport",
    "Context",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "Point",
    "Port",
    "PortReceiver",
    "ProcId",
    "ProcMesh",
    "StateError",
    "SupervisionError",
    "Uid",
    "ValueMesh",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "debug_controller",
    "default_bootstrap_cmd",
    "enable_transport",
    "endpoint",
    "get_meter",
    "get_or_spawn_controller",
    "returns_future",
    "run_worker_loop_forever",
    "run_worker_loop_until_shutdown",
    "send",
    "shutdown_context",
    "span",
    "start_worker_loop_forever",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]
