"""Fields of `ModelConfig` that the weights of a `transformers` model say, read from their shapes.

Every module with weights of its own gets one role: table, norm, product of attention or MLP, router, experts,
state space. What has no role here is refused by its path and class; what is read wrongly does not add up in
`problem/referee.py`.
"""

import re
from collections.abc import Iterator
from math import gcd, prod
from typing import Any

from torch import nn

from darts_parallel.config.layer_pattern import ATTENTION, EXPERTS, MAMBA, MLP

Fields = dict[str, Any]
_ATTENTION = re.compile(r"Att(entio)?n", re.IGNORECASE)
_QUERY_OR_KEY = re.compile(r"(^|[._])(q|k|query|key)[a-z_]*norm", re.IGNORECASE)
_LATENT = re.compile(r"[._](q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)$")
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head")


class NotModelled(Exception):  # noqa: N818
    """A part of a model that `ModelConfig` has no field for; the message names it."""


class MetaPart:
    """A module with weights of its own, and its path."""

    def __init__(self, path: str, module: nn.Module):
        self.path, self.module = path, module
        self.weights = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
        weight = self.weights.get("weight", ())
        flat = len(weight) == 2 and not isinstance(module, nn.Embedding)
        turned = type(module).__name__ == "Conv1D"  # GPT-2 stores its products transposed
        self.out, self.inputs = (weight[::-1] if turned else weight) if flat else (0, 0)
        self.bias = "bias" in self.weights
        named = "Norm" in type(module).__name__ and not isinstance(module, nn.Linear)
        if named:
            self.out = self.inputs = 0
        plain = set(self.weights) <= {"weight", "bias"} and (len(weight) == 1 or named)
        self.norm = prod(weight) if weight and plain else 0

    def refuse(self, why: str) -> NotModelled:
        """Return the error that names this part."""
        return NotModelled(f"{self.path} ({type(self.module).__name__}) {why}")


def parts_of(root: nn.Module, path: str, order: dict[nn.Module, int]) -> list[MetaPart]:
    """Return the modules with trained weights below `root`, in the order of their calls."""
    found = [
        MetaPart(f"{path}.{name}".strip("."), module)
        for name, module in root.named_modules()
        if any(p.requires_grad for p in module.parameters(recurse=False))
    ]
    return sorted(found, key=lambda part: order.get(part.module, len(order)))


def bare_norms(root: nn.Module) -> int:
    """Return the number of norms without weights below `root`, those of queries and keys left aside."""
    bare = [name for name, module in root.named_modules()
            if "Norm" in type(module).__name__ and not any(True for _ in module.parameters())]  # fmt: skip
    return sum(not _QUERY_OR_KEY.search(name) for name in bare)


def stacks_of(model: nn.Module, count: int) -> list[tuple[str, nn.ModuleList]]:
    """Return the `count` outermost lists of modules with the most parameters, as the model holds them."""
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(p, m) for p, m in lists if not any(p.startswith(f"{other}.") for other, _ in lists)]
    size = {path: sum(p.numel() for p in module.parameters()) for path, module in outer}
    largest = sorted(size, key=lambda path: -size[path])[:count]
    return [(path, module) for path, module in outer if path in largest]


