#!/usr/bin/env bash
# toy on toy, 8 GPUs; written by darts-parallel
# dp 4 · tp 2 · pp 1 · micro-batch 2 × 2 · ZeRO-1 · recompute full · sequence parallel
# MEGATRON: folder of Megatron-LM; NODE_RANK, MASTER_ADDR, MASTER_PORT: of this node.
set -eu
export PYTHONPATH="${MEGATRON:-.}${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1

parallelism=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 2
    --global-batch-size 16
)

recomputation=(
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)

model=(
    --encoder-num-layers 2
    --decoder-num-layers 2
    --decoder-seq-length 64
    --hidden-size 64
    --ffn-hidden-size 256
    --num-attention-heads 4
    --max-position-embeddings 64
    --position-embedding-type learned_absolute
    --normalization LayerNorm
    --vocab-size 256
    --make-vocab-size-divisible-by 128
)

training=(
    --seq-length 64
    --bf16
    --accumulate-allreduce-grads-in-fp32
    --optimizer adam
    --attention-backend fused
)

torchrun --nnodes 2 --nproc-per-node 4 --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
    "${MEGATRON:-.}/examples/t5/pretrain_t5.py" "${parallelism[@]}" "${recomputation[@]}" "${model[@]}" "${training[@]}" "$@"
