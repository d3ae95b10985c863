#!/usr/bin/env bash
# pretrain_gpt.sh as a pipeline of 4 stages; the same environment variables and arguments. The last stage, which has the
# output head as well, has the fewest layers; the first two, which hold the most micro-batches, swap their activations.
# Another model on two stages of two virtual stages each:
#     NPROC=2 PP=2 examples/pretrain_gpt_pipeline.sh --num-layers 12 --pipeline-stages 3,4,3,2
#
#   MAX_INFLIGHT   micro-batches (with virtual stages: passes of one chunk) that a stage may hold (default: no limit)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export NPROC=${NPROC:-4}
export PP=${PP:-4}

PIPELINE=(
    --num-layers 8
    --pipeline-stages 2,3,2,1
    --micro-batch-size 2
    --memory-config "$here/configs/swap_early_stages.yaml"
)
if [ -n "${MAX_INFLIGHT:-}" ]; then
    PIPELINE+=(--max-inflight-microbatches "$MAX_INFLIGHT")
fi

exec "$here/pretrain_gpt.sh" "${PIPELINE[@]}" "$@"
