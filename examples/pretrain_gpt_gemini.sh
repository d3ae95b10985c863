#!/usr/bin/env bash
# pretrain_gpt.sh with chunk ZeRO: parameters, gradients and optimizer states are split over the data-parallel ranks in
# chunks, and what of them rests in device memory is a choice. The report at the end shows the chunks of each rank, what
# was gathered, and how much at once. The same environment variables and arguments as pretrain_gpt.sh, with PP=1 by
# default (ranks that are pipeline stages have nothing to split among them), and:
#
#   STAGE        1 splits optimizer states, 2 gradients too, 3 parameters too (default: 3)
#   PLACEMENT    device, host, static:FRACTION or auto (default: host); with a budget for gathered parameters: host:8MiB
#   HOST_STEP    device: the optimizer steps on the device (default), host: Adam on the host's cores
#   CHUNK_MIB    MiB of bf16 that a chunk holds at least (default on cpu, where the model is small: 0.25; else 64)
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

export PP=${PP:-1}
if [ "${DEVICE:-cpu}" = cpu ]; then
    CHUNK_MIB=${CHUNK_MIB:-0.25}
fi
CHUNKS=(
    --use-distributed-optimizer
    --chunk-zero-stage "${STAGE:-3}"
    --placement-policy "${PLACEMENT:-host}"
    --host-optimizer-step "${HOST_STEP:-device}"
)
if [ -n "${CHUNK_MIB:-}" ]; then
    CHUNKS+=(--min-chunk-size-mib "$CHUNK_MIB" --chunk-search-range-mib "$CHUNK_MIB")
fi

exec "$here/pretrain_gpt.sh" "${CHUNKS[@]}" "$@"
