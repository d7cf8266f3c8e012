#!/usr/bin/env bash
# Makes or completes the virtual environment VENV for work on this tree; quick when there is nothing to do.
#
#   .ci/venv.sh VENV PYTHON TORCH EXTRA...     extras as named in pyproject.toml
#
# A torch that is already there and satisfies pyproject.toml is left alone; otherwise TORCH (pip arguments) is installed.
set -euo pipefail

venv=$1 python=$2 torch=$3
shift 3

[ -x "$venv/bin/python" ] || { echo "Creating $venv"; "$python" -m venv "$venv"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Everything that pyproject.toml asks for, one requirement a line; torch is dealt with on its own.
requirements=$("$venv/bin/python" - "$@" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    parsed = tomllib.load(file)
project = parsed["project"]
wanted = project["dependencies"] + parsed["build-system"]["requires"]
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
PY
)
if ! "$venv/bin/python" - <<'PY'
import re, sys
from importlib import metadata
try:
    version = metadata.version("torch")
except metadata.PackageNotFoundError:
    sys.exit(1)
sys.exit(tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 10))
PY
then
  echo "Installing $torch into $venv"
  # shellcheck disable=SC2086 # TORCH may hold several pip arguments
  pip install -q $torch
fi
echo "Installing Python packages into $venv: ${*:-}"
printf '%s\n' "$requirements" | pip install -q -r /dev/stdin
