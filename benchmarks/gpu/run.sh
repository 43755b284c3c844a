#!/usr/bin/env bash
# Measures everything on one GPU in at most fourteen minutes, and prints the tables: OUT=folder benchmarks/gpu/run.sh
#
#   run.sh attention falcon    those stages alone; falcon, Falcon-7B in the engine, runs by its name only
#   run.sh --small             all of it on little, on a CPU
#
# Needs torch with CUDA, transformers, and this repository; pytest for the stage tests, and gcc for Triton's kernels.
# Every stage has a time limit of its own. Figures go to $OUT/figures.jsonl as soon as they are known, so a stage that is
# killed keeps those that it has, and stops no other. The exit status is 1 if a stage failed.
set -u
cd "$(dirname "$0")/../.."
SMALL=
if [ "${1:-}" = --small ]; then SMALL=--small; shift; fi
STAGES=${*:-machine attention sampling equality tests qwen llama encoder peers}
OUT=${OUT:-.}
PYTHON=${PYTHON:-python3}
FAILED=0
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 DISABLE_CUPTI_LAZY_REINIT=1 TEARDOWN_CUPTI=0 # the profiler and captured graphs
mkdir -p "$OUT"

stage() { # name, seconds, command
  case " $STAGES " in *" $1 "*) ;; *) return ;; esac
  local limit=$2
  if [ -n "$SMALL" ]; then limit=240; fi # a CPU may be busy
  echo "== $1, at most $limit s"
  timeout --kill-after=5 "$limit" "${@:3}" 2>&1 | tee -a "$OUT/log.txt"
  local status=${PIPESTATUS[0]}
  if [ "$status" -ne 0 ]; then
    FAILED=1
    echo "{\"part\": \"run\", \"name\": \"$1\", \"failed\": \"exit status $status (124: more than $limit s)\"}" |
      tee -a "$OUT/figures.jsonl"
  fi
}

part() { # stage, seconds, script, its arguments
  stage "$1" "$2" "$PYTHON" "benchmarks/gpu/$3.py" "${@:4}" $SMALL --out "$OUT"
}

if command -v nvidia-smi; then nvidia-smi; fi
part machine 20 figures
part attention 80 attention
part sampling 60 sampling
part equality 90 equality
if [ -z "$SMALL" ]; then
  # Without the options of pyproject.toml, which ask for plugins.
  stage tests 150 "$PYTHON" -m pytest -c /dev/null --rootdir . --import-mode importlib -q -p no:cacheprovider tests/gpu
  part qwen 90 engine qwen3-0.6b
  part llama 150 engine llama-3-8b
  part falcon 140 engine falcon-7b
else
  part llama 60 engine tiny
fi
part encoder 60 encoder
part peers 120 peers "$([ -n "$SMALL" ] && echo tiny || echo llama-3-8b)"
"$PYTHON" benchmarks/gpu/tables.py "$OUT/figures.jsonl"
exit $FAILED
