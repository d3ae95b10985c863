#!/usr/bin/env bash
# pretrain_gpt.sh with recompute; the same environment variables and arguments. Another plan than this one:
#     examples/pretrain_gpt_recompute.sh --memory-config examples/configs/recompute_layers.yaml
# or none in a file: examples/pretrain_gpt.sh --recompute-layers 0,2 --select-recompute 'mlp=1'
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec "$here/pretrain_gpt.sh" --memory-config "$here/configs/recompute_selective.yaml" "$@"
