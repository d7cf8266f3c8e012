"""What common mistakes raise: type and first line of each, the same on both packages.

python mistakes.py [package root: monarch | monarch_rdma]
"""

import importlib
import os
import sys
import threading

ROOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PACKAGE_ROOT", "monarch_rdma")
actor = importlib.import_module(ROOT + ".actor")
Actor, endpoint, this_host = actor.Actor, actor.endpoint, actor.this_host


class Thing(Actor):
    @endpoint
    def two(self, a: int, b: str = "x") -> tuple:
        return a, b

    @endpoint
    def boom(self) -> None:
        raise KeyError("boom", 3)

    @endpoint
    def unpicklable(self):
        return threading.Lock()

    def plain(self, y: int) -> int:
        return y + 1


class Clash(Actor):
    @endpoint
    def slice(self) -> None:
        pass


def tried(step, expected=None) -> None:
    """`expected`: what Monarch raises. With MESSAGES=1 in the environment the texts are printed as well."""
    try:
        print("gave", step())
    except Exception as error:
        kind = expected.__name__ if expected and isinstance(error, expected) else f"UNEXPECTED {type(error).__name__}"
        text = str(error).splitlines()[0] if os.environ.get("MESSAGES") and str(error) else ""
        print(kind, text)


def main() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    mesh = procs.spawn("thing", Thing)
    one = mesh.slice(gpus=0)
    tried(lambda: mesh.two.call_one(1), ValueError)
    tried(lambda: mesh.two.call(), TypeError)
    tried(lambda: mesh.two.call(1, c=3), TypeError)
    tried(lambda: mesh.two.broadcast(1, 2, 3), TypeError)
    tried(lambda: one.two.call_one(b="q", a=2).get())
    tried(lambda: one.two.call_one(threading.Lock()), TypeError)
    tried(lambda: one.boom.call_one().get(), actor.ActorError)
    tried(lambda: repr(one.boom.call_one().exception().exception))
    tried(lambda: mesh.boom.call().get(), actor.ActorError)
    tried(lambda: [repr(f.exception().exception) for f in mesh.boom.stream()])
    tried(lambda: one.unpicklable.call_one().get(), actor.ActorError)
    tried(lambda: mesh.plain(1), RuntimeError)
    tried(lambda: actor.as_endpoint(mesh.plain).call(1).get().values())
    tried(lambda: actor.as_endpoint(mesh.two), ValueError)
    tried(lambda: mesh.nothing, AttributeError)
    tried(lambda: mesh.slice(foo=0), TypeError)
    tried(lambda: mesh.slice(gpus=5), IndexError)
    tried(lambda: mesh.slice(gpus=slice(2, 2)), ValueError)
    tried(lambda: mesh.split(gpus=("a", "b"), a=2).extent)
    tried(lambda: mesh.split(gpus=("a", "b"), a=3).extent, ValueError)
    tried(lambda: mesh.flatten("r").sizes)
    tried(lambda: procs.spawn("x", int), ValueError)
    tried(lambda: procs.spawn("clash", Clash), ValueError)
    tried(lambda: actor.Future(), TypeError)
    tried(lambda: one.two.call_one(1).get(timeout=-1), ValueError)
    tried(lambda: one.two.call_one(1).get(timeout=30))
    tried(lambda: actor.send(mesh.two, (1,), {}, selection="foo"), ValueError)
    tried(lambda: this_host().spawn_procs({"g": 2}, proc_bind=[{"cpus": "0"}]), ValueError)
    tried(lambda: actor.concurrent_endpoint(lambda self: 1), ValueError)
    tried(lambda: actor.current_rank())
    tried(lambda: actor.current_size())
    tried(lambda: actor.context().actor_instance)
    tried(lambda: procs.stop().get())
    tried(lambda: procs.spawn("late", Thing), RuntimeError)


if __name__ == "__main__":
    main()
