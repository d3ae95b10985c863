#!/usr/bin/env bash
# pretrain_gpt.sh with swap and recompute; the same environment variables and arguments. Another plan than this one:
#     examples/pretrain_gpt_swap_recompute.sh --memory-config examples/configs/swap_and_recompute.yaml
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec "$here/pretrain_gpt.sh" --memory-config "$here/configs/swap_and_recompute_mix.yaml" "$@"
