#!/usr/bin/env bash
# toy_llama on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 2 · pp 2 · tp-pp-dp · micro-batch 2 × 4 · ZeRO-1
# MEGATRON: folder of Megatron-LM; NODE_RANK, MASTER_ADDR, MASTER_PORT: of this node.
set -eu
export CUDA_DEVICE_MAX_CONNECTIONS=1

parallelism=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 2
    --context-parallel-size 1
    --use-tp-pp-dp-mapping
    --pipeline-model-parallel-layout "Et*5|t*3L"
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 2
    --global-batch-size 16
)

model=(
    --num-layers 8
    --hidden-size 64
    --ffn-hidden-size 96
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 2
    --max-position-embeddings 64
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --hidden-dropout 0.0
    --attention-dropout 0.0
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
