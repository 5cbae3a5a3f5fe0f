#!/usr/bin/env bash
# Everything that farthing says of GPUs, in three calls on a machine that has one.
#
#   bash bench/gpu.sh right OUT [--wheels DIR] [--minutes 9]     is it right: tests/test_gpu.py, kills, ceilings of the machine
#   bash bench/gpu.sh fast OUT [--wheels DIR] [--minutes 9] [options of bench/gpu.py]     is it quick, beside its peers
#   bash bench/gpu.sh vary OUT [--wheels DIR] [--minutes 9] [options of bench/gpu.py]     one thing changed at a time
#
# Needs python3 (or PYTHON) with a CUDA build of torch, transformers and peft; no network, no data and no model weights. Nothing is
# installed into that environment: wheels in DIR go to a folder of their own, as they are, so what they need has to be there or
# in DIR. Often missing: pydantic with pydantic-core, annotated-types and typing-inspection, and pytest. Without these, the tests
# and rows that need them are skipped and say so: bitsandbytes, liger-kernel, nvidia-ml-py; kills of T5 want rouge-score with
# nltk, absl-py and six. To compare with others: accelerate, datasets with dill and multiprocess, and trl. pytest-timeout and
# pytest-xdist are used where they are.
set -euo pipefail

usage() { sed -n '2,13p' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//' >&2; exit 2; }

[[ $# -ge 2 && ($1 == right || $1 == fast || $1 == vary) && $2 != -* ]] || usage
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

# what_is WHICH NAME...: those of these modules that are "missing" or "there"
what_is() {
  "$python" - "$@" <<'PY'
import importlib.util, sys
print(*(name for name in sys.argv[2:] if (importlib.util.find_spec(name) is None) == (sys.argv[1] == "missing")))
PY
}
missing=$(what_is missing torch transformers peft pydantic safetensors tokenizers psutil yaml rich fsspec jinja2 pytest)
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
  df -h "$site" . || true
} > "$out/environment.txt" 2>&1
left() { echo $((minutes * 60 - (SECONDS - began))); }

cd "$root"
# part NAME COMMAND...: one part of the work; the others follow whatever becomes of it
part() {
  local name=$1 at=$SECONDS
  shift
  if (($(left) < 5)); then
    left_out+=("$name: no time left")
  elif ! "$@"; then
    failed+=("$name")
  fi
  echo "took $((SECONDS - at)) s: $name"
}
# a test that hangs ends after 100 s where pytest-timeout is there, all of them when the time is over, also where none listens
plugins=$(what_is there pytest_timeout xdist)
each=() beside=()
[[ $plugins == *pytest_timeout* ]] && each=(--timeout 100)
[[ $plugins == *xdist* ]] && beside=(-n 4)
tests() {  # tests LOG WHICH SECONDS [OPTIONS]: those of tests/test_gpu.py, into LOG.txt and LOG.xml
  local log=$1 which=$2 seconds=$3
  shift 3
  FARTHING_GPU=${FARTHING_GPU:-1} timeout -k 15 -s INT "$seconds" "$python" -m pytest tests/test_gpu.py -k "$which" \
    -p no:cacheprovider -p no:benchmark -rfEs --tb=short --show-capture=stdout --durations=15 -o junit_logging=no \
    ${each[@]+"${each[@]}"} "$@" > "$out/$log.txt" 2>&1 || { shorter "$out/$log.txt"; return 1; }
  shorter "$out/$log.txt"
}
shorter() { grep -E '^(FAILED|ERROR|SKIPPED)|^E   |(passed|failed|error).* in [0-9.]+s' "$1" | cut -c1-200 | tail -n 25 || true; }
kills() {  # kills LOG SEED [OPTIONS]: a chain of 3 to 5 SIGKILLs, a line for it into LOG
  local log=$1 seed=$2
  shift 2
  timeout -k 5 "$(($(left) > 25 ? $(left) - 20 : 5))" "$python" bench/survive.py --spawn --seeds 1 --first-seed "$seed" "$@" \
    > "$site/$log" 2>&1
}
all_kills() {  # six chains with full_determinism, which have to be equal to the bit, and one without, of which it is told;
  local at pids=()  # side by side: most of the 80 to 100 s of a chain are starts of Python
  for at in 0 1 2 3 4 5; do kills "kills-$at.txt" "$at" --full-determinism & pids+=($!); done
  kills kills-plain.txt 10 & pids+=($!)
  wait "${pids[@]}" || true
  "$python" bench/on_gpu/verdict.py --kills "$site"/kills-[0-5].txt > "$out/kills.txt" && local is_well=0 || local is_well=1
  "$python" bench/on_gpu/verdict.py --kills-without "$site/kills-plain.txt" >> "$out/kills.txt" || true
  return $is_well
}
if [[ $verb == right ]]; then
  slow="flex or compile or fp32_gets"  # kernels that are compiled first: tens of seconds each
  part "the quick tests" tests tests "not ($slow)" "$(($(left) * 2 / 3))" --junitxml="$out/tests.xml"
  part "the ceilings" "$python" bench/gpu.py "$out" --only-ceilings --minutes 1 ${rest[@]+"${rest[@]}"}
  killing=""
  if (($(left) < 30)); then
    left_out+=("the kills: no time left")
  else
    all_kills & killing=$!  # beside what is compiled: neither is timed, and both leave most of the memory alone
  fi
  part "the tests that compile" tests tests-compiled "$slow" "$(left)" ${beside[@]+"${beside[@]}"}
  [[ -z $killing ]] || wait "$killing" || failed+=("the kills")
  [[ ! -f $out/kills.txt ]] || cut -c1-250 "$out/kills.txt"
else
  who=(--who farthing hf trl-tuned)
  [[ $verb == vary ]] && who=(--who variants --shapes 1B)
  bench() {
    "$python" bench/gpu.py "$out" --minutes "$("$python" -c "print(max(0.2, $(left) / 60))")" "${who[@]}" "$@" 2>&1 |
      tee "$out/log.txt"
  }
  part "the bench" bench ${rest[@]+"${rest[@]}"}
fi
for name in ${failed[@]+"${failed[@]}"}; do echo "failed: $name"; done | tee "$out/failed.txt"
for name in ${left_out[@]+"${left_out[@]}"}; do echo "left out: $name"; done | tee -a "$out/failed.txt"
((${#failed[@]} == 0 && ${#left_out[@]} == 0)) && echo "every part ran"
((${#failed[@]} == 0))
