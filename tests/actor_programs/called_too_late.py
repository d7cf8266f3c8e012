"""Calls an actor when its interpreter already takes its modules apart."""

from __future__ import annotations

from monarch_rdma.actor import Actor, endpoint, this_proc


class Deaf(Actor):
    @endpoint
    def hear(self) -> None:
        """Is never reached."""


class Last:
    def __init__(self) -> None:
        self.deaf = this_proc().spawn("deaf", Deaf)
        self.deaf.initialized.get()
        self.print = print

    def __del__(self) -> None:
        try:
            self.deaf.hear.broadcast()
        except Exception as error:
            self.print(f"{type(error).__name__}: {error}", flush=True)


last = Last()