class MetaBlock:
    """The roles of the parts of one block, and the fields that they say."""

    def __init__(self, path: str, block: nn.Module, hidden: int, config: Any, order: dict[nn.Module, int]):
        self.path, self.hidden, self.config, self.module = path, hidden, config, block
        self.fields: Fields = {}
        self.norms, self.buckets = 0, 0
        parts = parts_of(block, path, order)
        self.roots = self._attention_roots()
        groups = [[p for p in parts if p.path.startswith(f"{r}.") or p.path == r] for r in self.roots]
        taken = {part.path for group in groups for part in group}
        rest = [part for part in parts if part.path not in taken]
        mixer = next((p for p in rest if "A_log" in p.weights), None)
        self.mamba = mixer is not None
        if mixer is not None:
            rest = self._state_space(mixer, rest)
        for group in groups:
            self._attention(group)
        self.experts = False
        self.ffn = 0
        self._mlp(self._take_norms(rest))
        if not self.norms and bare_norms(block):
            self.norms = bare_norms(block)
            self.fields.update(norm_scale=False, norm_bias=False)

    def _set(self, part: MetaPart, **fields: Any) -> None:
        for key, value in fields.items():
            if self.fields.setdefault(key, value) != value:
                raise part.refuse(f"has {key}={value} beside {self.fields[key]}, and one model has one")

    def _attention_roots(self) -> list[str]:
        names = [n for n, m in self.module.named_modules() if n and _ATTENTION.search(type(m).__name__)
                 and any(True for _ in m.parameters())]  # fmt: skip
        outer = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
        return [f"{self.path}.{name}" for name in outer]

    def _take_norms(self, parts: list[MetaPart]) -> list[MetaPart]:
        """Count the norms of the hidden state; return the other parts."""
        for part in parts:
            if part.norm == self.hidden:
                self.norms += 1
                self._set(part, norm_bias=part.bias)
        return [part for part in parts if part.norm != self.hidden]

    def _attention(self, parts: list[MetaPart]) -> None:
        latent = [p for p in parts if "kv_a_" in p.path]
        scales = [p for p in parts if p.norm and _QUERY_OR_KEY.search(p.path)]
        left = self._take_norms([p for p in parts if p not in scales])
        products = [p for p in left if p.out]
        for part in left:
            sinks = [name for name in part.weights if name == "sinks"]
            if part.out == 0 and "relative" in part.path and isinstance(part.module, nn.Embedding):
                self.buckets += part.weights["weight"][0]
            elif sinks and len(part.weights) == 1:
                self._set(part, attention_sinks=True)
            elif not part.out:
                raise part.refuse("is not modelled")
        *ins, out = products
        self._set(out, attention_output_bias=out.bias)
        if latent:
            self._latent(products, out)
            return
        size = next((getattr(m, key) for m in self._below(parts) for key in _HEAD_SIZES
                     if isinstance(getattr(m, key, None), int)), None)  # fmt: skip
        size = size or out.inputs // self.config.num_attention_heads
        queries, total = out.inputs, sum(part.out for part in ins)
        keys = (total - queries) // 2
        expected = {1: [total], 2: [queries, 2 * keys], 3: [queries, keys, keys]}.get(len(ins))
        wrong = expected is None or sorted(p.out for p in ins) != sorted(expected)
        given = getattr(self.config, "num_key_value_heads", None)
        if (
            wrong
            or keys <= 0
            or keys % size
            or (given and len(ins) < 3 and keys not in (queries, given * size))
        ):
            shapes = ", ".join(f"{p.path.rpartition('.')[2]} {p.out}x{p.inputs}" for p in products)
            raise ins[-1].refuse(
                f"stands in an attention of products {shapes}, which are no queries, keys and values"
            )
        self._set(out, num_heads=queries // size, num_kv_heads=keys // size, head_dim=size)
        if len({part.bias for part in ins}) > 1:
            raise next(p for p in ins if p.bias != ins[0].bias).refuse(
                "has another bias than the queries' product"
            )
        self._set(ins[0], qkv_bias=ins[0].bias)
        if scales:
            found = [
                sum(p.norm for p in scales if bool(re.search(r"[._]k", p.path)) == key)
                for key in (False, True)
            ]
            whole = found == [queries, keys] and queries != size
            if not whole and found != [size, size]:
                raise scales[0].refuse("is no norm of one head, nor of all heads, of queries and keys")
            self._set(scales[0], qk_norm=True, qk_norm_whole=whole)

    def _below(self, parts: list[MetaPart]) -> Iterator[nn.Module]:
        for root in self.roots:
            yield from self.module.get_submodule(root[len(self.path) + 1 :]).modules()

    def _latent(self, products: list[MetaPart], out: MetaPart) -> None:
        c = self.config
        sizes = {
            key: getattr(c, key)
            for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        }
        odd = next((p for p in products if p.bias or not _LATENT.search(p.path)), None)
        if odd is not None:
            raise odd.refuse("is no product of latent attention, or has a bias, which is not modelled")
        self._set(out, multi_latent_attention=True, q_lora_rank=getattr(c, "q_lora_rank", None), **sizes)
        self._set(out, num_heads=out.inputs // c.v_head_dim, qkv_bias=False)

    def _state_space(self, mixer: MetaPart, parts: list[MetaPart]) -> list[MetaPart]:
        """Read the fields of Mamba-1 or Mamba-2; return the parts outside of the mixer."""
        inside = [p for p in parts if p.path == mixer.path or p.path.startswith(f"{mixer.path}.")]
        by_name = {p.path.rpartition(".")[2]: p for p in inside if p is not mixer}
        if not {"in_proj", "out_proj", "conv1d"} <= set(by_name):
            raise mixer.refuse("is no state space of Mamba-1 or Mamba-2")
        inner, convolved = by_name["out_proj"].inputs, by_name["conv1d"].weights["weight"]
        first, *second = mixer.weights["A_log"]
        self._set(mixer, mamba_conv_kernel=convolved[-1], mamba_bias=by_name["in_proj"].bias)
        if second:
            rank = by_name["dt_proj"].inputs
            self._set(mixer, mamba_inner_norms=any("norm" in name for name in by_name))
            self._set(
                mixer, mamba_num_heads=inner, mamba_head_dim=1, mamba_state_dim=second[0], mamba_dt_rank=rank
            )
        else:
            groups = mixer.module.n_groups
            assert isinstance(groups, int)
            state = (convolved[0] - inner) // (2 * groups)
            self._set(mixer, mamba_num_heads=first, mamba_head_dim=inner // first, mamba_state_dim=state)
            self._set(mixer, mamba_num_groups=groups, mamba_chunk_size=mixer.module.chunk_size)
        return [p for p in parts if p not in inside]

    def _mlp(self, parts: list[MetaPart]) -> None:
        """Read experts with their router, then the MLP (or shared experts) that is left."""
        fused = [p for p in parts if any(len(shape) == 3 for shape in p.weights.values())]
        for part in fused:
            self._experts(part)
            parts.remove(part)
        if fused:
            count = self.fields["num_experts"]
            router = next((p for p in parts if p.out == count), None)
            if router is None:
                raise fused[0].refuse("has no router")
            self._set(router, moe_router_bias=router.bias)
            parts.remove(router)
            gate = next((p for p in parts if p.out == 1 and not p.bias), None)
            if gate is not None:
                parts.remove(gate)
            self._set(fused[0], moe_shared_expert_gate=gate is not None)
        other = next((p for p in parts if not p.out), None)
        if other is not None:
            raise other.refuse("is not modelled")
        if not parts:
            return
        *ins, down = parts
        self.ffn = down.inputs
        widths = [p.out for p in ins]
        if widths not in ([self.ffn], [self.ffn, self.ffn], [2 * self.ffn]) or down.out != self.hidden:
            raise parts[0].refuse(f"stands in an MLP of widths {[*widths, down.out]}, which is not modelled")
        self._set(down, gated_mlp=sum(widths) > self.ffn)
        if len({p.bias for p in parts}) > 1:
            raise down.refuse("has another bias than the MLP's first product")
        self._set(down, mlp_bias=down.bias)

    def _experts(self, part: MetaPart) -> None:
        shapes = {name: shape for name, shape in part.weights.items() if len(shape) == 3}
        count, *_ = next(iter(shapes.values()))
        total = sum(a * b for _, a, b in shapes.values()) // self.hidden
        down = next(
            (s for name, s in shapes.items() if "down" in name or "output" in name or name == "w2"), None
        )
        if down is None or self.hidden not in down:
            raise part.refuse("are experts of an unknown form")
        width = down[1] * down[2] // self.hidden
        biases = len(part.weights) > len(shapes)
        self.experts = True
        self._set(
            part,
            num_experts=count,
            moe_ffn_hidden_size=width,
            gated_mlp=total == 3 * width,
            expert_bias=biases,
        )


def fields_of(model: nn.Module, config: Any, order: dict[nn.Module, int]) -> tuple[Fields, list[str]]:
    """Return what the weights of `model` say of a `ModelConfig`, and the paths of its blocks.

    Args:
        model: A causal, masked or sequence-to-sequence language model of `transformers`.
        config: Its configuration.
        order: Number of every module's first call in a forward pass.

    Errors:
        NotModelled: a part has no field.
    """
    table = model.get_input_embeddings()  # type: ignore[operator]
    vocabulary, hidden = table.weight.shape
    stacks = stacks_of(model, 2 if getattr(config, "is_encoder_decoder", False) else 1)
    blocks = [
        MetaBlock(f"{path}.{i}", block, hidden, config, order)
        for path, stack in stacks
        for i, block in enumerate(stack)
    ]
    if not blocks:
        raise NotModelled(f"{type(model).__name__} has no list of blocks")
    fields = _merged(blocks)
    outside = [part for part in parts_of(model, "", order)
               if not any(part.path.startswith(f"{path}.") for path, _ in stacks)]  # fmt: skip
    fields.update(_ends(model, config, outside, hidden, fields))
    if "num_heads" not in fields:  # state spaces alone
        fields["num_heads"] = gcd(hidden, fields.get("mamba_num_heads", 1))
    fields.update(vocab_size=vocabulary, hidden_size=hidden, **_blocks(blocks, stacks, fields))
    return _biases(fields), [block.path for block in blocks]


def _merged(blocks: list[MetaBlock]) -> Fields:
    fields: Fields = {}
    for block in blocks:
        for key, value in block.fields.items():
            if fields.setdefault(key, value) != value:
                name = type(block.module).__name__
                raise NotModelled(
                    f"{block.path} ({name}) has {key}={value} and other blocks have {fields[key]}"
                )
    return fields


def _blocks(blocks: list[MetaBlock], stacks: list[tuple[str, nn.ModuleList]], fields: Fields) -> Fields:
    """Say which block has what: experts, state spaces, norms."""
    said: Fields = {
        "num_layers": len(blocks),
        "num_encoder_layers": len(stacks[0][1]) if len(stacks) > 1 else 0,
    }
    hybrid = any(b.mamba or not b.roots or not (b.ffn or b.experts) for b in blocks)
    parts = [
        (MAMBA * b.mamba) + ATTENTION * len(b.roots) + (EXPERTS if b.experts else MLP * bool(b.ffn))
        for b in blocks
    ]
    said["relative_position_buckets"] = sum(block.buckets for block in blocks) // len(stacks)
    if hybrid:
        said.update(hybrid_override_pattern="".join(parts), num_layers=len("".join(parts)))
    widths: dict[str, set[int]] = {"dense": set(), "shared": set()}
    for block in blocks:
        widths["shared" if block.experts else "dense"].add(block.ffn)
    for kind, found in widths.items():
        if len(found - {0}) > 1 or (kind == "shared" and len(found) > 1):
            raise NotModelled(
                f"{blocks[0].path} has a {kind} MLP of another width than other blocks: {sorted(found)}"
            )
    said["ffn_hidden_size"] = max(widths["dense"], default=0) or None
    if any(b.experts for b in blocks):
        said["moe_shared_expert_intermediate_size"] = max(widths["shared"]) or None
        flags = [int(b.experts) for b in blocks]
        if not all(flags) and not hybrid:
            said["moe_layer_freq"] = flags
    counts = [block.norms for block in blocks]
    if fields["embedding_norm"] and len(blocks) > 1 and counts[0] == counts[1] - 1:
        said["embedding_norm"], counts[0] = False, counts[1]  # ModernBERT's stands for one of the first block
    if any(count != len(part) for count, part in zip(counts, parts, strict=True)):
        odd = next((i for i, count in enumerate(counts) if count != counts[0]), 0)
        if hybrid or odd or not counts[0]:
            name = f"{blocks[odd].path} ({type(blocks[odd].module).__name__})"
            raise NotModelled(f"{name} has {counts[odd]} norms with weights, which is not modelled")
        said["block_norms"] = counts[0]
    return said


def _ends(model: nn.Module, config: Any, parts: list[MetaPart], hidden: int, fields: Fields) -> Fields:
    """Read tables, norms and head outside of the blocks."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    stacks = 2 if getattr(config, "is_encoder_decoder", False) else 1
    found: Fields = {
        "tie_embeddings": head is None or head.weight is table.weight,
        "learned_positions": False,
    }
    counts = {"final": 0, "embedding": 0}
    after: list[MetaPart] = []
    if not fields.get("norm_scale", True):
        counts["final"] = stacks  # whose number no shape says
    for part in parts:
        name = part.path.lower()
        rows, width = (*part.weights.get("weight", (0,)), 0)[:2]
        if part.module in (table, head) or getattr(part.module, "weight", None) is table.weight:
            found["output_bias"] = found.get("output_bias", False) or (part.module is head and part.bias)
        elif isinstance(part.module, nn.Embedding) and width == hidden and ("pos" in name or "wpe" in name):
            pad = part.module.padding_idx
            offset = int(getattr(part.module, "offset", 0 if pad is None else pad + 1))
            found.update(learned_positions=True, max_seq_len=rows - offset, position_offset=offset)
        elif isinstance(part.module, nn.Embedding) and width == hidden and "type" in name:
            found["token_types"] = rows
        elif part.weights == {"bias": (table.weight.shape[0],)}:
            found["output_bias"] = True
        elif part.norm == hidden:
            if fields.setdefault("norm_bias", part.bias) != part.bias:
                raise part.refuse("has another bias than the norms of the blocks")
            if after:
                after.append(part)
            else:
                counts["embedding" if "emb" in name else "final"] += 1
        elif part.out == part.inputs == hidden and not after and "pool" not in name:
            found.update(head_transform=True, transform_bias=part.bias)
            after.append(part)
        else:
            raise part.refuse("is not modelled")
    for key, count in counts.items():
        if count not in (0, stacks):
            raise NotModelled(
                f"{type(model).__name__} has {count} {key} norms beside {stacks} stacks of blocks"
            )
        found[f"{key}_norm"] = bool(count)
    return found


def _biases(fields: Fields) -> Fields:
    """Put the biases of all products as `linear_bias`, and those that differ from it beside it."""
    own = [fields.pop(key, None) for key in ("expert_bias", "mamba_bias", "transform_bias")]
    keys = ("mlp_bias", "qkv_bias", "attention_output_bias")
    shared = next((bias for bias in (*own, *(fields.get(key) for key in keys)) if bias is not None), False)
    wrong = next((bias for bias in own if bias not in (None, shared)), None)
    if wrong is not None:
        raise NotModelled("biases of experts, state spaces and the head's transform differ")
    return {**fields, "linear_bias": shared, **{key: None for key in keys if fields.get(key) == shared}}
