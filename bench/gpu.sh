#!/usr/bin/env bash
# Everything that farthing says of GPUs, in two calls on a machine that has one. Not run yet: there was no GPU to run it on.
#
#   bash bench/gpu.sh right OUT [--wheels DIR] [--minutes 9]     is it right: tests/test_gpu.py, and the ceilings of the machine
#   bash bench/gpu.sh fast OUT [--wheels DIR] [--minutes 9] [options of bench/gpu.py]     is it quick: bench/gpu.py
#
# Needs python3 (or PYTHON) with a CUDA build of torch, transformers and peft; no network, no data and no model weights. Nothing is
# installed into that environment: wheels in DIR go to a folder of their own, as they are, so what they need has to be there or
# in DIR. Often missing: pydantic with pydantic-core, annotated-types and typing-inspection, and pytest. Without these, the tests
# and rows that need them are skipped and say so: bitsandbytes, liger-kernel, nvidia-ml-py, rouge-score with nltk; to compare
# with others, accelerate, datasets with dill and multiprocess, and trl.
set -euo pipefail

usage() { sed -n '2,11p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2; exit 2; }

[[ $# -ge 2 && ($1 == right || $1 == fast) && $2 != -* ]] || usage
verb=$1 out=$2
shift 2
wheels="" minutes=9 rest=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --wheels) [[ $# -ge 2 ]] || usage; wheels=$2; shift 2 ;;
    --minutes) [[ $# -ge 2 ]] || usage; minutes=$2; shift 2 ;;
    *) rest+=("$1"); shift ;;
  esac
done
began=$SECONDS
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$(command -v "${PYTHON:-python3}") || { echo "no ${PYTHON:-python3}: set PYTHON" >&2; exit 2; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
failed=() left_out=()
if [[ -n $wheels ]]; then
  "$python" -m pip install --quiet --no-index --find-links "$wheels" --no-deps --no-compile --target "$site" "$wheels"/*.whl ||
    failed+=("the wheels of $wheels")
fi
export PYTHONPATH="$site:$root/src:$root/bench${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

missing=$("$python" - <<'PY'
import importlib.util
names = "torch transformers peft pydantic safetensors tokenizers psutil yaml rich fsspec jinja2 pytest"
print(*(name for name in names.split() if importlib.util.find_spec(name) is None))
PY
)
if [[ -n $missing ]]; then
  echo "not installed: $missing; bring their wheels in a folder and name it: --wheels DIR" >&2
  exit 2
fi
{
  date -u
  uname -a
  nvidia-smi || echo "no nvidia-smi"
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit --format=csv || true
  "$python" -m pip list --format=freeze || true
  ls "$site"
} > "$out/environment.txt" 2>&1
left() { echo $((minutes * 60 - (SECONDS - began))); }

cd "$root"
# part NAME COMMAND...: one part of the work; the others follow whatever becomes of it
part() {
  local name=$1
  shift
  if (($(left) < 5)); then
    left_out+=("$name: no time left")
  elif ! "$@"; then
    failed+=("$name")
  fi
}
tests() {  # tests LOG WHICH: those of tests/test_gpu.py, into LOG.txt and LOG.xml
  FARTHING_GPU=${FARTHING_GPU:-1} timeout -s INT "$(left)" "$python" -m pytest tests/test_gpu.py -k "$2" -p no:cacheprovider \
    -rA --tb=short --durations=15 -o junit_logging=no --junitxml="$out/$1.xml" 2>&1 | tee "$out/$1.txt"
}
if [[ $verb == right ]]; then
  slow="flex or compile or fp32_gets"  # kernels that are compiled first: tens of seconds each
  part "the quick tests" tests tests "not ($slow)"
  part "the ceilings" "$python" bench/gpu.py "$out" --only-ceilings --minutes 2 ${rest[@]+"${rest[@]}"}
  part "the tests that compile" tests tests-compiled "$slow"
else
  fast() {
    "$python" bench/gpu.py "$out" --minutes "$("$python" -c "print(max(0.2, $(left) / 60))")" "$@" 2>&1 | tee "$out/log.txt"
  }
  part "the bench" fast ${rest[@]+"${rest[@]}"}
fi
for name in ${failed[@]+"${failed[@]}"}; do echo "failed: $name"; done | tee "$out/failed.txt"
for name in ${left_out[@]+"${left_out[@]}"}; do echo "left out: $name"; done | tee -a "$out/failed.txt"
((${#failed[@]} == 0 && ${#left_out[@]} == 0)) && echo "every part ran"
((${#failed[@]} == 0))
