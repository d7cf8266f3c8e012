"""owner.py OPTIONS: an engine that owns memory for the operations of another machine.

OPTIONS (JSON): those of the engine, `secret` (a file) and `size`. Prints one JSON line with the handles of its buffers:
`data`, with a pattern, and `counter`, eight bytes of zero. On SIGTERM it prints another, with what became of them, and
ends.
"""

from __future__ import annotations

import base64
import json
import signal
import struct
import sys
from typing import Any

from operations import held, pattern

from monarch_rdma.rdma import Engine, RDMABuffer, Secret


def main(options: dict[str, Any]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    data = bytearray(pattern(options.pop("size")))
    counter = bytearray(8)
    secret = Secret.from_file(options.pop("secret"))
    before = held()
    with Engine(secret=secret, name="owner", **options) as engine:
        buffers = {"data": RDMABuffer(data, engine=engine), "counter": RDMABuffer(counter, engine=engine)}
        say({name: base64.b64encode(buffer.to_bytes()).decode() for name, buffer in buffers.items()})
        signal.sigwait({signal.SIGTERM})
        notified = []
        while True:
            try:
                notified.append(buffers["data"].next_notification(0))
            except TimeoutError:
                break
    say({"counter": struct.unpack("<Q", counter)[0], "notified": notified, "left": held() - before})


def say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
