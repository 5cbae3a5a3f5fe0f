#!/bin/sh
# farthing-13470a0e-1: trains, and ends after 7080 seconds at the latest.
umask 077
child=
trap '[ -z "$child" ] && exit 75; kill -TERM "$child" 2>/dev/null' TERM INT HUP USR1
mkdir -p "${FARTHING_HOME:-$HOME/.farthing}/farthing-13470a0e-1" && cd "${FARTHING_HOME:-$HOME/.farthing}/farthing-13470a0e-1" || exit 2
cat > job.yaml <<'END_OF_FARTHING_FILE'
task: causal-lm
model:
  model_name_or_path: ./inputs/model
  tokenizer_name_or_path: null
  init: random
  from_run: null
data:
  train:
  - ./inputs/train-0/data.jsonl
  eval: []
  of_train: []
  of_eval: []
  chat_template: null
method:
  name: full
limits:
  max_usd: 2.0
where:
  device: cpu
  usd_per_hour: 1.0
output_dir: ./run
output_store: /tmp/pytest-of-root/pytest-543/test_another_folder_finds_the_0/store
cache_dir: ./cache
END_OF_FARTHING_FILE
cat > aboard.json <<'END_OF_FARTHING_FILE'
{
 "boot_limit_s": 600.0,
 "inputs": "launch/farthing-13470a0e/inputs.json",
 "max_usd": 2.0,
 "most_s": 7080,
 "name": "farthing-13470a0e-1",
 "overhead_usd": 0,
 "reserve_usd": 0.033333,
 "store": "/tmp/pytest-of-root/pytest-543/test_another_folder_finds_the_0/store",
 "usd_per_hour": 1.0
}
END_OF_FARTHING_FILE
command -v farthing >/dev/null 2>&1 || python3 -m pip install --quiet 'farthing[s3]==0.1.0' || { echo "farthing can't be installed here" >&2; exit 2; }
timeout --signal=TERM --kill-after=120 7080 farthing launch job.yaml --aboard aboard.json &
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do
  wait "$child"
  code=$?
done
[ "$code" -eq 124 ] && code=3
[ "$code" -eq 143 ] && code=75
exit "$code"
