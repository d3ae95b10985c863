#!/usr/bin/env bash
# Trains a small GPT on the source text of Python's standard library:
#     examples/pretrain_gpt.sh                                        two CPU ranks, about a minute
#     DEVICE=cuda NPROC=8 TP=2 PP=4 examples/pretrain_gpt.sh --bf16 --num-layers 32 --hidden-size 4096 ...
# All arguments are passed on and win over those below; `examples/pretrain_gpt.sh --help` lists them.
#
#   DEVICE        cpu (default), cuda or npu
#   NPROC         ranks on this node (default: 2)
#   TP, PP, VPP   tensor and pipeline parallel size (default on two ranks: 1, 2), layers per virtual pipeline stage
#   TRAIN_ITERS   iterations (default: 200)
#   SAVE          folder for checkpoints; a run continues from what is there
#   MEGATRON_LM   checkout of Megatron-LM core_v0.16.1, to train by its pretrain_gpt.py instead of the one in this folder
#   PYTHON        the interpreter (default: python3)
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT   several nodes, as torchrun knows them; each node runs this script
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

wrong=
for name in NPROC TP PP VPP NNODES NODE_RANK TRAIN_ITERS; do
    value=${!name:-1} least=1
    [[ $name != NODE_RANK && $name != TRAIN_ITERS ]] || least=0
    if [[ ! $value =~ ^(0|[1-9][0-9]{0,8})$ || $value -lt $least ]]; then
        echo "${0##*/}: $name: got '$value'; allowed: a whole number from $least" >&2
        wrong=yes
    fi
done
[ -z "$wrong" ] || exit 2

PYTHON=${PYTHON:-python3}
DEVICE=${DEVICE:-cpu}
NPROC=${NPROC:-2}
TP=${TP:-1}
PP=${PP:-$((NPROC * ${NNODES:-1} / TP > 1 ? 2 : 1))}
TRAIN_ITERS=${TRAIN_ITERS:-200}

# Without torch torchrun cannot even be named; Megatron-LM's checkout has a megatron of its own.
needed=(torch)
[ -n "${MEGATRON_LM:-}" ] || needed+=(megatron)
has="import sys, importlib.util as found; sys.exit(not all(map(found.find_spec, sys.argv[1:])))"
if ! command -v "$PYTHON" >/dev/null; then
    echo "${0##*/}: PYTHON: got '$PYTHON', which is no command; allowed: the interpreter that has torch and megatron-core" >&2
    exit 2
elif ! "$PYTHON" -c "$has" "${needed[@]}"; then
    echo "${0##*/}: $(command -v "$PYTHON") does not have all of: ${needed[*]}; activate the environment that has them," \
        "or set PYTHON to its interpreter" >&2
    exit 2
fi

# A bare checkout works without an installation.
if [ -d "$here/../mindspeed_mem" ]; then
    export PYTHONPATH="${here%/*}${PYTHONPATH:+:$PYTHONPATH}"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [[ $TP -gt 1 || " $* " == *" --context-parallel-size"* ]]; then
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # as Megatron wants it; else copies wait in one queue
fi

# Else torch's allocator keeps memory in pieces, and a model that needs most of a device may not fit.
if [[ $DEVICE != cpu && -z ${PYTORCH_ALLOC_CONF+set} ]]; then
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF-expandable_segments:True}
    export PYTORCH_NPU_ALLOC_CONF=${PYTORCH_NPU_ALLOC_CONF-expandable_segments:True}
fi

LAUNCH=(--nproc-per-node "$NPROC")
if [ "${NNODES:-1}" -gt 1 ]; then
    LAUNCH+=(--nnodes "$NNODES" --node-rank "${NODE_RANK:?}" --master-addr "${MASTER_ADDR:?}")
    LAUNCH+=(--master-port "${MASTER_PORT:-29500}")
elif [ -n "${MASTER_PORT:-}" ]; then
    LAUNCH+=(--master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "$MASTER_PORT")
else
    LAUNCH+=(--standalone) # a free port, so that two jobs on one machine do not meet
fi

MODEL=(
    --num-layers 4
    --hidden-size 128
    --num-attention-heads 4
    --seq-length 128
    --max-position-embeddings 128
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --init-method-std 0.06
    --attention-dropout 0
    --hidden-dropout 0
    --transformer-impl local
)
if [[ " $* " != *" --transformer-impl transformer_engine"* && " $* " != *" --transformer-impl=transformer_engine"* ]]; then
    MODEL+=(--sdpa-attention) # torch's flash attention for Megatron's own layers; others bring theirs
fi
TRAINING=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters "$TRAIN_ITERS"
    --lr 3e-3
    --min-lr 3e-4
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --clip-grad 1.0
    --seed 1234
)
PARALLEL=(
    --device "$DEVICE"
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
)
if [ -n "${VPP:-}" ]; then
    PARALLEL+=(--num-layers-per-virtual-pipeline-stage "$VPP")
fi
OUTPUT=(
    --log-interval 10
    --eval-interval 50
    --eval-iters 2
)
if [ -n "${SAVE:-}" ]; then
    OUTPUT+=(--save "$SAVE" --load "$SAVE" --save-interval 50)
fi

if [ -z "${MEGATRON_LM:-}" ]; then
    SCRIPT=("$here/pretrain_gpt.py" --split 95,5,0)
else
    MEGATRON_LM=$(cd "$MEGATRON_LM" && pwd)
    # The same text and tokens: --vocab-size counts the bytes, NullTokenizer adds the end of a document.
    CORPUS=$(PYTHONPATH="$PYTHONPATH:$MEGATRON_LM" "$PYTHON" "$here/gpt_corpus.py")
    SCRIPT=(
        -m mindspeed_mem run "$MEGATRON_LM/pretrain_gpt.py"
        --data-path "$CORPUS"
        --data-cache-path "${CORPUS%/*}/megatron_lm"
        --split 95,5,0
        --tokenizer-type NullTokenizer
        --vocab-size 256
        --num-workers 0
        # The kernels of Apex and TransformerEngine, and what is compiled at the first step.
        --no-gradient-accumulation-fusion
        --no-masked-softmax-fusion
        --no-persist-layer-norm
        --no-bias-gelu-fusion
        --no-bias-swiglu-fusion
        --no-bias-dropout-fusion
        --no-rope-fusion
        --distributed-backend "$([ "$DEVICE" = cuda ] && echo nccl || echo gloo)"
    )
fi

exec "$PYTHON" -m torch.distributed.run "${LAUNCH[@]}" "${SCRIPT[@]}" \
    "${MODEL[@]}" "${TRAINING[@]}" "${PARALLEL[@]}" "${OUTPUT[@]}" "$@"
