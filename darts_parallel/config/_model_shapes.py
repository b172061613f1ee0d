"""Fields of `ModelConfig` that the weights of a `transformers` model say, read from their shapes.

Every module with weights of its own gets one role by shape and place: table, norm, product of attention or
MLP, router, experts, state space. What has no role here is refused by its path and class; blocks that differ
in widths, norms or biases, and what is read wrongly, do not add up in `problem/referee.py`.
"""

import re
from math import gcd, prod
from typing import Any, NamedTuple

from torch import nn

from darts_parallel.config.layer_pattern import ATTENTION, EXPERTS, MAMBA, MLP

Fields = dict[str, Any]
_ATTENTION = re.compile(r"Att(entio)?n", re.IGNORECASE)
_QUERY_OR_KEY = re.compile(r"(^|[._])(q|k|query|key)[a-z_]*norm", re.IGNORECASE)
_GATE = re.compile(r"[._](gate|g)_proj$")
_HEAD_SIZES = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class NotModelled(Exception):  # noqa: N818
    """A part of a model that `ModelConfig` has no field for; the message names it."""


class MetaPart:
    """A module with weights of its own, and its path."""

    def __init__(self, path: str, module: nn.Module):
        self.path, self.module = path, module
        self.weights = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
        weight, kind = self.weights.get("weight", ()), type(module).__name__
        self.bias = "bias" in self.weights
        named = "Norm" in kind and not isinstance(module, nn.Linear)
        plain = set(self.weights) <= {"weight", "bias"} and (len(weight) == 1 or named)
        self.norm = prod(weight) if weight and plain else 0
        product = len(weight) == 2 and not named and not isinstance(module, nn.Embedding)
        # GPT-2 stores its products transposed
        self.out, self.inputs = (
            (weight[::-1] if kind == "Conv1D" else weight) if product else (0, 0)
        )

    def refuse(self, why: str = "is not modelled") -> NotModelled:
        """Return the error that names this part."""
        return NotModelled(f"{self.path} ({type(self.module).__name__}) {why}")


class MetaBlock(NamedTuple):
    """The parts that one block has."""

    path: str
    symbols: str
    """Its layers as `hybrid_override_pattern` writes them."""
    ffn: int
    """Inner size of its MLP or shared experts; 0: none."""
    norms: int
    """Norms of the hidden state."""


