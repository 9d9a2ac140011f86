"""A transformers model -> its tensor-parallel plan, and the model with its weights cut by that plan.

Weights become DTensors and activations stay plain tensors, so all other operations of a model run unchanged.
A plan maps names of modules (``*`` is any number) to styles; the names of styles are those of transformers.
Legend: T slots, K chosen experts per token.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_thd._find import has_parameters, model_config, model_with_head
from lightning_thd._private import private_of, set_private
from lightning_thd.parallel.exchange import (
    gather_same,
    keep_own,
    keep_path,
    local,
    sum_all_gradients,
    sum_gradients,
    sum_ranks,
)

# Linear layers of feed-forward blocks, whose columns are not heads.
_FEED_FORWARD = frozenset({"gate_proj", "up_proj", "w1", "w3", "proj_up_gate", "proj_up"})
_IS_EXPERT_PARALLEL = "transformers.integrations.moe.use_experts_implementation._is_expert_parallel"
_HEAD_NORM = re.compile(r"([qk])(?:uery|ey)?_(?:layer)?norm")  # norms of queries or keys: q_norm


def apply_tensor_parallel(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Cut the weights that a plan names over the tensor-parallel ranks, in place and without a collective."""
    matched = _match(model, plan)
    if not any(style != "replicated_with_grad_allreduce" for _, _, style in matched):
        raise ValueError(
            f"No module of {type(model).__name__} matches the tensor-parallel plan {sorted(plan)}. Name "
            "modules as named_modules() does, with '*' for a layer number."
        )
    for name, module, style in matched:
        if style in _CHECKS:
            _CHECKS[style](name, module, mesh.size())
    between = _between_products(model, matched)

    cutter = _Cutter(mesh)
    for _, module, style in matched:
        _STYLES[style](module, cutter)
    for module in between:
        sum_own_gradients(module, cutter.group)

    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if cutter.was_cut(parameter):
                raise ValueError(
                    f"{name}.{parameter_name} is tied to a weight that the tensor-parallel plan cuts. Add "
                    f"{name!r} to the plan: an embedding as 'embedding_rowwise', a head as "
                    "'colwise_gather_output'."
                )


def check_names(models: Sequence[nn.Module], plan: Mapping[str, str]) -> None:
    """Refuse a plan of the user's with an entry that matches no module: its weights would stay whole."""
    names = [name for model in models for name, _ in model.named_modules()]
    unmatched = [entry for entry in plan if not any(map(_pattern(entry).match, names))]
    if unmatched:
        kinds = ", ".join(type(model).__name__ for model in models)
        raise ValueError(
            f"tensor_parallel_plan names {unmatched}, which match no module of {kinds}. Name modules as "
            "named_modules() does, with '*' for a layer number."
        )


def _match(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[str, nn.Module, str]]:
    """Return name, module and style of every module with weights that a plan names."""
    patterns = {_pattern(name): (name, style) for name, style in plan.items()}
    matched = []

    for name, module in model.named_modules():
        for pattern, (entry, style) in patterns.items():
            if not pattern.match(name):
                continue
            if style not in _STYLES:
                raise ValueError(
                    f"The tensor-parallel plan asks for {style!r} of {entry!r}; supported are "
                    f"{', '.join(_STYLES)}. Pass tensor_parallel_plan={{...}}."
                )

            # Placeholders for embeddings and heads of other pipeline stages have nothing to cut.
            if not isinstance(module, nn.ModuleList) and has_parameters(module):
                matched.append((name, module, style))

    return matched


def _pattern(entry: str) -> re.Pattern[str]:
    """Return a pattern of a plan's entry: ``layers.*.mlp`` matches ``layers.3.mlp``."""
    return re.compile(re.escape(entry).replace(r"\*", r"\d+") + "$")


def _between_products(model: nn.Module, matched: list[tuple[str, nn.Module, str]]) -> list[nn.Module]:
    """Return activations and norms that act on a rank's own columns; refuse those that mix all columns."""
    in_plan = {id(module) for _, module, _ in matched}
    gathered = {id(module) for _, module, style in matched if style == "colwise_gather_output"}
    between = []
    for path in dict.fromkeys(name.rpartition(".")[0] for name, _, style in matched if style == "colwise"):
        block: Any = model.get_submodule(path)
        sparsity = getattr(block, "activation_sparsity", 0.0)
        if sparsity:
            raise ValueError(
                f"{path} ({type(block).__name__}) has activation_sparsity={sparsity}: it compares "
                "activations that tensor parallelism cuts. Set config.activation_sparsity_pattern to zeros."
            )

        for name, child in block.named_children():
            if id(child) in in_plan or not has_parameters(child):
                continue
            head_norm = _HEAD_NORM.fullmatch(name)
            if head_norm is not None:
                projection = getattr(block, f"{head_norm[1]}_proj", None)
                if id(projection) in gathered:  # the norm sees all columns
                    continue
                _check_head_norm(f"{path}.{name}", child, getattr(block, "head_dim", None))
            if head_norm is not None or name.startswith("act"):
                between.append(child)
    return between


