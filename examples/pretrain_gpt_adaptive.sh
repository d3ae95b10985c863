#!/usr/bin/env bash
# pretrain_gpt.sh with less device memory than the model wants, left to --adaptive-memory-optimization: the first step
# survives by moving activations to the host, the next ones are profiled, then a plan is made, compared with what it
# takes, corrected, and kept for the next start. The report at the end shows predicted and measured figures, and the
# plan as a grid of layers and operators. The same environment variables and arguments as pretrain_gpt.sh, and:
#
#   DEVICE_GIB   device memory that each rank may use, in GiB (default on cpu: 0.02, about 60 % of what two ranks
#                would take; on cuda and npu: all there is)
#   PLAN         where the plan is kept (default: adaptive_plan.yaml in the present folder)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export TRAIN_ITERS=${TRAIN_ITERS:-60}
ADAPTIVE=(
    --adaptive-memory-optimization
    --adaptive-plan-file "${PLAN:-adaptive_plan.yaml}"
)
if [ "${DEVICE:-cpu}" = cpu ]; then
    DEVICE_GIB=${DEVICE_GIB:-0.02}
fi
if [ -n "${DEVICE_GIB:-}" ]; then
    ADAPTIVE+=(--device-memory-gib "$DEVICE_GIB")
fi

exec "$here/pretrain_gpt.sh" "${ADAPTIVE[@]}" "$@"
