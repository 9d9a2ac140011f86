"""A model's config, the capacity of packs and how they are trained -> the bytes of one step on one device.

Between forward and backward pass a device holds what autograd saved of every layer. This module adds up
these tensors from the sizes in the config, for the layers of transformers with attention "thd" and for the
losses of this package, and looks at the moments of a step at which memory can be highest. It runs nothing.

A backward pass frees what a layer saved part by part, and needs most at one of three places: in the middle of
the MLP, in the norm before it, whose gradient is written in fp32 operation by operation, or in attention.

Legend: T slots of a pack on this device, H hidden size, Q = heads x head size, K = key heads x head size,
I intermediate size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from lightning_thd._checks import choice, flags, whole_number
from lightning_thd.flops.families.layers import active_experts, expert_layers, shared_size
from lightning_thd.flops.families.registry import read_config
from lightning_thd.flops.families.sizes import Sizes, completed

Precision: TypeAlias = Literal["32-true", "bf16-true", "bf16-mixed"]
Optimizer: TypeAlias = Literal["adamw", "adam", "sgd-momentum", "sgd"]
Device: TypeAlias = Literal["cuda", "cpu"]

GIB = 2**30
CARDS_GB = (24, 48, 80, 141)  # the sizes of common cards, in 10^9 bytes: 4090, L40S, H100, H200
# The share of a card that a step may fill: the rest is the driver's context, workspaces of matrix products
# (32 MiB a stream) and gaps between blocks of torch's allocator.
USABLE = 0.92

_FP32 = 4
_INDEX = 8  # bytes of an index
_STATES: dict[str, int] = {"adamw": 2, "adam": 2, "sgd-momentum": 1, "sgd": 0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Bytes on one device by what they are for."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0  # states, and what an update needs for a moment
    inputs: int = 0  # the residual stream: what enters each layer
    attention: int = 0  # inputs of projections, queries, keys, values, outputs
    mlp: int = 0  # dense MLPs and experts
    norms: int = 0
    loss: int = 0  # the head's tiles and its gradients
    buffers: int = 0  # a batch, tables of positions, and what a backward pass needs for a moment

    @property
    def total(self) -> int:
        """Return the sum of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))

    def __add__(self, other: Parts) -> Parts:
        sums: dict[str, int] = {
            part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)
        }
        return Parts(**sums)

    def times(self, factor: float) -> Parts:
        """Return all parts multiplied by a factor."""
        scaled: dict[str, int] = {
            part.name: round(getattr(self, part.name) * factor) for part in fields(self)
        }
        return Parts(**scaled)

    @property
    def largest(self) -> str:
        """Return the name of the largest part."""
        return max((part.name for part in fields(self)), key=lambda name: getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a model is trained, as far as it matters for memory.

    Attributes:
        precision: Lightning's name. "32-true" and "bf16-true" hold everything in one dtype; "bf16-mixed"
            holds weights and states in fp32. Under FSDP2 it gathers bf16 weights.
        optimizer: "adamw" and "adam" keep two values a weight, "sgd-momentum" one, "sgd" none.
        checkpointing: activation checkpointing of every layer.
        mlp_tile: tokens of a tile of ``prepare(mlp_tile=...)``; None for none.
        offload: checkpointed layer inputs wait in CPU memory, see ``prepare(offload=True)``.
        lora_rank: rank of LoRA adapters; the model's own weights are frozen. None trains all weights.
        lora_targets: which projections have adapters: "all" in attention and MLPs, or "attention".
        data: data-parallel ranks, context-parallel ranks not included.
        sharded: FSDP2 shards weights, gradients and states over data and context ranks.
        context: context-parallel ranks, which share a pack.
        tensor: tensor-parallel ranks.
        pipeline: stages; the first one holds the activations of as many microbatches.
        accumulates: whether gradients of earlier microbatches are there when a step begins.
        device: "cuda" or "cpu": the tiles of the loss and an update differ.
    """

    precision: Precision = "bf16-true"
    optimizer: Optimizer = "adamw"
    checkpointing: bool = False
    mlp_tile: int | None = None
    offload: bool = False
    lora_rank: int | None = None
    lora_targets: Literal["all", "attention"] = "all"
    data: int = 1
    sharded: bool = False
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    accumulates: bool = False
    device: Device = "cuda"

    def __post_init__(self) -> None:
        choice(self.precision, "precision", *get_args(Precision))
        choice(self.optimizer, "optimizer", *get_args(Optimizer))
        choice(self.lora_targets, "lora_targets", "all", "attention")
        choice(self.device, "device", *get_args(Device))
        flags(
            checkpointing=self.checkpointing,
            offload=self.offload,
            sharded=self.sharded,
            accumulates=self.accumulates,
        )

        for name in ("data", "context", "tensor", "pipeline"):
            whole_number(getattr(self, name), name, least=1)
        for name in ("mlp_tile", "lora_rank"):
            if getattr(self, name) is not None:
                whole_number(getattr(self, name), name, least=1)

        if self.offload and not self.checkpointing:
            raise ValueError(
                "offload=True moves the inputs of checkpointed layers, but checkpointing=False. Set both."
            )

    @property
    def shards(self) -> int:
        """Return over how many ranks FSDP2 cuts a weight."""
        return self.data * self.context if self.sharded else 1

    @property
    def devices(self) -> int:
        """Return the number of devices of the job."""
        return self.data * self.context * self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dtypes:
    """Bytes of one value of each kind."""

    weight: int  # parameters and their gradients
    gathered: int  # parameters as products read them
    stream: int  # the residual stream
    product: int  # inputs and outputs of products
    copies: bool  # whether every product casts its input, as under autocast


def _dtypes(training: Training) -> _Dtypes:
    if training.precision == "32-true":
        return _Dtypes(weight=4, gathered=4, stream=4, product=4, copies=False)
    if training.precision == "bf16-true":
        return _Dtypes(weight=2, gathered=2, stream=2, product=2, copies=False)
    if training.sharded:  # FSDP2 casts weights and inputs of the model, so all of it runs in bf16
        return _Dtypes(weight=4, gathered=2, stream=2, product=2, copies=False)
    return _Dtypes(weight=4, gathered=2, stream=4, product=2, copies=True)


# ---- What a family's layers are made of


@dataclass(frozen=True, kw_only=True, slots=True)
class _Style:
    """How a family writes its layers, which decides what autograd saves."""

    norms: int = 2  # norms of the width H in a layer
    gemma: bool = False  # norms that multiply by 1 + weight in fp32
    fused_norm: bool = False  # nn.LayerNorm, which saves its input only
    head_norms: bool = False  # norms of queries and keys, head by head or over all heads
    gated: bool = True
    rotary: bool = True
    merged: bool = False  # one projection makes queries, keys and values, so that values hold all of them
    parallel: bool = False  # both norms of a layer read the same input
    grouped: bool = True  # fewer key heads than query heads, if the config says so
    biases: bool = False
    tied: bool = False  # whether embedding and head share a table, unless the config says otherwise


_PLAIN = _Style()
_STYLES: dict[str, _Style] = {
    **dict.fromkeys(["llama", "mistral", "qwen2", "granite", "mixtral"], _PLAIN),
    "smollm3": _Style(tied=True),
    "phi3": _Style(merged=True),
    **dict.fromkeys(["qwen3", "qwen3_moe"], _Style(head_norms=True)),
    "gemma2": _Style(norms=4, gemma=True, tied=True),
    "gemma3_text": _Style(norms=4, gemma=True, head_norms=True, tied=True),
    "starcoder2": _Style(fused_norm=True, gated=False, biases=True, tied=True),
    "gpt_neox": _Style(fused_norm=True, gated=False, biases=True, merged=True, parallel=True, grouped=False),
    "gpt2": _Style(fused_norm=True, gated=False, rotary=False, biases=True, grouped=False, tied=True),
}
# Activations that are written as several operations: what they save beyond their input and output.
_COMPOSED = {"gelu_new": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """Sizes of one decoder layer."""

    inner: int  # I of a dense layer, or of each expert
    experts: int = 0
    top_k: int = 0
    shared: int = 0  # I of the shared experts together


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryModel:
    """Predicts the memory of training a model of one family; build it with ``from_config``.

    ``MemoryModel.from_config(config).peak(8_192, Training())`` is the largest number of bytes that a step on
    packs of 8,192 slots holds at once.
    """

    name: str
    hidden: int
    queries: int  # Q
    keys: int  # K
    heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    composed: int  # tensors of size I that the activation saves beyond its input and output
    positions: int  # rows of a learned table of positions
    layers: tuple[_Layer, ...] = field(repr=False)
    style: _Style = field(repr=False)

    @classmethod
    def from_config(cls, config: Any) -> MemoryModel:
        """Build the model from a transformers config, or from the content of a ``config.json``.

        Raises:
            ValueError: if the family's layers are not known here.
        """
        sizes = Sizes(completed(config, _STYLES))
        text = sizes.sub("text_config") or sizes
        style = _STYLES.get(text.model_type)
        if style is None:
            raise ValueError(
                f"No memory count is known for model_type={text.model_type!r}; known are "
                f"{', '.join(sorted(_STYLES))}. Measure a step: torch.cuda.max_memory_allocated()."
            )

        read_config(config)  # refuses sizes that are missing
        if not text.get("use_parallel_residual", default=True):
            style = replace(style, parallel=False)

        sparse = expert_layers(text)
        dense = _Layer(inner=text.inner)
        layers = tuple(
            _experts(text, index) if index in sparse else dense for index in range(text.num_layers)
        )
        activation = str(text.get("hidden_act", "hidden_activation", "activation_function", default="silu"))
        return cls(
            name=text.model_type,
            hidden=text.hidden,
            queries=text.heads * text.head_dim,
            keys=(text.kv_heads if style.grouped else text.heads) * text.head_dim,
            heads=text.heads,
            head_dim=text.head_dim,
            vocabulary=text.size("vocab_size"),
            tied=bool(text.get("tie_word_embeddings", default=style.tied)),
            composed=_COMPOSED.get(activation, 0),
            positions=0 if style.rotary else text.size("max_position_embeddings", "n_positions"),
            layers=layers,
            style=style,
        )

    # -- weights

    def layer_weights(self, layer: _Layer) -> int:
        """Return the number of weights of a layer."""
        style = self.style
        hidden = self.hidden
        attention = hidden * (2 * self.queries + 2 * self.keys)

        matrices = 3 if style.gated else 2
        inner = (layer.experts or 1) * layer.inner + layer.shared
        mlp = matrices * hidden * inner
        router = hidden * layer.experts

        norms = style.norms * hidden * (2 if style.fused_norm else 1)
        if style.head_norms:
            norms += 2 * self.head_dim
        biases = 0
        if style.biases:
            biases = self.queries + 2 * self.keys + 2 * hidden + layer.inner
        return attention + mlp + router + norms + biases

    def products_of(self, layer: _Layer) -> int:
        """Return the number of a layer's weights without those that its experts stack."""
        matrices = 3 if self.style.gated else 2
        return self.layer_weights(layer) - matrices * self.hidden * layer.experts * layer.inner

    @property
    def num_weights(self) -> int:
        """Return the number of the model's weights."""
        ends = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return ends + sum(map(self.layer_weights, self.layers)) + self.hidden

    # -- memory of a step

    def peak(self, capacity: int, training: Training) -> int:
        """Return the largest number of bytes that a step holds at once on one device."""
        return max(parts.total for parts in self.moments(capacity, training).values())

    def at_peak(self, capacity: int, training: Training) -> tuple[str, Parts]:
        """Return the moment at which a step holds most bytes, and these by parts."""
        return max(self.moments(capacity, training).items(), key=lambda moment: moment[1].total)

    def moments(self, capacity: int, training: Training) -> dict[str, Parts]:
        """Return the bytes by parts at the moments of a step at which memory can be highest.

        Args:
            capacity: slots of a pack, over all context-parallel ranks.
            training: how the model is trained.
        """
        whole_number(capacity, "capacity", least=1)
        return dict(_Step(self, training, -(-capacity // training.context)).moments())

    def static_bytes(self, training: Training) -> int:
        """Return the bytes of weights and optimizer states, which stay between steps."""
        step = _Step(self, training, 1)
        return step.weights() + step.static().optimizer

    def largest_capacity(self, room: int, training: Training, *, multiple: int = 128) -> int:
        """Return the largest capacity whose step fits ``room`` bytes, a multiple of ``multiple``; 0 if none.

        The memory of a step grows with the capacity, so that the answer is found by halving.
        """
        whole_number(room, "room", least=0)
        whole_number(multiple, "multiple", least=1)

        def fits(units: int) -> bool:
            return self.peak(units * multiple, training) <= room

        if not fits(1):
            return 0

        too_large = 2
        while fits(too_large):
            too_large *= 2

        largest = too_large // 2
        while too_large - largest > 1:
            middle = (largest + too_large) // 2
            if fits(middle):
                largest = middle
            else:
                too_large = middle
        return largest * multiple


def _experts(sizes: Sizes, index: int) -> _Layer:
    """Return the sizes of a layer with experts, in place of one MLP."""
    inner = sizes.size("moe_intermediate_size", default=sizes.inner)
    count = sizes.size("num_local_experts", "num_experts", "n_routed_experts")
    return _Layer(inner=inner, experts=count, top_k=active_experts(sizes, index), shared=shared_size(sizes))


# ---- One step


class _Step:
    """The bytes of one step of one model on one device, moment by moment."""

    def __init__(self, model: MemoryModel, training: Training, slots: int) -> None:
        self.model = model
        self.training = training
        self.slots = slots
        self.size = _dtypes(training)
        stages = training.pipeline
        # The first stage holds the embedding, its share of the layers, and most microbatches at once.
        self.layers = model.layers[: -(-len(model.layers) // stages)]
        self.in_flight = stages

    def moments(self) -> Iterator[tuple[str, Parts]]:
        """Yield the moments of a step in their order, and the bytes at each."""
        saved = [self.kept(layer) for layer in self.layers]
        other_microbatches = sum(saved, Parts()).times(self.in_flight - 1)
        live = sum(saved, self.static() + other_microbatches)
        casts = Parts(weights=self.cast_weights(range(len(self.layers))))
        yield "loss, at the end of the forward pass", live + casts + self.final_norm() + self.loss()

        # Each layer's backward pass frees what it saved, and leaves its gradients.
        gradients = self.head_gradient()
        places_of = {layer: [*self.backward(layer)] for layer in self.layers}  # once for layers alike
        for index in reversed(range(len(self.layers))):
            layer = self.layers[index]
            live = live + saved[index].times(-1)
            first = index if self.training.checkpointing else 0
            casts = Parts(weights=self.cast_weights(range(first, index + 1)))
            around = live + casts + Parts(gradients=gradients)
            for place, parts in places_of[layer]:
                yield f"backward pass of layer {index}, {place}", around + parts
            gradients += self.layer_gradient(layer)

        yield "backward pass of the embedding", live + Parts(gradients=gradients) + self.embedding_gradient()
        yield "update of the weights", self.update()

    # -- weights, gradients, states

    def trained(self, weights: int) -> int:
        """Return how many of some weights of the model are trained: all, or with adapters none."""
        return weights if self.training.lora_rank is None else 0

    def adapters(self, layer: _Layer) -> int:
        """Return the number of adapter weights of a layer."""
        model = self.model
        rank = self.training.lora_rank
        if rank is None:
            return 0

        # A product of A x B weights gets adapters of (A + B) x rank.
        width = 4 * model.hidden + 2 * model.queries + 2 * model.keys
        if self.training.lora_targets == "all" and not layer.experts:
            products = 3 if model.style.gated else 2
            width += products * (model.hidden + layer.inner)
        return rank * width

    def device_weights(self) -> int:
        """Return the weights of this device's layers, embedding and head, before FSDP2 shards them."""
        model = self.model
        tables = 1 if model.tied or self.training.pipeline > 1 else 2  # the last stage holds the head
        ends = (tables * model.vocabulary + model.positions) * model.hidden
        layers = sum(map(model.layer_weights, self.layers))
        return (ends + layers) // self.training.tensor + model.hidden

    def static(self) -> Parts:
        """Return weights, optimizer states and gradients that are there before a step, and the batch."""
        training = self.training
        model = self.model
        size = self.size
        adapters = sum(map(self.adapters, self.layers)) * _FP32
        trained = self.trained(self.device_weights()) * size.weight + adapters

        gathered = 0
        if training.sharded:
            # FSDP2 gathers a layer while the one before it runs, and keeps what no layer holds.
            largest = max(map(model.layer_weights, self.layers)) // training.tensor
            ends = model.vocabulary * model.hidden * (1 if model.tied else 2) // training.tensor
            gathered = (2 * largest + ends) * size.gathered

        # Ids, targets and positions of a slot, and what transformers makes of them.
        rotary_table = 2 * model.head_dim * size.stream if model.style.rotary else 0
        batch = self.slots * (4 * _INDEX + rotary_table)

        return Parts(
            weights=self.weights() + gathered,
            optimizer=trained * _STATES[training.optimizer] // training.shards,
            gradients=trained // training.shards if training.accumulates else 0,
            buffers=batch,
        )

    def weights(self) -> int:
        """Return the bytes of this device's weights, adapters included."""
        adapters = sum(map(self.adapters, self.layers))
        return (self.device_weights() * self.size.weight + adapters * _FP32) // self.training.shards

    def cast_weights(self, layers: Iterable[int]) -> int:
        """Return the bytes of the copies in bf16 that autocast made of the weights of some layers.

        It keeps them until its forward pass ends, and the backward pass of a product needs them, too.
        """
        if not self.size.copies:
            return 0
        weights = sum(self.model.products_of(self.layers[index]) for index in layers)
        return weights // self.training.tensor * self.size.gathered

    def layer_gradient(self, layer: _Layer) -> int:
        """Return the bytes of a layer's gradients, which appear in its backward pass."""
        if self.training.accumulates:
            return 0
        weights = self.trained(self.model.layer_weights(layer)) // self.training.tensor
        return (weights * self.size.weight + self.adapters(layer) * _FP32) // self.training.shards

    def head_gradient(self) -> int:
        """Return the bytes of the gradient of the head's weight, which the loss computed."""
        table = self.trained(self.model.vocabulary * self.model.hidden) // self.training.tensor
        shards = self.training.shards if self.training.accumulates else 1
        return table * self.size.weight // shards

    def embedding_gradient(self) -> Parts:
        """Return the gradient of the embedding's table, and the copy that a tied head adds to."""
        table = self.trained(self.model.vocabulary * self.model.hidden) // self.training.tensor
        stream = self.slots * self.model.hidden * self.size.stream
        return Parts(gradients=table * self.size.weight, inputs=stream)

    def update(self) -> Parts:
        """Return the bytes while the optimizer changes the weights."""
        static = replace(self.static(), gradients=0, buffers=self.slots * 4 * _INDEX)
        adapters = sum(map(self.adapters, self.layers)) * _FP32
        trained = self.trained(self.device_weights()) * self.size.weight + adapters
        gradients = trained // self.training.shards

        # torch's optimizers update all weights of a GPU at once, with a copy of them; on a CPU they go one by
        # one, with three copies. Plain SGD needs none.
        copies = 0
        if _STATES[self.training.optimizer]:
            if self.training.device == "cuda":
                copies = gradients
            else:
                copies = 3 * self.trained(self.largest_matrix()) * self.size.weight
        return static + Parts(gradients=gradients, optimizer=copies)

    def largest_matrix(self) -> int:
        """Return the number of weights of the model's largest parameter."""
        model = self.model
        stacked = 2 if model.style.gated else 1  # experts keep gate and up in one parameter
        largest = model.vocabulary * model.hidden
        for layer in self.layers:
            matrices = layer.experts * stacked if layer.experts else 1
            largest = max(largest, matrices * layer.inner * model.hidden)
        return largest

    # -- activations

    def per_slot(self, values: float) -> int:
        """Return the bytes of so many bytes a slot."""
        return round(self.slots * values)

    def kept(self, layer: _Layer) -> Parts:
        """Return what stays of a layer from its forward to its backward pass."""
        stream = self.per_slot(self.model.hidden * self.size.stream)
        if not self.training.checkpointing:
            return self.saved(layer, tiled=self.training.mlp_tile is not None)
        return Parts(inputs=0 if self.training.offload else stream)

    def saved(self, layer: _Layer, *, tiled: bool) -> Parts:
        """Return what autograd saves in a layer."""
        norms = self.first_norm() + self.norm_before_mlp() + self.norms_of_outputs()
        return self.saved_attention() + self.saved_mlp(layer, tiled=tiled) + norms

    def norm(self, width: int, *, bytes_in: int) -> tuple[int, int]:
        """Return bytes a slot of the input that a norm saves, and of what else it saves."""
        if self.model.style.fused_norm:
            return width * bytes_in, 0

        # The product with the weight saves the normalised values for the weight's gradient.
        normalised = 0
        if self.training.lora_rank is None:
            normalised = width * (_FP32 if self.model.style.gemma else bytes_in)
        # The squares and the product save the input in fp32: the input itself, or a copy.
        return width * _FP32, normalised

    def reads_the_stream(self) -> bool:
        """Return whether a norm saves the residual stream itself, and no copy of it in fp32."""
        return self.model.style.fused_norm or self.size.stream == _FP32

    def saved_norm(self, *, of_stream: bool) -> Parts:
        """Return what a norm of the width H saves, of the residual stream or of another tensor."""
        input_bytes, normalised = self.norm(self.model.hidden, bytes_in=self.size.stream)
        if of_stream and self.reads_the_stream():
            return Parts(inputs=self.per_slot(input_bytes), norms=self.per_slot(normalised))
        return Parts(norms=self.per_slot(input_bytes + normalised))

    def first_norm(self) -> Parts:
        """Return what the norm before attention saves."""
        return self.saved_norm(of_stream=True)

    def norm_before_mlp(self) -> Parts:
        """Return what the norm before the MLP saves."""
        parts = self.saved_norm(of_stream=True)
        # A parallel layer has one input, which the norm before attention counts.
        return replace(parts, inputs=0) if self.model.style.parallel else parts

    def norms_of_outputs(self) -> Parts:
        """Return what the norms behind attention and MLP save, in families that have them."""
        return self.saved_norm(of_stream=False).times(self.model.style.norms - 2)

    def casts(self, width: int, products: int, *, adapted: bool) -> float:
        """Return the bytes a slot that ``products`` of one input save of this input, ``width`` wide."""
        if self.training.lora_rank is None:
            return width * self.size.product * (products if self.size.copies else 1)
        if not adapted:
            return 0
        # PEFT's adapters are in fp32: each casts its input, unless that is fp32 too.
        return width * _FP32 * (1 if self.size.stream == _FP32 else products)

    def saved_attention(self) -> Parts:
        """Return what the attention of a layer saves, with its projections."""
        model = self.model
        size = self.size
        inputs = self.casts(model.hidden, 3, adapted=True)

        # A rank keeps the keys and values of the whole pack, which one long sequence needs.
        keys_and_values = 2 * model.keys * self.training.context
        inside: float = size.product * (2 * model.queries + keys_and_values) + _FP32 * model.heads
        if model.style.merged:
            inside += size.product * (model.queries + model.keys)
        if model.style.head_norms:
            for width in (model.queries, model.keys):
                inside += sum(self.norm(width, bytes_in=size.product))

        adapters = 0
        if self.training.lora_rank is not None:
            adapters = 4 * self.training.lora_rank * _FP32
        if self.adapts_in_fp32():
            inside += model.queries * _FP32  # the output's adapter casts its input
        return Parts(attention=self.per_slot(inputs + inside / self.training.tensor + adapters))

    def mlp_values(self, layer: _Layer) -> tuple[float, float]:
        """Return the bytes a slot that an MLP saves of its input, and of what is inside."""
        model = self.model
        size = self.size
        inner_bytes = self.inner_values(layer) * size.product

        if not layer.experts:
            adapted = self.training.lora_targets == "all"
            inputs = self.casts(model.hidden, 2 if model.style.gated else 1, adapted=adapted)
            inside = layer.inner * inner_bytes
            if adapted and self.adapts_in_fp32():
                inside += layer.inner * (_FP32 - size.product)  # the last product is saved as a cast copy
            return inputs, inside

        inputs = self.casts(model.hidden, 1, adapted=False)
        # For each expert of a token: a copy of the token, its result if the router learns, and indices.
        copies = 2 if self.training.lora_rank is None else 1
        product = self.expert_bytes()
        of_a_token = copies * model.hidden * product + 3 * _INDEX
        of_an_expert = layer.inner * self.inner_values(layer) * product
        return inputs, layer.top_k * (of_a_token + of_an_expert) + layer.shared * inner_bytes

    def expert_bytes(self) -> int:
        """Return the bytes of a value inside experts: autocast does not cast their grouped products."""
        return self.size.stream if self.size.copies else self.size.product

    def inner_values(self, layer: _Layer) -> int:
        """Return how many tensors of the intermediate size an MLP or an expert saves."""
        elementwise = 3 if self.model.style.gated else 1  # the activation's input; gated, both factors too
        # Stacked weights of experts get no adapters.
        has_adapters = self.training.lora_targets == "all" and not layer.experts
        is_frozen = self.training.lora_rank is not None and not has_adapters
        of_last_product = 0 if is_frozen else 1  # its input, for the gradient of its weight
        return elementwise + self.model.composed + of_last_product

    def saved_mlp(self, layer: _Layer, *, tiled: bool) -> Parts:
        """Return what the MLP or the experts of a layer save; in tiles, their input."""
        inputs, inside = self.mlp_values(layer)
        if tiled:
            # Autocast's copy for the router, which does not run in tiles.
            of_router = inputs if layer.experts and self.size.copies else 0
            return Parts(mlp=self.stream() + self.per_slot(of_router))

        inside += layer.experts * _FP32 * 3  # the router's values for each expert
        return Parts(mlp=self.per_slot(inputs + inside / self.training.tensor))

    def final_norm(self) -> Parts:
        """Return what the norm before the head saves."""
        saved = sum(self.norm(self.model.hidden, bytes_in=self.size.stream))
        return Parts(inputs=self.stream(), norms=self.per_slot(saved))

    # -- for a moment

    def backward(self, layer: _Layer) -> Iterator[tuple[str, Parts]]:
        """Yield the places of a layer's backward pass at which it can need most, and the bytes at each."""
        model = self.model
        tiled = self.training.mlp_tile is not None
        has_norms_of_outputs = model.style.norms > 2
        around = self.at_hand() + Parts(buffers=self.stream())  # the gradient of the layer's output
        saved = self.saved(layer, tiled=tiled)

        mlp = self.in_mlp(layer)
        if has_norms_of_outputs:  # the norm behind the MLP comes first, with all that was saved
            mlp = max(mlp, self.in_norm(model.hidden), key=lambda parts: parts.total)
        last_product = model.hidden * (layer.experts or 1) * layer.inner
        weights_done = last_product
        if tiled:  # the gradients of the earlier tiles, and those of one product of this tile
            first_product = last_product
            if layer.experts and model.style.gated:
                first_product *= 2  # experts keep gate and up in one parameter
            weights_done = self.mlp_weights(layer) + first_product
        gradients = Parts(gradients=self.gradient_of(layer, weights_done))
        yield "MLP", around + saved + mlp + gradients

        # The MLP is done, and its part of what was saved is free.
        saved = saved + self.saved_mlp(layer, tiled=tiled).times(-1)
        if has_norms_of_outputs:
            saved = saved + self.saved_norm(of_stream=False).times(-1)
        _, normalised = self.norm(model.hidden, bytes_in=self.size.stream)
        in_norm = self.in_norm(model.hidden) + Parts(norms=-self.per_slot(normalised))
        weights_done = self.mlp_weights(layer)
        gradients = Parts(gradients=self.gradient_of(layer, weights_done))
        yield "norm before the MLP", around + saved + in_norm + gradients

        saved = saved + self.norm_before_mlp().times(-1)
        weights_done += model.hidden * model.queries
        gradients = Parts(gradients=self.gradient_of(layer, weights_done))
        yield "attention", around + saved + self.in_attention() + gradients

        if model.style.head_norms:
            weights_done += 2 * model.hidden * model.keys
            gradients = Parts(gradients=self.gradient_of(layer, weights_done))
            yield "norm of the queries", around + self.first_norm() + self.in_head_norms() + gradients

    def stream(self) -> int:
        """Return the bytes of the residual stream, or of a gradient of it."""
        return self.per_slot(self.model.hidden * self.size.stream)

    def at_hand(self) -> Parts:
        """Return the bytes of the input from which a checkpointed layer is computed again."""
        if not self.training.checkpointing:
            return Parts()
        # The first norm counts an input that it saves itself.
        inputs = 0 if self.reads_the_stream() else self.stream()
        if self.training.offload:
            inputs += self.stream()  # the one of the layer before is on its way from CPU memory
        return Parts(inputs=inputs)

    def gradient_of(self, layer: _Layer, weights: int) -> int:
        """Return the bytes of the gradients of so many of a layer's weights while its backward pass runs."""
        training = self.training
        if training.sharded:  # FSDP2 reduces the gradients of a layer when all of them are there
            return self.trained(self.model.layer_weights(layer)) // training.tensor * self.size.gathered
        if training.accumulates:
            return 0
        return self.trained(weights) // training.tensor * self.size.weight

    def mlp_weights(self, layer: _Layer) -> int:
        """Return the number of weights of a layer's MLP or experts."""
        inner = (layer.experts or 1) * layer.inner + layer.shared
        return (3 if self.model.style.gated else 2) * self.model.hidden * inner

    def in_mlp(self, layer: _Layer) -> Parts:
        """Return what the backward pass of an MLP needs beyond what was saved, where it needs most."""
        tile = self.training.mlp_tile
        product = self.size.product
        inside = self.mlp_gradients(layer) / self.training.tensor
        cast = 0
        if self.size.copies and not layer.experts:
            # Autocast casts the gradient of the output for the last product.
            cast = self.model.hidden * product
        elif self.adapts_in_fp32():
            # That of the adapter's output is cast and scaled, and that of the base cast.
            cast = self.model.hidden * (_FP32 + product)
        if tile is None:
            return Parts(buffers=self.per_slot(inside + cast))

        # One tile is run again. Behind it are the gradients of the inputs of all tiles, which become one.
        share = min(1.0, tile / self.slots)
        inside += self.mlp_values(layer)[1] / self.training.tensor
        in_a_tile = self.per_slot((inside + cast) * share)
        return Parts(buffers=self.stream() + max(in_a_tile, self.stream()))

    def adapts_in_fp32(self) -> bool:
        """Return whether PEFT's adapters, which are in fp32, cast what they read and what they return."""
        return self.training.lora_rank is not None and self.size.stream != _FP32

    def mlp_gradients(self, layer: _Layer) -> float:
        """Return the bytes a slot of gradients inside an MLP, where they are most beyond what was saved.

        The last product makes a gradient of the intermediate size. With the gradients of what was multiplied,
        there are three when the saved product is freed. So a gated MLP needs two more than was saved.
        """
        model = self.model
        product = self.size.product
        several = 2 if model.style.gated or model.composed else 1
        if not layer.experts:
            inner = several * product
            if self.adapts_in_fp32() and self.training.lora_targets == "all":
                # The gradient of the base product, and in fp32 that of the adapter's input.
                inner = product + _FP32
                if self.training.device == "cpu":
                    # More is there when the output of an adapter was added, before the last product has saved
                    # anything: it, the sum, and a copy in fp32 of the base product, which a GPU needs not.
                    inner = 2 * _FP32
            return layer.inner * inner

        # Outputs of experts are multiplied by the router's weights: one gradient comes, two go. The outputs
        # are freed before the gradients inside.
        of_expert = self.expert_bytes()
        outputs = layer.top_k * model.hidden * of_expert
        inside = layer.top_k * layer.inner * several * of_expert
        if self.training.lora_rank is None:
            inside -= outputs
        return max(3 * outputs, inside) + layer.shared * several * product

    def in_norm(self, width: int) -> Parts:
        """Return what the backward pass of a norm needs beyond its input.

        Written operation by operation in fp32, it holds five tensors: the gradient by the product, that of
        the mean, and of the square its power, twice that, and the gradient.
        """
        if self.model.style.fused_norm:
            return Parts(buffers=self.per_slot(width * self.size.stream))
        return Parts(buffers=self.per_slot(5 * width * _FP32))

    def in_attention(self) -> Parts:
        """Return the gradients of attention's output, queries, keys and values."""
        model = self.model
        training = self.training
        of_this_rank = 2 * model.queries + 2 * model.keys
        # Context-parallel ranks send back the gradients of the keys and values of others.
        of_others = 2 * model.keys * (training.context - 1)
        return Parts(buffers=self.per_slot((of_this_rank + of_others) * self.size.product / training.tensor))

    def in_head_norms(self) -> Parts:
        """Return what the norm of the queries needs, when keys and values are done."""
        model = self.model
        size = self.size
        tensor = self.training.tensor
        input_bytes, _ = self.norm(model.queries, bytes_in=size.product)
        inputs = self.casts(model.hidden, 3, adapted=True)
        # The products of keys and values have left one gradient of their common input.
        buffers = self.in_norm(model.queries).buffers // tensor + self.per_slot(model.hidden * size.stream)
        return Parts(attention=self.per_slot(inputs + input_bytes / tensor), buffers=buffers)

    def loss(self) -> Parts:
        """Return what the fused loss holds: gradients of the head's operands, and its tiles."""
        model = self.model
        training = self.training
        size = self.size
        columns = model.vocabulary // training.tensor

        # As the loss chooses its tiles: see ``loss/linear_nll.py``.
        budget = 512 * 2**20
        fewest = 2048
        if training.device == "cpu":
            budget = 64 * 2**20
            fewest = 256
        rows = min(self.slots, max(fewest, budget // (columns * _FP32) // 64 * 64))
        tiles = rows * columns * _FP32
        # The tile's hidden states are copied, with zeros in rows without a target: one a sequence at least.
        tiles += rows * model.hidden * size.product
        if training.device == "cpu":
            # A scratch tile, and one that oneDNN returns; CPUs without bf16 products cast their inputs.
            wide = min(columns, max(2048, 16 * 2**20 // (2 * _FP32) // rows))
            tiles += 2 * rows * wide * _FP32
            if size.product != _FP32:
                tiles += (rows + wide) * model.hidden * _FP32

        hidden = self.per_slot(model.hidden * size.product)
        table = self.trained(model.vocabulary * model.hidden) // training.tensor
        return Parts(loss=tiles + hidden + table * _FP32)
