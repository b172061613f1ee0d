"""Fields of `ModelConfig` that the weights of a `transformers` model say, read from their shapes.

Every module with weights of its own gets one role by shape and place: table, norm, product of
attention or MLP, router, experts, state space. What has no role here is refused by its path and
class; blocks that differ in widths, norms or biases, and what is read wrongly, do not add up in
`problem/referee.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from darts_parallel.config.model import ATTENTION, EXPERTS, LATENT_SIZES, MAMBA, MLP
from darts_parallel.config.trainer import read_yaml
from darts_parallel.errors import Entries

_ATTENTION = re.compile(r"Att(entio)?n", re.IGNORECASE)
_QUERY_OR_KEY = re.compile(r"(^|[._])(q|k|query|key)[a-z_]*norm", re.IGNORECASE)
_GATE = re.compile(r"[._](gate|g)_proj$")
_DOWN = re.compile("down|output|^w2$")
DELTA_CHUNK = 64
"""Tokens of a chunk of a gated delta net, as transformers and flash-linear-attention have it."""
HUGGING_FACE: Entries = read_yaml(Path(__file__).with_name("huggingface.yaml"))
"""Names in Hugging Face's configurations."""


class NotModelled(Exception):  # noqa: N818
    """A part of a model that `ModelConfig` has no field for; the message names it."""


class MetaPart:
    """A module with weights of its own, and its path."""

    def __init__(self, path: str, module: nn.Module):
        self.path = path
        self.module = module
        self.weights = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
        self.bias = "bias" in self.weights
        weight = self.weights.get("weight", ())
        kind = type(module).__name__
        named = "Norm" in kind and not isinstance(module, nn.Linear)
        plain = set(self.weights) <= {"weight", "bias"}
        scale = plain and bool(weight) and (len(weight) == 1 or named)
        self.norm = prod(weight) if scale else 0
        """Size of a norm's scale; 0: no norm."""
        product = len(weight) == 2 and not named and not self.is_table
        # GPT-2 stores its products transposed
        stored = weight[::-1] if kind == "Conv1D" else weight
        self.out, self.inputs = stored if product else (0, 0)
        """Columns and rows of a matrix product; 0: no product."""

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def is_table(self) -> bool:
        """Whether it is an embedding."""
        return isinstance(self.module, nn.Embedding)

    @property
    def is_head_norm(self) -> bool:
        """Whether it is a norm of queries or keys."""
        return bool(self.norm and _QUERY_OR_KEY.search(self.path))

    def inside(self, path: str) -> bool:
        """Return whether it is the module of a path, or a part of that."""
        return f"{self.path}.".startswith(f"{path}.")

    def refuse(self, why: str = "is not modelled") -> NotModelled:
        """Return the error that names this part."""
        return NotModelled(f"{self.path} ({type(self.module).__name__}) {why}")


Parts = list[MetaPart]


def _without(parts: Sequence[MetaPart], others: Sequence[MetaPart]) -> Parts:
    return [part for part in parts if part not in others]


class MetaBlock(NamedTuple):
    """The parts that one block has."""

    path: str
    symbols: str
    """Its layers as `hybrid_override_pattern` writes them."""
    ffn: int
    """Inner size of its MLP or shared experts; 0: none."""
    norms: int
    """Norms of the hidden state."""


@dataclass(frozen=True)
class HeadShape:
    """The heads of one attention, in which blocks with and without a window may differ."""

    num_kv_heads: int
    head_dim: int
    shared_key_values: bool
    """The keys are the values, too."""


