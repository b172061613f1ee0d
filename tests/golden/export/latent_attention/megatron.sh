#!/usr/bin/env bash
# toy_latent on toy, 8 GPUs; written by darts-parallel
# dp 2 · tp 1 · ep 2 · pp 4 · micro-batch 2 × 4 · ZeRO-1 · recompute selective
# MEGATRON: folder of Megatron-LM; NODE_RANK, MASTER_ADDR, MASTER_PORT: of this node.
set -eu
export CUDA_DEVICE_MAX_CONNECTIONS=1

parallelism=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --context-parallel-size 1
    --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
    --micro-batch-size 2
    --global-batch-size 16
)

recomputation=(
    --recompute-granularity selective
    --recompute-modules mla_up_proj mlp moe_act
)

model=(
    --num-layers 8
    --hidden-size 64
    --ffn-hidden-size 96
    --num-attention-heads 4
    --max-position-embeddings 64
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --multi-latent-attention
    --qk-layernorm
    --q-lora-rank 24
    --kv-lora-rank 16
    --qk-head-dim 16
    --qk-pos-emb-head-dim 8
    --v-head-dim 16
    --num-experts 4
    --moe-router-topk 2
    --moe-ffn-hidden-size 48
    --moe-layer-freq "([0]*1+[1]*7)"
    --moe-shared-expert-intermediate-size 48
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
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
    "${MEGATRON:-.}/pretrain_gpt.py" "${parallelism[@]}" "${recomputation[@]}" "${model[@]}" "${training[@]}" "$@"
