#!/usr/bin/env bash
# A CUDA device in at most eight minutes, from the project's root: bash experiments/gpu/run.sh [OUT]
#
# The telling things come first. Each step has a limit, is left out once the eight minutes are over, and goes on after a
# failure. What is found is in OUT (outputs/gpu) as it is found: steps.txt has a line a step, numbers.jsonl what
# experiments/gpu/layers.py measures, summary.txt the numbers of all runs, each run its own folder.
#
# Needed: torch with CUDA and triton, transformers, and wheels of pure Python: hydra-core, omegaconf,
# antlr4-python3-runtime (`pip wheel --no-deps antlr4-python3-runtime==4.9.3` makes the last one). Random weights and
# shipped models only: nothing is downloaded. DRY=1 tries the script without a device, with tiny shapes.
out=${1:-outputs/gpu}; total=${TOTAL:-480}
mkdir -p "$out"; : >"$out/steps.txt"; : >"$out/numbers.jsonl"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline PYTHONPATH=$PWD
python=${PYTHON:-python3}
missing=$($python - <<'P'
from importlib.util import find_spec
print(*(name for name in ("torch", "triton", "transformers", "hydra", "omegaconf", "antlr4", "pydantic", "pandas", "pyarrow",
                          "rich", "jinja2", "matplotlib", "filelock") if find_spec(name) is None))
P
)
[ -z "$missing" ] || echo "missing packages: $missing" | tee -a "$out/steps.txt"

step() {  # NAME LIMIT COMMAND: runs it for at most LIMIT seconds, and no longer than the eight minutes
  local name=$1 limit=$2 left=$((total - SECONDS)) begin=$SECONDS; shift 2
  [ "$left" -gt 5 ] || { echo "$name left out" | tee -a "$out/steps.txt"; return; }
  timeout $((limit < left ? limit : left)) "$@" >"$out/$name.log" 2>&1
  echo "$name rc $? $((SECONDS - begin)) s: $(grep -v '^$' "$out/$name.log" | tail -1 | cut -c1-160)" | tee -a "$out/steps.txt"
}
layers() { step "$1" "$2" $python experiments/gpu/layers.py "$1"; grep '^{' "$out/$1.log" >>"$out/numbers.jsonl"; }
run() { local name=$1 limit=$2; shift 2; step "$name" "$limit" $python -m specbench hydra.run.dir="$out/$name" logger=none "$@"; }

if [ -n "$DRY" ]; then
  export TRITON_INTERPRET=1
  small="target=bytes drafter=bytes max_new_tokens=6 data.limit=1"
  big=$small tests="tests/kernels/test_fused.py -k hidden"
else
  small="device=cuda data.limit=6 max_new_tokens=48" tests=tests/kernels
  big="device=cuda drafter=llama1b target.weights=random drafter.weights=random verifier=synthetic data.limit=3 max_new_tokens=96"
fi
step card 10 nvidia-smi
step clocks 10 nvidia-smi --query-gpu=name,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu --format=csv
step versions 40 $python -c "import torch, transformers, triton; print(torch.__version__, transformers.__version__, triton.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())"
layers exact 60
layers bits 60
run pair_gamma3 75 $big gamma=3
layers profile 45
run t0 40 $small temperature=0 gamma=4
run t0_eager 40 $small temperature=0 gamma=4 executor=eager
layers roof 60
run pair_gamma5_transformers 75 $big gamma=5 peers=transformers
run t1 40 $small temperature=1 gamma=4
run t1_paged_batch 40 $small temperature=1 gamma=4 cache=paged batch_size=2
run pair_gamma1 60 $big gamma=1
run pair_batch8 60 $big gamma=3 batch_size=8 data.limit=8
run pair_batch32 60 $big gamma=3 batch_size=32 data.limit=32
step tests 60 $python -m pytest -q -m cuda -p no:cacheprovider $tests
step clocks_after 10 nvidia-smi --query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv

$python - "$out" <<'P' | tee "$out/summary.txt"
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
for file in sorted(out.glob("*/results.json")):
    r = json.loads(file.read_text())
    c, b, s = r["cost"], r["bandwidth"], r["speedup"]
    share = (b["target_bytes_per_second"] or 0) / (b["measured_peak_bytes_per_second"] or 1)
    print(f"{file.parent.name}: step {1e3 * c['target_step_seconds']:.2f} ms, {share:.0%} of the measured bandwidth; c {c['c']} v {c['v']} o {c['o']}")
    print(f"  speedup {s['measured']} {s['ci95']}, Theorem 3.8 {s['theorem_3_8']}, over peers {r['speedup_over']}, lossless {r['lossless']['passed']} {r['lossless']['reason']}, batch invariant {r['details'].get('batch_invariant')}")
    print(f"  seconds {r['details']['facts']['seconds']}; notes {r['notes']}")
texts = [[json.loads(line)["speculative"]["ids"] for line in (out / name / "prompts.jsonl").open()] for name in ("t0", "t0_eager") if (out / name / "prompts.jsonl").is_file()]
if len(texts) == 2:
    print("texts of graphs and of eager mode are equal:", texts[0] == texts[1])
wrong = [line for line in (out / "numbers.jsonl").open() if '"value": false' in line]
print(f"{len(wrong)} comparisons to the bit failed", *wrong)
P
