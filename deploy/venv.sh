#!/usr/bin/env bash
# Makes .venv with the first usable Python from 3.11 to 3.14; keeps a .venv that is already usable.
set -euo pipefail

usable() {
  # A name on PATH is not enough: it may be a version manager's stub, or a Python without venv.
  "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

if usable .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1; then
  exit 0
fi
for python in python3.11 python3.12 python3.13 python3.14 python3; do
  if usable "$python"; then
    echo "making .venv with $("$python" --version)"
    exec "$python" -m venv --clear .venv
  fi
done
echo "error: no Python from 3.11 to 3.14 with venv found (tried python3.11 to python3.14, python3): install one" >&2
exit 2
