#!/bin/sh
# Every check on this machine's card, a process a part; a table of what failed comes last.
# Usage: tests/gpu/run.sh [PART ...]
#   stages follow models sanitized   kernels and small models against NumPy        golden    the oracle's checkpoints (Q27APP_SHARED)
#   dense layers resume       full width, all 64 layers (GPU_REFERENCE), prompts resumed anywhere
#   chain played daemon       the 27B through engine and daemon (GPU_MODELS: folder with q4s.q27, for chain with GPU_TIER's; made there if it is absent)
#   steps refusals            1,000 steps, repeated starts, sticky errors   memcheck racecheck   under compute-sanitizer
#   decode speed prefill      figures, stage by stage                       streams prompts   many answers at once, whole prompts, over HTTP and without (if named)
cd "$(dirname "$0")/../.." || exit 1
python="${PYTHON:-python3}"
export GPU_MODELS="${GPU_MODELS:-/tmp/27b}"
[ $# -gt 0 ] || set -- stages follow models golden dense resume steps refusals memcheck racecheck chain played daemon decode prefill speed
failed=""
for part in "$@"; do
  echo "== $part"
  case "$part" in
    chain | played | daemon | refusals | layers | streams | prompts)
      tier=q4s; [ "$part" != chain ] || tier="${GPU_TIER:-q4s}"
      [ -f "$GPU_MODELS/$tier.q27" ] || { mkdir -p "$GPU_MODELS" && "$python" -m q27app synth "$GPU_MODELS/$tier.q27" --size 27b --tier "$tier" --accept 0.85; } ;;
  esac
  case "$part" in
    memcheck | racecheck) compute-sanitizer --tool "$part" --error-exitcode 9 --print-limit 20 "$python" -m tests.gpu.checks sanitized ;;
    played) "$python" -m tests.gpu.checks played && Q27APP_FORCE_ARCH=86 Q27APP_MEMORY_CAP=24000000000 "$python" -m tests.gpu.checks played ;;
    streams) "$python" -m tests.gpu.streams off,on,gap,turn,disk,host,solo "$GPU_MODELS/q4s.q27" ;;
    prompts) "$python" -m tests.gpu.prompts passes,engine,http "$GPU_MODELS/q4s.q27" ;;
    *) "$python" -m tests.gpu.checks "$part" ;;
  esac || failed="$failed $part"
done
echo "== parts that failed:${failed:- none}"
[ -z "$failed" ]
