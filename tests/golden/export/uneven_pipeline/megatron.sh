#!/usr/bin/env bash
# toy on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 1 · pp 4 · micro-batch 2 × 4 · ZeRO-1
# MEGATRON: folder of Megatron-LM; NODE_RANK, MASTER_ADDR, MASTER_PORT: of this node.
set -eu
export CUDA_DEVICE_MAX_CONNECTIONS=1

parallelism=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --context-parallel-size 1
    --pipeline-model-parallel-layout "E|t*3|t|L"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 2
    --global-batch-size 16
)

model=(
    --num-layers 4
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
    "${MEGATRON:-.}/pretrain_gpt.py" "${parallelism[@]}" "${model[@]}" "${training[@]}" "$@"
