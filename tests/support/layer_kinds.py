"""Toy problems whose layers differ: a hybrid of all kinds, windows, multi-token prediction."""

TOY = ["model=toy", "cluster=toy", "training=toy"]
MIXER = ["model.mamba_head_dim=16", "model.mamba_state_dim=16", "model.mamba_num_groups=4"]
"""State spaces as small as the toy: 8 heads of 16 for a hidden size of 64."""
HYBRID = [
    *TOY,
    "model.num_layers=5",
    "model.hybrid_override_pattern=M-*-M",
    "model.mamba_chunk_size=16",
    *MIXER,
    "model.sliding_window=16",
]
PREDICTION = [*TOY, "model.mtp_num_layers=1", "model.tie_embeddings=false"]
WINDOWS = [*TOY, "model.sliding_window=16", "model.sliding_window_pattern=2"]
