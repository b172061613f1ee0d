"""Short words of the field for keys: `tp=4` stands for `space.tp=4` in every command."""

from collections.abc import Sequence
from typing import Any

from darts_parallel.errors import ConfigError

NODES = "cluster.nodes.0.count"
GPUS = "cluster.nodes.0.gpus"
WORDS = {
    "tp": "space.tp",
    "pp": "space.pp",
    "dp": "space.dp",
    "ep": "space.ep",
    "etp": "space.etp",
    "cp": "space.cp",
    "vpp": "space.virtual_stages",
    "zero": "space.zero_stage",
    "recompute": "space.recompute",
    "mbs": "space.micro_batch_size",
    "gbs": "training.global_batch_size",
    "seq": "training.seq_len",
    "nodes": NODES,
    "gpus": GPUS,
}
"""Key that each word stands for."""
OTHER_WORDS = {
    "zero_stage": "space.zero_stage",
    "virtual_stages": "space.virtual_stages",
    "micro_batch_size": "space.micro_batch_size",
    "num_micro_batches": "space.num_micro_batches",
    "sequence_parallel": "space.sequence_parallel",
}
"""Last parts of keys of the space that are taken without their group, too."""
EVERY_WORD = WORDS | OTHER_WORDS
SYNONYMS = {
    "batch_size": "gbs",
    "global_batch_size": "gbs",
    "train_batch_size": "gbs",
    "micro_batch": "mbs",
    "train_micro_batch_size_per_gpu": "mbs",
    "sequence_length": "seq",
    "seq_length": "seq",
    "seq_len": "seq",
    "tensor_parallel": "tp",
    "tensor_parallel_size": "tp",
    "tensor_parallel_degree": "tp",
    "tensor_model_parallel_size": "tp",
    "pipeline": "pp",
    "pipeline_parallel": "pp",
    "pipeline_parallel_size": "pp",
    "pipeline_parallel_degree": "pp",
    "pipeline_model_parallel_size": "pp",
    "data_parallel": "dp",
    "data_parallel_size": "dp",
    "context_parallel": "cp",
    "context_parallel_size": "cp",
    "context_parallel_degree": "cp",
    "expert_parallel": "ep",
    "expert_parallel_size": "ep",
    "expert_parallel_degree": "ep",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "virtual_pipeline_parallel_size": "vpp",
    "gpus_per_node": "gpus",
    "num_nodes": "nodes",
    "nnodes": "nodes",
    "activation_checkpointing": "recompute",
}
"""Names that trainers give to these words; a command that uses one is told the word."""
LEARNING_RATE = "the trainer's own files, since no learning rate is planned"
ANSWERS = {
    "fsdp": "zero=3",
    "zero3": "zero=3",
    "num_gpus": "nodes=... gpus=..., where gpus are those of one node",
    "world_size": "nodes=... gpus=..., whose product it is",
    "dtype": "training.precision=bf16",
    "lr": LEARNING_RATE,
    "learning_rate": LEARNING_RATE,
    "fp8": "training.precision=fp8",
    "load_in_4bit": "training.lora_rank=16 training.frozen_bits=4",
    "gradient_accumulation_steps": "num_micro_batches=..., or gbs=... and mbs=...",
    "layers_per_stage": "price, whose plan.json has the layers of each stage",
}
"""Words that a sentence proposes for a name whose value is another one here."""
PROGRAMS = {
    "trainer=fsdp": "torchtitan, or accelerate for a Hugging Face model",
    "trainer=fsdp2": "torchtitan, or accelerate for a Hugging Face model",
    "trainer=hf": "accelerate",
    "trainer=huggingface": "accelerate",
    "trainer=axolotl": "accelerate",
    "trainer=trl": "accelerate",
    "trainer=zero": "deepspeed",
    "trainer=nemo": "megatron",
}
"""Trainers that users name by a part, or by a program around them."""
JOB_GROUPS = ("model", "training", "trainer", "space", "cost")
"""Groups of keys that are of a job whatever the machine."""
MOST_GROWTH = 2
"""Factor over the cluster's own GPUs of a node above which `gpus` probably counts the cluster."""


def given_values(arguments: Sequence[str]) -> dict[str, str]:
    """Return the values of overrides by key."""
    return dict(argument.partition("=")[::2] for argument in arguments)


def of_job(argument: str) -> bool:
    """Return whether an override is of a job and not of the machine, or of one command."""
    key = argument.partition("=")[0]
    full = EVERY_WORD.get(key, key)
    return full.partition(".")[0] in JOB_GROUPS


def without_words(arguments: Sequence[str]) -> list[str]:
    """Return overrides with keys in place of words; other overrides stay as they are."""
    result = []
    for argument in arguments:
        word, given, value = argument.partition("=")
        result.append(f"{EVERY_WORD.get(word, word)}{given}{value}" if given else argument)
    return result


def require_clear_machine(arguments: Sequence[str], own: Sequence[Any]) -> None:
    """Refuse `gpus` and `nodes` where they could mean something else.

    Args:
        arguments: Of the command, words included.
        own: Node groups of the cluster before the words change them.

    Errors:
        ConfigError: there are several node groups, or `gpus` seems to count those of all nodes.
    """
    given = given_values(arguments)
    for word, key in (("gpus", GPUS), ("nodes", NODES)):
        if word in given and len(own) > 1:
            raise ConfigError(
                f"{word}={given[word]} must name one of the {len(own)} node groups of the cluster; "
                f"try {key}={given[word]}, which is the first one."
            )
    gpus = given.get("gpus", "")
    if not gpus.isdigit() or not own:
        return
    size = int(own[0].gpus)
    if int(gpus) > MOST_GROWTH * size and int(gpus) % size == 0:
        raise ConfigError(
            f"gpus={gpus} must be the GPUs of one node, of which this cluster has {size}; "
            f"try nodes={int(gpus) // size}, or {GPUS}={gpus} for such nodes."
        )
