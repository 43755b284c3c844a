#!/usr/bin/env bash
# The tasks of run.py with the environment that they want: OUT=folder benchmarks/gpu/run.sh [--small] [TASK ...]
set -eu
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 DISABLE_CUPTI_LAZY_REINIT=1 TEARDOWN_CUPTI=0 # the profiler and captured graphs
if command -v nvidia-smi; then nvidia-smi; fi
exec "${PYTHON:-python3}" benchmarks/gpu/run.py "$@"
