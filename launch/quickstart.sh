#!/usr/bin/env bash
# From a bare machine to a trained model: sets up .venv, packs the embedded sounds, trains the tiny preset on two CPU
# ranks or on all GPUs, evaluates. Run again, it starts at once. Arguments go to the training: --train.max_steps 50
. "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

RUN="${RUN_DIR:-runs/tiny-zero2}"
previous=""
for argument in "$@"; do  # --run_dir among the arguments names the run that is evaluated, too
    case "$argument" in --run_dir=* | --run-dir=*) RUN="${argument#*=}" ;; esac
    case "$previous" in --run_dir | --run-dir) RUN="$argument" ;; esac
    previous="$argument"
done

say "== 1/4 set-up"
setup

say "== 2/4 shards of the embedded sounds"
shards="$("$PY" -c 'from clap_zero.data.embedded import embedded_sounds; print(*embedded_sounds(), sep="\n")')"
{ read -r train_shards; read -r test_shards; } < <(tail -n 2 <<<"$shards")
say "$train_shards"
say "$test_shards"

say "== 3/4 training"
command=(deepspeed)
ranks=()
arguments=(--ds_config ds_configs/zero2.json)
if [ "$(num_devices)" = 0 ]; then
    ranks=(--num_gpus 2)
else  # what the training chooses by itself where there is no GPU
    arguments+=(--model.preset tiny --data.train "$train_shards" --data.val "$test_shards")
fi
[ -z "${RUN_DIR:-}" ] || arguments+=(--run_dir "$RUN")
say "deepspeed ${ranks[*]:-} -m clap_zero.train ${arguments[*]} $*"
run_job "${command[@]}" ${ranks[@]+"${ranks[@]}"} -m clap_zero.train "${arguments[@]}" "$@"

say "== 4/4 retrieval on the held-out pairs, before and after"
"$PY" - "$RUN" <<'PYTHON'
import sys
from clap_zero.evaluation.runner import read_results

results = read_results(sys.argv[1])
for step in (min(results), max(results)):
    for way in ("audio_to_text", "text_to_audio"):
        figures = {name: results[step][f"{way}.{name}"] for name in ("R@1", "R@10", "median_rank")}
        shown = f"R@1 {figures['R@1']:6.1%}  R@10 {figures['R@10']:6.1%}  median rank {figures['median_rank']:5.1f}"
        print(f"step {step:5d}  {way}  {shown}  of {results[step]['num_clips']:.0f}")
PYTHON

train_command="deepspeed ${ranks[*]:-} -m clap_zero.train ${arguments[*]} $*"
cat <<EOF

The run is in $RUN: config.yaml, ds_config.json, metrics.jsonl, checkpoints/, eval/.
What to type next:
  source .venv/bin/activate
  ${train_command% }
      the same training; it says that it is finished
  clap-zero eval $RUN
      the figures again, from the fp32 weights of the checkpoint
  clap-zero export $RUN exported/tiny
      a directory for ClapModel.from_pretrained
  clap-zero pack --help
      your own recordings into shards
  python -m clap_zero.train --help
      every flag, with its unit and default
EOF