def _check_head_norm(name: str, norm: nn.Module, head_dim: int | None) -> None:
    """Refuse a norm of queries or keys over all heads at once, of which a rank has only some."""
    if any(parameter.shape != (head_dim,) for parameter in norm.parameters()):
        raise ValueError(
            f"{name} ({type(norm).__name__}) has weights for all heads, which tensor parallelism cuts. Take "
            "the projections of this block out of the plan."
        )


class _Cutter:
    """Cuts parameters over the ranks of a mesh; modules with a tied parameter get the same part."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group: dist.ProcessGroup = mesh.get_group()
        # id -> the parameter, held so that its id is not used again, and its part
        self._cut: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def was_cut(self, parameter: nn.Parameter) -> bool:
        """Return whether ``cut`` has replaced this parameter in some module."""
        return id(parameter) in self._cut

    def cut(self, module: nn.Module, name: str, dim: int) -> None:
        """Replace a parameter by this rank's part of it, as a DTensor."""
        parameters = parameters_of(module)
        parameter = parameters.get(name)
        if parameter is None or isinstance(parameter, DTensor):
            return
        if id(parameter) not in self._cut:
            part = distribute_tensor(parameter.detach(), self.mesh, [Shard(dim)], src_data_rank=None)
            self._cut[id(parameter)] = (
                parameter,
                nn.Parameter(part, requires_grad=parameter.requires_grad),
            )
        parameters[name] = self._cut[id(parameter)][1]


def parameters_of(module: nn.Module) -> dict[str, Any]:
    """Return the dict in which a module keeps its direct parameters; None stands for a missing one.

    Assigning to the module's attributes would refuse the plain tensors that stand there in a forward call.
    """
    if _PARAMETERS is None:
        raise RuntimeError(
            f"torch {torch.__version__} keeps parameters where this package does not find them. "
            "Install a tested release: see lightning-thd doctor."
        )
    parameters: dict[str, Any] = vars(module)[_PARAMETERS]
    return parameters


def _place_of_parameters() -> str | None:
    """Return the attribute of a module in which torch keeps its direct parameters, or None."""
    module = nn.Module()
    module.register_parameter("weight", None)
    places = [name for name, value in vars(module).items() if isinstance(value, dict) and "weight" in value]
    return places[0] if len(places) == 1 else None


# Found at import, because torch.compile traces forward calls that ask for it.
_PARAMETERS: Final = _place_of_parameters()