class ShapeReader:
    """Reads the fields of a `ModelConfig` from a causal, masked or sequence-to-sequence language model."""

    def __init__(self, model: nn.Module, order: dict[nn.Module, int]):
        """Keep a model of `transformers`, and the numbers of its modules' first calls."""
        self.model, self.order = model, order
        self.config: Any = model.config
        self.table = model.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary, self.hidden = self.table.weight.shape
        self.fields: Fields = {}
        self.buckets = 0

    def read(self) -> tuple[Fields, list[str]]:
        """Return the fields, and the paths of the blocks.

        Errors:
            NotModelled: a part has no field.
        """
        stacks = self._stacks(2 if self.config.is_encoder_decoder else 1)
        blocks = [
            self._block(f"{path}.{i}", one) for path, stack in stacks for i, one in enumerate(stack)
        ]
        if not blocks:
            raise NotModelled(f"{type(self.model).__name__} has no list of blocks")
        inside = tuple(f"{path}." for path, _ in stacks)
        self._ends(
            [p for p in self._parts(self.model, "") if not p.path.startswith(inside)], len(stacks)
        )
        self.fields.setdefault("num_heads", gcd(self.hidden, self.fields.get("mamba_num_heads", 1)))
        self.fields.update(vocab_size=self.vocabulary, hidden_size=self.hidden)
        self.fields["relative_position_buckets"] = self.buckets // len(stacks)
        self.fields["num_encoder_layers"] = len(stacks[0][1]) if len(stacks) > 1 else 0
        self._widths(blocks)
        self._norms(blocks)
        self._biases()
        return self.fields, [block.path for block in blocks]

    def _set(self, part: MetaPart, **fields: Any) -> None:
        for key, value in fields.items():
            if self.fields.setdefault(key, value) != value:
                raise part.refuse(
                    f"has {key}={value} beside {self.fields[key]}, and one model has one"
                )

    def _parts(self, root: nn.Module, path: str) -> list[MetaPart]:
        """Return the modules with trained weights below `root`, in the order of their calls."""
        found = [
            MetaPart(f"{path}.{name}".strip("."), module)
            for name, module in root.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]
        return sorted(found, key=lambda part: self.order.get(part.module, len(self.order)))

    def _stacks(self, count: int) -> list[tuple[str, nn.ModuleList]]:
        """Return the `count` outermost lists of modules with the most parameters, as the model holds them."""
        lists = [
            (name, m) for name, m in self.model.named_modules() if isinstance(m, nn.ModuleList)
        ]
        outer = [
            (p, m) for p, m in lists if not any(p.startswith(f"{other}.") for other, _ in lists)
        ]
        largest = sorted(outer, key=lambda one: -sum(p.numel() for p in one[1].parameters()))[
            :count
        ]
        return [one for one in outer if one in largest]

    def _block(self, path: str, block: nn.Module) -> MetaBlock:
        rest = self._parts(block, path)
        mixer = next((p for p in rest if "A_log" in p.weights), None)
        if mixer is not None:
            inside = [p for p in rest if f"{p.path}.".startswith(f"{mixer.path}.")]
            rest = [p for p in rest if p not in inside]
            self._state_space(mixer, inside)
        roots: list[str] = []
        for name, module in block.named_modules():
            has = [p for p in rest if f"{p.path}.".startswith(f"{path}.{name}.")]
            inner = f"{path}.{name}.".startswith(tuple(f"{root}." for root in roots))
            if name and has and not inner and _ATTENTION.search(type(module).__name__):
                roots.append(f"{path}.{name}")
        scales = {p.path for p in rest if p.norm and _QUERY_OR_KEY.search(p.path)}
        normed = [p for p in rest if p.norm == self.hidden and p.path not in scales]
        for part in normed:
            self._set(part, norm_scale=True, norm_bias=part.bias)
        for root in roots:
            group = [p for p in rest if f"{p.path}.".startswith(f"{root}.")]
            rest = [p for p in rest if p not in group]
            self._attention(
                block.get_submodule(root[len(path) + 1 :]), [p for p in group if p not in normed]
            )
        experts, ffn = self._mlp([p for p in rest if p not in normed])
        norms = len(normed)
        if not normed:
            named = [
                name for name, module in block.named_modules() if "Norm" in type(module).__name__
            ]
            norms = sum(not _QUERY_OR_KEY.search(name) for name in named)
            self._set(MetaPart(path, block), norm_scale=False, norm_bias=False)
        symbols = MAMBA * (mixer is not None) + ATTENTION * len(roots)
        return MetaBlock(path, symbols + (EXPERTS if experts else MLP * bool(ffn)), ffn, norms)

    def _attention(self, root: nn.Module, parts: list[MetaPart]) -> None:
        """Read one attention: the product called last is its output, the others are what goes in."""
        scales = [p for p in parts if p.norm and _QUERY_OR_KEY.search(p.path)]
        *ins, out = [p for p in parts if p.out and "indexer" not in p.path]
        self._set(out, attention_output_bias=out.bias)
        for part in parts:
            if "relative" in part.path and isinstance(part.module, nn.Embedding):
                self.buckets += part.weights["weight"][0]
            elif set(part.weights) == {"sinks"}:
                self._set(part, attention_sinks=True)
            elif not part.out and part not in scales:
                raise part.refuse()
        if any("kv_a_" in p.path for p in ins):
            self._latent(parts, out)
            return
        gates = [p for p in ins if _GATE.search(p.path)]
        ins = [p for p in ins if p not in gates]
        sizes = (getattr(m, key, None) for m in root.modules() for key in _HEAD_SIZES)
        size = next(
            (s for s in sizes if isinstance(s, int)), out.inputs // self.config.num_attention_heads
        )
        queries, total = out.inputs, sum(part.out for part in ins)
        keys = (total - queries) // 2
        given = getattr(self.config, "num_key_value_heads", None)
        odd = len(ins) < 3 and given and keys not in (queries, given * size)
        split = sorted(p.out for p in ins)
        forms = ([total], sorted([queries, 2 * keys]), sorted([queries, keys, keys]))
        if odd or keys <= 0 or keys % size or split not in forms:
            shapes = ", ".join(
                f"{p.path.rpartition('.')[2]} {p.out}x{p.inputs}" for p in [*ins, *gates, out]
            )
            raise ins[-1].refuse(
                f"stands in an attention of products {shapes}, no queries, keys and values"
            )
        gate = sum(p.out for p in gates) or None
        self._set(out, num_heads=queries // size, num_kv_heads=keys // size, head_dim=size)
        self._set(out, attention_gate_size=gate)
        self._set(ins[0], qkv_bias=ins[0].bias)
        if scales:
            whole = sum(p.norm for p in scales) == queries + keys and queries != size
            self._set(scales[0], qk_norm=True, qk_norm_whole=whole)

    def _latent(self, parts: list[MetaPart], out: MetaPart) -> None:
        """Read multi-head latent attention, and the indexer that picks the keys it attends to."""
        sizes: Fields = {key: getattr(self.config, key, None) for key in _LATENT}
        self._set(
            out, multi_latent_attention=True, num_heads=out.inputs // sizes["v_head_dim"], **sizes
        )
        self._set(out, qkv_bias=False)
        indexer = {p.path.rpartition(".")[2]: p for p in parts if "indexer" in p.path and p.out}
        if indexer:
            heads, width = indexer["weights_proj"].out, indexer["wk"].out
            self._set(out, indexer_num_heads=heads, indexer_head_dim=width)

    def _state_space(self, mixer: MetaPart, parts: list[MetaPart]) -> None:
        """Read Mamba-1 or Mamba-2."""
        by_name = {p.path.rpartition(".")[2]: p for p in parts if p is not mixer}
        if not {"in_proj", "out_proj", "conv1d"} <= set(by_name):
            raise mixer.refuse("is no state space of Mamba-1 or Mamba-2")
        inner, convolved = by_name["out_proj"].inputs, by_name["conv1d"].weights["weight"]
        heads, *state = mixer.weights["A_log"]
        if state:
            self._set(mixer, mamba_inner_norms=any("norm" in name for name in by_name))
            self._set(mixer, mamba_dt_rank=by_name["dt_proj"].inputs, mamba_num_heads=inner)
        else:
            module: Any = mixer.module
            groups, chunk = module.n_groups, module.chunk_size
            state = [(convolved[0] - inner) // (2 * groups)]
            self._set(mixer, mamba_num_heads=heads, mamba_num_groups=groups, mamba_chunk_size=chunk)
        self._set(mixer, mamba_head_dim=inner // heads, mamba_state_dim=state[0])
        self._set(mixer, mamba_conv_kernel=convolved[-1], mamba_bias=by_name["in_proj"].bias)

    def _mlp(self, parts: list[MetaPart]) -> tuple[bool, int]:
        """Read experts with their router, then the MLP (or shared experts) that is left; return its size."""
        fused = [p for p in parts if any(len(shape) == 3 for shape in p.weights.values())]
        parts = [p for p in parts if p not in fused]
        for part in fused:
            self._experts(part)
            sizes = (self.fields["num_experts"], self.hidden)
            router = next((p for p in parts if (p.out, p.inputs) == sizes), None)
            if router is None:
                raise part.refuse("has no router")
            gates = [p for p in parts if p.out == 1 and not p.bias and p is not router]
            self._set(router, moe_router_bias=router.bias, moe_shared_expert_gate=bool(gates))
            parts = [p for p in parts if p not in (router, *gates)]
        for part in parts:
            if set(part.weights) == {"alpha_p", "alpha_n"}:
                self._set(part, activation_parameters=len(part.weights))
            elif not part.out:
                raise part.refuse()
        products = [p for p in parts if p.out]
        if not products:
            return bool(fused), 0
        *ins, down = products
        widths = [p.out for p in ins]
        if sum(widths) not in (down.inputs, 2 * down.inputs) or down.out != self.hidden:
            raise ins[0].refuse(
                f"stands in an MLP of widths {[*widths, down.out]}, which is not modelled"
            )
        self._set(down, gated_mlp=sum(widths) > down.inputs, mlp_bias=down.bias)
        return bool(fused), down.inputs

    def _experts(self, part: MetaPart) -> None:
        shapes = {name: shape for name, shape in part.weights.items() if len(shape) == 3}
        last = (shape for name, shape in shapes.items() if re.search("down|output|^w2$", name))
        down: tuple[int, ...] = next(last, ())
        if self.hidden not in down:
            raise part.refuse("are experts of an unknown form")
        width = prod(down[1:]) // self.hidden
        gated = sum(prod(shape[1:]) for shape in shapes.values()) == 3 * width * self.hidden
        self._set(part, num_experts=down[0], moe_ffn_hidden_size=width, gated_mlp=gated)
        self._set(part, expert_bias=len(part.weights) > len(shapes))

    def _ends(self, parts: list[MetaPart], stacks: int) -> None:
        """Read tables, norms and head outside of the blocks."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        tied = head is None or head.weight is self.table.weight
        fields: Fields = {"tie_embeddings": tied, "learned_positions": False, "output_bias": False}
        counts = {"final": 0, "embedding": 0}
        if not self.fields.get("norm_scale", True):
            counts["final"] = stacks  # whose number no shape says
        for part in parts:
            name, embedding = part.path.lower(), isinstance(part.module, nn.Embedding)
            rows, width = (*part.weights.get("weight", (0,)), 0)[:2]
            if (
                part.module in (self.table, head)
                or getattr(part.module, "weight", None) is self.table.weight
            ):
                fields["output_bias"] = fields["output_bias"] or (part.module is head and part.bias)
            elif embedding and width == self.hidden and ("pos" in name or "wpe" in name):
                pad: Any = part.module.padding_idx
                offset: Any = getattr(part.module, "offset", 0 if pad is None else pad + 1)
                fields.update(
                    learned_positions=True, max_seq_len=rows - offset, position_offset=offset
                )
            elif embedding and width == self.hidden and "type" in name:
                fields["token_types"] = rows
            elif part.weights == {"bias": (self.vocabulary,)}:
                fields["output_bias"] = True
            elif part.norm == self.hidden:
                self._set(part, norm_bias=part.bias)
                if "head_transform" not in fields:
                    counts["embedding" if "emb" in name else "final"] += 1
            elif (
                {part.out, part.inputs} != {self.hidden}
                or "head_transform" in fields
                or "pool" in name
            ):
                raise part.refuse()
            else:
                fields.update(head_transform=True, transform_bias=part.bias)
        self.fields.update(fields, **{f"{key}_norm": count > 0 for key, count in counts.items()})

    def _widths(self, blocks: list[MetaBlock]) -> None:
        """Say which block has what: experts, state spaces, widths of MLPs."""
        self.hybrid = any(MAMBA in b.symbols or len(b.symbols) < 2 for b in blocks)
        pattern = "".join(block.symbols for block in blocks)
        self.fields["num_layers"] = len(pattern if self.hybrid else blocks)
        if self.hybrid:
            self.fields["hybrid_override_pattern"] = pattern
        routed = [EXPERTS in block.symbols for block in blocks]
        dense = max((block.ffn for block in blocks if EXPERTS not in block.symbols), default=0)
        shared = max((block.ffn for block in blocks if EXPERTS in block.symbols), default=0)
        self.fields.update(
            ffn_hidden_size=dense or None, moe_shared_expert_intermediate_size=shared or None
        )
        if any(routed) and not all(routed) and not self.hybrid:
            self.fields["moe_layer_freq"] = [int(has) for has in routed]

    def _norms(self, blocks: list[MetaBlock]) -> None:
        """Say how many norms a block has."""
        counts = [block.norms for block in blocks]
        if self.fields["embedding_norm"] and len(blocks) > 1 and counts[0] == counts[1] - 1:
            # ModernBERT's stands for one of the first block
            self.fields["embedding_norm"], counts[0] = False, counts[1]
        if counts != [len(block.symbols) for block in blocks]:
            self.fields["block_norms"] = counts[0] or None

    def _biases(self) -> None:
        """Put the biases of all products as `linear_bias`, and those that differ from it beside it."""
        keys = ("mlp_bias", "qkv_bias", "attention_output_bias")
        own = [
            self.fields.pop(key, None) for key in ("expert_bias", "mamba_bias", "transform_bias")
        ]
        known = [
            bias for bias in (*own, *(self.fields.get(key) for key in keys)) if bias is not None
        ]
        shared = known[0] if known else False
        same = {key: None for key in keys if self.fields.get(key) == shared}
        self.fields.update(linear_bias=shared, **same)