class ShapeReader:
    """Reads the fields of a `ModelConfig` from a language model of `transformers`."""

    def __init__(self, model: nn.Module, order: dict[nn.Module, int]):
        """Keep a model of `transformers`, and the numbers of its modules' first calls."""
        self.model = model
        self.order = order
        self.config: Any = model.config
        self.table = model.get_input_embeddings()  # type: ignore[operator]
        self.head = model.get_output_embeddings()  # type: ignore[operator]
        self.vocabulary, self.hidden = self.table.weight.shape
        self.fields: Entries = {}
        self.buckets = 0
        self.head_shapes: list[HeadShape] = []
        """Heads of every attention."""
        self.begin = 0
        """Number of the first block's first call."""
        self.forms: list[str] = []
        """Forms of each block's norms that no price depends on, in words."""

    def read(self) -> tuple[Entries, list[str]]:
        """Return the fields, and the paths of the blocks.

        Errors:
            NotModelled: a part has no field.
        """
        fields = self.fields
        stacks = self._stacks(2 if self.config.is_encoder_decoder else 1)
        blocks = [
            self._block(f"{path}.{i}", one) for path, stack in stacks for i, one in enumerate(stack)
        ]
        if not blocks:
            raise NotModelled(f"{type(self.model).__name__} has no list of blocks")
        inside = tuple(f"{path}." for path, _ in stacks)
        self.begin = min(self._turn(one) for _, stack in stacks for one in stack)
        every = self._parts(self.model, "")
        self._ends([p for p in every if not p.path.startswith(inside)], len(stacks))
        fields.setdefault("num_heads", gcd(self.hidden, fields.get("mamba_num_heads", 1)))
        fields.update(vocab_size=self.vocabulary, hidden_size=self.hidden)
        fields["relative_position_buckets"] = self.buckets // len(stacks)
        fields["num_encoder_layers"] = len(stacks[0][1]) if len(stacks) > 1 else 0
        self._widths(blocks)
        self._norms(blocks)
        self._structure(len(blocks))
        self._biases()
        return fields, [block.path for block in blocks]

    def _set(self, part: MetaPart, **fields: Any) -> None:
        for key, value in fields.items():
            known = self.fields.setdefault(key, value)
            if known != value:
                raise part.refuse(f"has {key}={value} beside {known}, and one model has one")

    def _parts(self, root: nn.Module, path: str) -> Parts:
        """Return the modules with trained weights below `root`, in the order of their calls."""
        found = []
        for name, module in root.named_modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                found.append(MetaPart(f"{path}.{name}".strip("."), module))
        return sorted(found, key=lambda part: self._turn(part.module))

    def _turn(self, module: nn.Module) -> int:
        """Return the number of a module's first call; of one that is not called the last."""
        return self.order.get(module, len(self.order))

    def _stacks(self, count: int) -> list[tuple[str, nn.ModuleList]]:
        """Return the `count` outermost lists of modules with the most parameters, in order."""
        outer: list[tuple[str, nn.ModuleList]] = []
        for name, module in self.model.named_modules():
            # a module comes before its parts
            within = name.startswith(tuple(f"{path}." for path, _ in outer))
            if isinstance(module, nn.ModuleList) and not within:
                outer.append((name, module))

        sizes = {name: sum(p.numel() for p in stack.parameters()) for name, stack in outer}
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:count]
        return [entry for entry in outer if entry[0] in largest]

    def _block(self, path: str, block: nn.Module) -> MetaBlock:
        """Read state space, attentions, experts and MLP of one block."""
        rest = self._parts(block, path)
        begin = rest[:1]
        symbols = ""
        mixer = _mixer(path, block, rest)
        if mixer is not None:
            inside = [p for p in rest if p.inside(mixer.path)]
            rest = _without(rest, inside)
            self._state_space(mixer, inside)
            symbols += MAMBA
        roots = _attention_roots(path, block, rest)
        normed = [p for p in rest if p.norm == self.hidden and not p.is_head_norm]
        for part in normed:
            self._set(part, norm_scale=True, norm_bias=part.bias)
            if isinstance(part.module, nn.LayerNorm) and not part.bias:
                self.forms.append("LayerNorm without bias")
        if normed and begin != normed[:1]:
            self.forms.append("norms behind attention and MLP")
        rest = _without(rest, normed)
        for root in roots:
            group = [p for p in rest if p.inside(root)]
            rest = _without(rest, group)
            self._attention(block.get_submodule(root[len(path) + 1 :]), group)
            symbols += ATTENTION
        experts, ffn = self._mlp(rest)
        if experts:
            symbols += EXPERTS
        elif ffn:
            symbols += MLP
        norms = len(normed)
        if not normed:
            norms = _unscaled_norms(block)
            self._set(MetaPart(path, block), norm_scale=False, norm_bias=False)
        return MetaBlock(path, symbols, ffn, norms)

    def _attention(self, root: nn.Module, parts: Parts) -> None:
        """Read one attention: the product called last is its output, the others its inputs."""
        *ins, out = [p for p in parts if p.out and "indexer" not in p.path]
        self._set(out, attention_output_bias=out.bias)
        self._extras(parts)
        if any("kv_a_" in p.path for p in ins):
            self._latent(parts, out)
            return
        gates = [p for p in ins if _GATE.search(p.path)]
        width = sum(p.out for p in gates)
        for part in ins:  # queries and their gate may be one product (Qwen3-Next)
            if part.name == "q_proj" and part.out == 2 * out.inputs and not gates:
                part.out = width = out.inputs
        numbers = self._heads(root, _without(ins, gates), out, gates)
        self._set(out, attention_gate_size=width or None)
        scales = [p for p in parts if p.is_head_norm]
        if scales:
            every = sum(p.norm for p in scales) == numbers
            several = out.inputs != self.head_shapes[-1].head_dim
            self._set(scales[0], qk_norm=True, qk_norm_whole=every and several)

    def _extras(self, parts: Parts) -> None:
        """Read relative positions and sinks; refuse what is no product and no norm of heads."""
        for part in parts:
            if "relative" in part.path and part.is_table:
                self.buckets += part.weights["weight"][0]
            elif set(part.weights) == {"sinks"}:
                self._set(part, attention_sinks=True)
            elif not part.out and not part.is_head_norm:
                raise part.refuse()

    def _heads(self, root: nn.Module, ins: Parts, out: MetaPart, gates: Parts) -> int:
        """Read the heads of queries, keys and values, which are one, two or three products.

        Returns:
            Numbers of the queries and keys of a token.
        """
        size = self._head_size(root, out)
        queries = out.inputs
        total = sum(part.out for part in ins)
        value = getattr(root, "v_head_dim", None)
        if len(ins) == 3 and isinstance(value, int) and value != size:
            return self._narrow(ins, out, size, value)
        shared = len(ins) == 2 and getattr(self.config, "attention_k_eq_v", False)
        if shared:
            total += total - queries
        keys = (total - queries) // 2
        given = getattr(self.config, "num_key_value_heads", None)
        odd = len(ins) < 3 and given and not shared and keys not in (queries, given * size)
        forms = ([total], sorted([queries, 2 * keys]), sorted([queries, keys, keys]))
        split = sorted([p.out for p in ins] + [keys] * shared)
        if odd or keys <= 0 or keys % size or split not in forms:
            shapes = ", ".join(f"{p.name} {p.out}x{p.inputs}" for p in [*ins, *gates, out])
            why = f"stands in an attention of products {shapes}, no queries, keys and values"
            raise ins[-1].refuse(why)
        self._set(out, num_heads=queries // size)
        self._set(ins[0], qkv_bias=ins[0].bias)
        self.head_shapes.append(HeadShape(keys // size, size, shared))
        return queries + keys

    def _narrow(self, ins: Parts, out: MetaPart, size: int, value: int) -> int:
        """Read an attention whose values have other sizes of heads than its queries and keys.

        The key-value heads of windowed blocks may be others than those of the rest.

        Returns:
            Numbers of the queries and keys of a token.
        """
        heads = out.inputs // value
        queries, *rest = (part.out for part in ins)
        kv_heads = sum(rest) // (size + value)
        if queries != heads * size or rest != [kv_heads * size, kv_heads * value]:
            raise ins[-1].refuse("is no value of an attention of queries and keys")
        self._set(out, num_heads=heads, v_head_dim=value)
        self._set(ins[0], qkv_bias=ins[0].bias)
        self.head_shapes.append(HeadShape(kv_heads, size, False))
        return queries + kv_heads * size

    def _head_size(self, root: nn.Module, out: MetaPart) -> int:
        """Return the size of a head that an attention or a part of it names, or an even share."""
        for module in root.modules():
            for key in HUGGING_FACE["head_sizes"]:
                size = getattr(module, key, None)
                if isinstance(size, int):
                    return size
        heads = self.config.num_attention_heads
        return out.inputs // heads

    def _latent(self, parts: Parts, out: MetaPart) -> None:
        """Read multi-head latent attention, and the indexer that picks the keys it attends to."""
        keys = ("q_lora_rank", *LATENT_SIZES)
        sizes: Entries = {key: getattr(self.config, key, None) for key in keys}
        heads = out.inputs // sizes["v_head_dim"]
        self._set(out, multi_latent_attention=True, num_heads=heads, qkv_bias=False, **sizes)
        indexer = {p.name: p for p in parts if "indexer" in p.path and p.out}
        if indexer:
            self._set(out, indexer_num_heads=indexer["weights_proj"].out)
            self._set(out, indexer_head_dim=indexer["wk"].out)

    def _state_space(self, mixer: MetaPart, parts: Parts) -> None:
        """Read Mamba-1 or Mamba-2, a gated delta net or a short convolution."""
        by_name = {p.name: p for p in parts if p.path != mixer.path}
        if hasattr(mixer.module, "num_v_heads") or "f_a_proj" in by_name:
            self._delta_net(mixer, by_name)
            return
        if set(by_name) == {"conv", "in_proj", "out_proj"}:
            kernel = by_name["conv"].weights["weight"][-1]
            self._set(mixer, mamba_short_conv=True, mamba_conv_kernel=kernel, mamba_head_dim=1)
            self._set(mixer, mamba_num_heads=by_name["out_proj"].inputs)
            self._set(mixer, mamba_bias=by_name["in_proj"].bias)
            return
        if not {"in_proj", "out_proj", "conv1d"} <= set(by_name):
            raise mixer.refuse("is no state space of Mamba-1 or Mamba-2")
        inner = by_name["out_proj"].inputs
        convolved = by_name["conv1d"].weights["weight"]
        heads, *state = mixer.weights["A_log"]
        if state:
            self._set(mixer, mamba_dt_rank=by_name["dt_proj"].inputs, mamba_num_heads=inner)
        else:
            module: Any = mixer.module
            groups = module.n_groups
            state = [(convolved[0] - inner) // (2 * groups)]
            self._set(mixer, mamba_num_heads=heads, mamba_num_groups=groups)
            self._set(mixer, mamba_chunk_size=module.chunk_size)
        self._set(mixer, mamba_inner_norms=any("norm" in name for name in by_name))
        self._set(mixer, mamba_head_dim=inner // heads, mamba_state_dim=state[0])
        self._set(mixer, mamba_conv_kernel=convolved[-1], mamba_bias=by_name["in_proj"].bias)

    def _delta_net(self, mixer: MetaPart, parts: dict[str, MetaPart]) -> None:
        """Read a gated delta net, whose joint product is one or several; the sum is refereed."""
        module: Any = mixer.module
        kernel = parts["conv1d"].weights["weight"][-1]
        self._set(mixer, mamba_delta_rule=True, mamba_chunk_size=DELTA_CHUNK)
        if "f_a_proj" in parts:  # Kimi's decay is a product of low rank, and all heads are alike
            self._set(mixer, mamba_gate_rank=parts["f_a_proj"].out)
            groups = heads = module.num_heads
            state = size = module.head_dim
        else:
            heads = module.num_v_heads
            size = module.head_v_dim
            groups = module.num_k_heads
            state = module.head_k_dim
        self._set(mixer, mamba_num_heads=heads, mamba_head_dim=size)
        self._set(mixer, mamba_num_groups=groups, mamba_state_dim=state)
        out = parts.get("out_proj") or parts["o_proj"]
        self._set(mixer, mamba_conv_kernel=kernel, mamba_bias=out.bias)

    def _mlp(self, parts: Parts) -> tuple[bool, int]:
        """Read experts and router, then the MLP or shared experts; return whether, and its size."""
        fused = [p for p in parts if any(len(shape) == 3 for shape in p.weights.values())]
        parts = _without(parts, fused)
        for part in fused:
            self._experts(part)
            parts = _without(parts, self._router(part, parts))
        return bool(fused), self._dense(parts)

    def _dense(self, parts: Parts) -> int:
        """Read the products of an MLP; return its size, 0 where there is none."""
        for part in parts:
            if set(part.weights) == {"alpha_p", "alpha_n"}:
                self._set(part, activation_parameters=len(part.weights))
            elif not part.out:
                raise part.refuse()
        products = [p for p in parts if p.out]
        if not products:
            return 0
        *ins, down = products
        widths = [p.out for p in ins]
        if sum(widths) not in (down.inputs, 2 * down.inputs) or down.out != self.hidden:
            shown = [*widths, down.out]
            raise ins[0].refuse(f"stands in an MLP of widths {shown}, which is not modelled")
        self._set(down, gated_mlp=sum(widths) > down.inputs, mlp_bias=down.bias)
        return down.inputs

    def _router(self, experts: MetaPart, parts: Parts) -> Parts:
        """Read the product that chooses experts, and the gate of shared ones; return all it has."""
        shape = (self.fields["num_experts"], self.hidden)
        # a shared expert may be as wide, and lies deeper (Qwen3-Next)
        alike = [p for p in parts if (p.out, p.inputs) == shape]
        router = min(alike, key=lambda part: part.path.count("."), default=None)
        if router is None:
            raise experts.refuse("has no router")
        gates = [p for p in parts if p.out == 1 and not p.bias and p is not router]
        self._set(router, moe_router_bias=router.bias, moe_shared_expert_gate=bool(gates))
        scales = [p for p in parts if router.inside(p.path)]  # Gemma 4: small, and not priced
        return [router, *gates, *scales]

    def _experts(self, part: MetaPart) -> None:
        """Read the fused products of all experts."""
        shapes = {name: shape for name, shape in part.weights.items() if len(shape) == 3}
        last = [shape for name, shape in shapes.items() if _DOWN.search(name)]
        if not last or self.hidden not in last[0]:
            raise part.refuse("are experts of an unknown form")
        count, *down = last[0]
        width = prod(down) // self.hidden
        numbers = sum(prod(shape[1:]) for shape in shapes.values())
        self._set(part, num_experts=count, moe_ffn_hidden_size=width)
        self._set(part, gated_mlp=numbers == 3 * width * self.hidden)
        self._set(part, expert_bias=len(part.weights) > len(shapes))

    def _ends(self, parts: Parts, stacks: int) -> None:
        """Read tables, norms and head outside of the blocks."""
        tied = self.head is None or self.head.weight is self.table.weight
        fields = {"tie_embeddings": tied, "learned_positions": False, "output_bias": False}
        # without scales no shape says how many final norms there are
        unscaled = not self.fields.get("norm_scale", True)
        counts = {"final_norm": stacks if unscaled else 0, "embedding_norm": 0}
        for part in parts:
            if self._is_vocabulary(part):
                fields["output_bias"] |= part.module is self.head and part.bias
            elif part.weights == {"bias": (self.vocabulary,)}:
                fields["output_bias"] = True
            elif part.is_table:
                fields.update(self._table(part))
            elif part.norm == self.hidden:
                self._set(part, norm_bias=part.bias)
                early = "emb" in part.path.lower() and self._turn(part.module) <= self.begin
                place = "embedding_norm" if early else "final_norm"  # LFM2's name misleads
                # a norm after the head's transform belongs to that
                counts[place] += "head_transform" not in fields
            elif part.out != 1:  # ESM's contacts are one small number each
                fields.update(self._transform(part, fields))
        self.fields.update(fields, **{key: count > 0 for key, count in counts.items()})

    def _is_vocabulary(self, part: MetaPart) -> bool:
        """Return whether a part is the table of tokens or the head."""
        if part.module in (self.table, self.head):
            return True
        return getattr(part.module, "weight", None) is self.table.weight

    def _transform(self, part: MetaPart, fields: Entries) -> Entries:
        """Read the dense layer before BERT's head, of which there is one."""
        dense = {part.out, part.inputs} == {self.hidden} and "pool" not in part.path.lower()
        if not dense or "head_transform" in fields:
            raise part.refuse()
        return {"head_transform": True, "transform_bias": part.bias}

    def _table(self, part: MetaPart) -> Entries:
        """Read a table of positions or of token types."""
        name = part.path.lower()
        rows, width = part.weights["weight"]
        if width == self.hidden and ("pos" in name or "wpe" in name):
            pad: Any = part.module.padding_idx
            offset: Any = getattr(part.module, "offset", 0 if pad is None else pad + 1)
            longest = rows - offset
            return {"learned_positions": True, "max_seq_len": longest, "position_offset": offset}
        if width == self.hidden and "type" in name:
            return {"token_types": rows}
        raise part.refuse()

    def _widths(self, blocks: list[MetaBlock]) -> None:
        """Say which block has what: experts, state spaces, widths of MLPs."""
        fields = self.fields
        hybrid = any(MAMBA in b.symbols or len(b.symbols) < 2 for b in blocks)
        routed = [EXPERTS in block.symbols for block in blocks]
        fields["num_layers"] = len(blocks)
        if hybrid:
            pattern = "".join(block.symbols for block in blocks)
            fields.update(num_layers=len(pattern), hybrid_override_pattern=pattern)
        elif any(routed) and not all(routed):
            fields["moe_layer_freq"] = [int(has) for has in routed]
        widths = {True: 0, False: 0}
        for block, has in zip(blocks, routed, strict=True):
            widths[has] = max(widths[has], block.ffn)
        fields["ffn_hidden_size"] = widths[False] or None
        fields["moe_shared_expert_intermediate_size"] = widths[True] or None

    def _norms(self, blocks: list[MetaBlock]) -> None:
        """Say how many norms a block has."""
        counts = [block.norms for block in blocks]
        if self.fields["embedding_norm"] and len(blocks) > 1 and counts[0] == counts[1] - 1:
            # ModernBERT's stands for one of the first block
            self.fields["embedding_norm"] = False
            counts[0] = counts[1]
        parts = [len(block.symbols) for block in blocks]
        shared = [block.symbols.count(MAMBA + ATTENTION) for block in blocks]
        if any(shared) and counts == [own - one for own, one in zip(parts, shared, strict=True)]:
            self.fields["mamba_shares_norm"] = True
        elif counts != parts:
            self.fields["block_norms"] = counts[0] or None

    def _structure(self, blocks: int) -> None:
        """Name the form of the blocks that no price depends on."""
        usual_forms = HUGGING_FACE["forms"].items()
        forms = [k for k, usual in usual_forms if getattr(self.config, k, usual) != usual]
        # in ModernBERT one norm of the first block stands elsewhere
        forms += [own for own in sorted({*self.forms}) if self.forms.count(own) >= blocks]
        self.fields["structure"] = " and ".join(forms) or None

    def _biases(self) -> None:
        """Set `linear_bias` for all products; products that differ keep a field of their own."""
        fields = self.fields
        keys = ("mlp_bias", "qkv_bias", "attention_output_bias")
        hidden = ("expert_bias", "mamba_bias", "transform_bias")
        biases = [fields.pop(key, None) for key in hidden]
        biases += [fields.get(key) for key in keys]
        shared = next((bias for bias in biases if bias is not None), False)
        fields["linear_bias"] = shared
        for key in keys:
            if fields.get(key) == shared:
                fields[key] = None


def _mixer(path: str, block: nn.Module, parts: Sequence[MetaPart]) -> MetaPart | None:
    """Return the module of a block that mixes tokens by a state or a convolution; None without any."""
    for part in parts:
        convolution = part.name in ("conv", "conv1d") and len(part.weights["weight"]) > 2
        if "A_log" in part.weights or convolution:
            root = part.path
            while not any(p.inside(root) and p.name in ("out_proj", "o_proj") for p in parts):
                if root == path:
                    raise part.refuse()
                root = root.rpartition(".")[0]
            return MetaPart(root, block.get_submodule(root[len(path) + 1 :]))
    return None


def _attention_roots(path: str, block: nn.Module, parts: Sequence[MetaPart]) -> list[str]:
    """Return the paths of the outermost attentions of a block that hold weights."""
    roots: list[str] = []
    for name, module in block.named_modules():
        own = f"{path}.{name}"
        inner = own.startswith(tuple(f"{root}." for root in roots))
        if not name or inner or not _ATTENTION.search(type(module).__name__):
            continue
        if any(part.inside(own) for part in parts):
            roots.append(own)
    return roots


def _unscaled_norms(block: nn.Module) -> int:
    """Count the norms of the hidden state in a block whose norms have no weights."""
    named = [name for name, module in block.named_modules() if "Norm" in type(module).__name__]
    return sum(not _QUERY_OR_KEY.search(name) for name in named)