@contextlib.contextmanager
def parameters_as(module: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Generator[None]:
    """Replace a module's direct parameters by ``change(parameter)`` inside this context."""
    parameters = parameters_of(module)
    unchanged = {name: value for name, value in parameters.items() if value is not None}
    parameters.update({name: change(value) for name, value in unchanged.items()})
    try:
        yield
    finally:
        parameters.update(unchanged)


def _colwise(module: Any, cutter: _Cutter) -> None:
    """Cut a layer by output features; every rank gets all input and returns its own features."""
    cutter.cut(module, "weight", 0)
    cutter.cut(module, "bias", 0)
    forward = module.forward
    group = cutter.group

    def colwise_forward(x: Tensor) -> Tensor:
        with parameters_as(module, local):
            out: Tensor = forward(sum_gradients(x, group))
        return out

    module.forward = colwise_forward


def _colwise_gather_output(module: Any, cutter: _Cutter) -> None:
    """Cut a layer by output features, and gather the features of all ranks."""
    _colwise(module, cutter)
    forward = module.forward
    group = cutter.group

    def gathering_forward(x: Tensor) -> Tensor:
        return gather_same(forward(x), group, dim=x.ndim - 1)

    module.forward = gathering_forward


def _rowwise(module: Any, cutter: _Cutter) -> None:
    """Cut a layer by input features, of which each rank has its part, and sum the ranks' outputs."""
    cutter.cut(module, "weight", 1)
    forward = module.forward
    group = cutter.group

    def rowwise_forward(x: Tensor) -> Tensor:
        bias = parameters_of(module).get("bias")  # whole on every rank; added once, after the sum

        def without_bias(parameter: Tensor) -> Tensor | None:
            return None if parameter is bias else local(parameter)

        with parameters_as(module, without_bias):
            out = sum_ranks(forward(x), group)
        return out if bias is None else out + bias

    module.forward = rowwise_forward


def _rowwise_split_input(module: Any, cutter: _Cutter) -> None:
    """Cut a layer by input features, of which each rank takes its part, and sum the ranks' outputs."""
    _rowwise(module, cutter)
    forward = module.forward
    group = cutter.group

    def splitting_forward(x: Tensor) -> Tensor:
        out: Tensor = forward(keep_own(x, group, dim=x.ndim - 1))
        return out

    module.forward = splitting_forward


def _embedding(module: Any, cutter: _Cutter) -> None:
    """Cut an embedding by rows; ids of other ranks' rows give zeros, and the ranks' outputs are summed."""
    rows = module.num_embeddings // cutter.group.size()
    first = cutter.group.rank() * rows
    cutter.cut(module, "weight", 0)
    if module.padding_idx is not None:  # only one rank holds the padding row, which gets no gradient
        inside = first <= module.padding_idx < first + rows
        module.padding_idx = module.padding_idx - first if inside else None
    forward = module.forward
    group = cutter.group

    def embedding_forward(ids: Tensor) -> Tensor:
        row_ids = ids - first
        missing = (row_ids < 0) | (row_ids >= rows)
        with parameters_as(module, local):
            out: Tensor = forward(row_ids.masked_fill(missing, 0))
        return sum_ranks(out.masked_fill(missing.unsqueeze(-1), 0), group)

    module.forward = embedding_forward


def sum_own_gradients(module: Any, group: dist.ProcessGroup) -> None:
    """Sum the gradients of a module's uncut parameters, which each rank uses for its own heads or slots."""
    forward = module.forward

    def summing_forward(*args: Any, **kwargs: Any) -> Any:
        with parameters_as(module, lambda parameter: sum_gradients(parameter, group)):
            return forward(*args, **kwargs)

    module.forward = summing_forward


def _experts(experts: Any, cutter: _Cutter) -> None:
    """Give each rank some whole experts, and sum the ranks' outputs for every token."""
    count = experts.num_experts // cutter.group.size()
    first = cutter.group.rank() * count
    for name in list(parameters_of(experts)):
        cutter.cut(experts, name, 0)
    # With these attributes, transformers treats the index num_experts as an expert of another rank.
    experts.num_experts = count
    if _chooses_implementation(experts):
        set_private(experts, _IS_EXPERT_PARALLEL, True)
    skips_others = _skips_other_experts(experts, count)
    forward = experts.forward
    group = cutter.group

    def experts_forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        expert_of_rank = index - first
        missing = (expert_of_rank < 0) | (expert_of_rank >= count)
        hidden, weights = sum_all_gradients((hidden, weights), group)
        with parameters_as(experts, local):
            if skips_others:
                masked = weights.masked_fill(missing, 0.0)
                out: Tensor = forward(hidden, expert_of_rank.masked_fill(missing, count), masked)
            else:
                out = _run_wanted(forward, hidden, expert_of_rank, weights, ~missing)
            # If no token chose an expert of this rank, the output has no gradient. But FSDP2 needs a gradient
            # for the same parameters on every rank.
            unused = () if out.requires_grad else tuple(experts.parameters(recurse=False))
            out = keep_path(out, hidden, weights, *unused)
        return sum_ranks(out, group)

    experts.forward = experts_forward


def _skips_other_experts(experts: Any, count: int) -> bool:
    """Return whether experts skip tokens routed to index ``num_experts``, which is ``count``.

    transformers' functions for experts do, and so do most families' own loops. The others only get the tokens
    of this rank's experts, for which the device is read.
    """
    if _chooses_implementation(experts):
        chosen = private_of(experts.config, "transformers.PreTrainedConfig._experts_implementation")
        if chosen not in (None, "eager"):
            return True

    # One token on a CPU, where an index out of range is an error. On a GPU it would end the process. A loop
    # that skips the token multiplies nothing, so any width will do, and the weights may be one zero.
    index = torch.full((1, 1), count, device="cpu")
    hidden = torch.zeros((1, 1), device="cpu")

    def one_zero(parameter: Tensor) -> Tensor:
        return hidden.new_zeros((), dtype=parameter.dtype).expand(local(parameter).shape)

    try:
        with torch.no_grad(), parameters_as(experts, one_zero):
            experts.forward(hidden, index, torch.zeros_like(hidden))
    except Exception:  # each loop fails in its own way
        return False
    return True


def _chooses_implementation(experts: Any) -> bool:
    """Return whether transformers' ``use_experts_implementation`` decorates a class of experts."""
    return hasattr(type(experts).forward, "__wrapped__") and hasattr(experts, "config")


def _run_wanted(
    forward: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor, wanted: Tensor
) -> Tensor:
    """Run experts only for the wanted choices ``[T, K]``, one row each, and sum the rows of every token."""
    tokens, places = wanted.nonzero(as_tuple=True)
    chosen = index[tokens, places][:, None]
    weight = weights[tokens, places][:, None]
    rows = forward(hidden[tokens], chosen, weight)
    return torch.zeros_like(hidden).index_add(0, tokens, rows)


def _require_divided(what: str, number: int, ranks: int, advice: str) -> None:
    """Raise unless the ranks divide a number; gloo would abort the process on uneven parts."""
    if number % ranks:
        raise ValueError(
            f"{what}, which {ranks} tensor-parallel ranks do not divide; wanted a multiple of {ranks}. "
            f"{advice}"
        )


def _is_product(module: nn.Module) -> bool:
    """Return whether a module only multiplies by its weight and adds its bias, perhaps in FP8."""
    if not isinstance(module, nn.Linear) or "forward" in vars(module):
        return False
    if not isinstance(parameters_of(module).get("weight"), Tensor):  # computed, as by a parametrization
        return False
    kind = type(module)
    return kind.forward is nn.Linear.forward or kind.__name__ == "Float8Linear"


def _check_linear(dim: int) -> Callable[[str, nn.Module, int], None]:
    """Return a check of a linear layer whose weight is cut along ``dim``."""

    def check(name: str, module: nn.Module, ranks: int) -> None:
        weight: Any = getattr(module, "weight", None)
        if not _is_product(module):
            raise ValueError(
                f"{name} is a {type(module).__name__}, whose forward may do more than a product with a "
                "weight of its own. Take it out of the tensor-parallel plan."
            )
        features = weight.shape[dim]
        side = "output" if dim == 0 else "input"
        other = "take the layer out of the plan."
        if name.endswith("head"):
            other = f"pad the vocabulary: model.resize_token_embeddings(pad_to_multiple_of={ranks})."
        advice = f"Lower tensor_parallel_size, or {other}"
        _require_divided(f"{name} has {features} {side} features", features, ranks, advice)

    return check


def _check_embedding(name: str, module: nn.Module, ranks: int) -> None:
    if not isinstance(module, nn.Embedding) or module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError(
            f"{name} is a {type(module).__name__}, but the tensor-parallel plan cuts it as an nn.Embedding "
            "without max_norm and scale_grad_by_freq. Take it out of the plan."
        )
    advice = f"Pad the vocabulary: model.resize_token_embeddings(pad_to_multiple_of={ranks})."
    _require_divided(f"{name} has {module.num_embeddings} rows", module.num_embeddings, ranks, advice)


def _check_experts(name: str, module: nn.Module, ranks: int) -> None:
    count = getattr(module, "num_experts", None)
    weights = parameters_of(module).values()
    by_expert = all(value is not None and value.ndim > 1 and value.shape[0] == count for value in weights)
    if not isinstance(count, int) or not weights or not by_expert:
        raise ValueError(
            f"{name} ({type(module).__name__}) does not keep its experts as parameters [num_experts, ...], "
            "so tensor parallelism cannot cut it. Take it out of the plan."
        )

    if len(inspect.signature(type(module).forward).parameters) < 4:  # self, hidden, index, weights
        raise ValueError(
            f"{name} ({type(module).__name__}) is not told which experts each token has chosen, so ranks "
            "cannot hold different experts. Take it out of the tensor-parallel plan."
        )

    advice = "Lower tensor_parallel_size, or take the experts out of the plan."
    _require_divided(f"{name} has {count} experts", count, ranks, advice)


_STYLES: dict[str, Callable[[nn.Module, _Cutter], None]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split_input,
    "colwise_gather_output": _colwise_gather_output,
    "embedding_rowwise": _embedding,
    "replicated_with_grad_allreduce": lambda module, cutter: sum_own_gradients(module, cutter.group),
    "moe_tp_experts": _experts,
}
_CHECKS: dict[str, Callable[[str, nn.Module, int], None]] = {
    "colwise": _check_linear(0),
    "rowwise": _check_linear(1),
    "rowwise_split_input": _check_linear(1),
    "colwise_gather_output": _check_linear(0),
    "embedding_rowwise": _check_embedding,
    "moe_tp_experts": _check_experts,
}


def model_plan(model: nn.Module, ranks: int = 1) -> dict[str, str]:
    """Return the tensor-parallel plan (names to styles) of a model, or of the model inside a wrapper."""
    inner = model_with_head(model)
    if inner is not None and inner is not model:
        return _in_wrapper(model, inner, model_plan(inner, ranks))

    plan_of_transformers: dict[str, str] = getattr(model, "tp_plan", None) or {}
    plan = _without_other_styles(model, {**_experts_of(model, ranks), **plan_of_transformers})
    if not any("layers" in name or "*" in name for name in plan):
        raise ValueError(
            f"{type(model).__name__} comes without a tensor-parallel plan for its layers. Pass a plan as "
            "tensor_parallel_plan={'model.layers.*.self_attn.q_proj': 'colwise', ...}."
        )

    embedding = _name_of(model, "get_input_embeddings")
    head = _name_of(model, "get_output_embeddings")
    if embedding is None or head is None:
        return plan
    weight = getattr(model.get_submodule(embedding), "weight", None)
    is_tied = weight is not None and weight is getattr(model.get_submodule(head), "weight", None)
    if is_tied and head in plan:  # cut a tied weight in both modules
        plan[embedding] = "embedding_rowwise"
    elif is_tied and embedding in plan:
        plan[head] = "colwise_gather_output"
    return plan


def _in_wrapper(model: nn.Module, inner: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the plan of a model inside a wrapper; layers with adapters take and return uncut tensors."""
    path = next(name for name, module in model.named_modules() if module is inner)
    if not any(hasattr(module, "base_layer") for module in inner.modules()):
        return {f"{path}.{name}": style for name, style in plan.items()}

    uncut = {"colwise": "colwise_gather_output", "rowwise": "rowwise_split_input"}
    in_wrapper = {}
    for name, module, style in _match(inner, plan):
        if style == "replicated_with_grad_allreduce":  # for what lies between cut tensors
            continue
        if hasattr(module, "base_layer"):
            name = f"{name}.base_layer"  # the layer inside the adapter
        in_wrapper[f"{path}.{name}"] = uncut.get(style, style)
    return in_wrapper


def _without_other_styles(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Leave out blocks with unsupported styles, or styles for single parameters; these blocks stay whole."""
    unsupported = {name for name, style in plan.items() if style not in _STYLES}
    whole_blocks = set()
    for name, module in model.named_modules():
        entry = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if entry in unsupported:
            has_children = any(True for _ in module.children())
            whole_blocks.add(entry if has_children else entry.rpartition(".")[0])
        elif entry not in plan and any(f"{entry}.{parameter}" in plan for parameter in parameters_of(module)):
            whole_blocks.add(entry)
    return {
        name: style
        for name, style in plan.items()
        if name not in whole_blocks and name.rpartition(".")[0] not in whole_blocks
    }


def _experts_of(model: nn.Module, ranks: int) -> dict[str, str]:
    """Return a plan for experts in parameters ``[num_experts, ...]``, if ``ranks`` divides that number."""
    plan: dict[str, str] = {}
    for name, style in (getattr(model, "ep_plan", None) or {}).items():
        pattern = _pattern(name)
        experts = [module for path, module in model.named_modules() if pattern.match(path)]
        divided = all(_divides_experts(module, ranks) for module in experts)
        if style == "ep_dispatch_experts" and experts and divided:
            plan[name] = "moe_tp_experts"
    return plan


def _divides_experts(experts: nn.Module, ranks: int) -> bool:
    """Return whether a module keeps experts as ``[num_experts, ...]``, and the ranks divide that number."""
    count = getattr(experts, "num_experts", None)
    weights = parameters_of(experts).values()
    if not isinstance(count, int):
        return count is None and not weights  # a module without experts of its own
    by_expert = all(value is not None and value.shape[:1] == (count,) for value in weights)
    return by_expert and count % ranks == 0


def check_heads(model: nn.Module, ranks: int, plan: Mapping[str, str]) -> None:
    """Refuse head counts that the tensor-parallel ranks do not divide, if the plan cuts heads."""
    config: Any = getattr(model, "config", None) or model_config(model)
    cuts_heads = any(
        style == "colwise" and name.rpartition(".")[2] not in _FEED_FORWARD for name, style in plan.items()
    )
    if config is None or not cuts_heads:
        return

    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int):
            advice = "Lower tensor_parallel_size and raise context_parallel_size or data_parallel_size."
            _require_divided(f"{type(model).__name__} has {name}={heads}", heads, ranks, advice)


def _name_of(model: Any, getter: str) -> str | None:
    """Return the name of the module that a model's method of this name returns, or None."""
    method = getattr(model, getter, None)
    wanted = None if method is None else method()
    return next((name for name, module in model.named_modules() if module is wanted), None)
