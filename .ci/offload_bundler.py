#!/usr/bin/env python3
"""clang-offload-bundler as far as compiling HIP needs it: puts one code object a GPU into one file, uncompressed.

clang calls it with -targets=A,B,... , an -input= for each and -output=. A bundle is a magic number, the number of
entries, each entry's offset, size and target (all numbers 64 bits, little-endian), then the code objects, aligned.
"""

import struct
import sys

MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def bundle(targets: list[str], contents: list[bytes], align: int) -> bytes:
    head = len(MAGIC) + 8 + sum(24 + len(target) for target in targets)
    table, body, end = b"", b"", head
    for target, content in zip(targets, contents, strict=True):
        start = -(-end // align) * align
        table += struct.pack("<QQQ", start, len(content), len(target)) + target.encode()
        body += bytes(start - end) + content
        end = start + len(content)
    return MAGIC + struct.pack("<Q", len(targets)) + table + body


def main() -> int:
    options: dict[str, list[str]] = {}
    for argument in sys.argv[1:]:
        name, _, value = argument.lstrip("-").partition("=")
        options.setdefault(name, []).append(value)
    if options.pop("type", None) != ["o"] or not {"targets", "input", "output"} <= set(options):
        print(f"clang-offload-bundler: only bundling objects is done here, not: {sys.argv[1:]}", file=sys.stderr)
        return 1
    contents = []
    for path in options["input"]:
        with open(path, "rb") as file:
            contents.append(file.read())
    align = int(options.get("bundle-align", ["1"])[0])
    with open(options["output"][0], "wb") as file:
        file.write(bundle(options["targets"][0].split(","), contents, align))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
