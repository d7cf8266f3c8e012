"""`python -m hipify_rules [--out DIR] FILE...`: writes the files in HIP into a folder of their own."""

from __future__ import annotations

import argparse
import sys

from .hipify import HipifyError, hipify_files


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hipify_rules", description=__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE", help="sources and headers in CUDA spelling")
    parser.add_argument("--out", default="build/hipified", metavar="DIR", help="where the results go (%(default)s)")
    parser.add_argument(
        "--root", metavar="DIR", help="files keep their place below it (default: the folder they share)"
    )
    parser.add_argument(
        "--launch-macro",
        action="store_true",
        help="write launches as hipLaunchKernelGGL(...), not kernel<<<...>>>(...)",
    )
    given = parser.parse_args()
    try:
        for path in hipify_files(given.files, given.out, root=given.root, launch_macro=given.launch_macro):
            print(path)
    except HipifyError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
