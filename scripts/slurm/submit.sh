#!/usr/bin/env bash
# Run a notebook over the nodes of a Slurm job.
#
#   scripts/slurm/submit.sh [sbatch options] -- INPUT.ipynb OUTPUT.ipynb [papermill options]
#
#   scripts/slurm/submit.sh --nodes=2 --gres=gpu:8 --time=60 -- \
#       notebooks/04_throughput.ipynb out.ipynb -f notebooks/profiles/slurm.yaml
#
# The notebook runs on the first node and gets the parameter `nnodes`. Every other node lends its ranks with
# `python -m laga_core join`. `launch(..., nnodes=nnodes)` finds the rest in its environment:
#
#   LAGA_ENDPOINT   HOST:PORT of the launch   default: this node's first address, a port derived from the job
#   LAGA_HOSTS      the nodes, comma-separated, so that one that does not come can be named
#
# Set before submitting, if need be:
#
#   LAGA_INTERFACE  network interface of the nodes, such as ib0; LAGA_ENDPOINT is then its address
#   LAGA_PYTHON     the Python of an environment that every node sees   default: .venv/bin/python of this checkout
#   LAGA_PORT       port of the launch
#
# The checkout, the environment and the output must be on a file system that all nodes share. Inside an allocation
# (salloc) the script runs at once instead of submitting.
set -euo pipefail

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0" >&2; exit 2; }

if [ -z "${SLURM_JOB_ID:-}" ]; then
  options=()
  while [ $# -gt 0 ] && [ "$1" != "--" ]; do options+=("$1"); shift; done
  [ $# -ge 3 ] || usage
  LAGA_ROOT=$(cd "$(dirname "$0")/../.." && pwd)
  export LAGA_ROOT
  exec sbatch --job-name=laga --ntasks-per-node=1 --export=ALL "${options[@]}" "$0" "$@"
fi

# --- on the first node of the job
if [ "${1:-}" = "--" ]; then shift; fi
[ $# -ge 2 ] || usage
root=${LAGA_ROOT:-$(cd "$(dirname "$0")/../.." && pwd)}
python=${LAGA_PYTHON:-$root/.venv/bin/python}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

first_address() { # of an interface, or of this node
  if [ -n "${1:-}" ]; then
    ip -4 -o address show dev "$1" | awk '{sub("/.*", "", $4); print $4; exit}'
  else
    hostname -I | awk '{print $1}'
  fi
}

LAGA_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd, -)
LAGA_ENDPOINT=${LAGA_ENDPOINT:-$(first_address "${LAGA_INTERFACE:-}"):${LAGA_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}
export LAGA_HOSTS LAGA_ENDPOINT

if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  others=$((SLURM_JOB_NUM_NODES - 1))
  srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1 --relative=1 \
    "$python" -m laga_core join --endpoint "$LAGA_ENDPOINT" --nnodes "$SLURM_JOB_NUM_NODES" --timeout 86400 &
  joined=$!
  release() { # the other nodes
    "$python" -m laga_core dismiss --endpoint "$LAGA_ENDPOINT" --nodes "$others" --timeout 20 || kill "$joined" || true
    wait "$joined" || true
  }
  trap release EXIT
fi

"$python" -m papermill "$@" -p nnodes "$SLURM_JOB_NUM_NODES" --log-output --no-progress-bar
