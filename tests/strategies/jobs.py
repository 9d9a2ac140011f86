"""A training job of any family and layout, and the same job by hand: one process, every sequence alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, causal_lm_loss
from lightning_thd.alignment import Alignment
from lightning_thd.packing import PackPlanner
from lightning_thd.parallel.experts import require_dispatch
from lightning_thd.strategies import THDDDPStrategy, THDModelParallelStrategy
from tests.models.families import FAMILIES
from tests.oracles import kept
from tests.tiny import largest_error, planned, quiet_trainer, sequences, train_alone

CAPACITY = 64
STEPS = 3
CLIP = 0.5
_EMBEDDING = "model.embed_tokens.weight"
# tp and ulysses over 4 ranks want 4 key-value heads; vocabulary and widths divide by 4 everywhere.
INTERLEAVED = {"pipeline_schedule": "interleaved", "stages_per_rank": 2}
# lfm2 comes without a plan for its layers; its short convolutions stay whole.
LFM2_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "lm_head": "colwise_gather_output",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.q_layernorm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.k_layernorm": "replicated_with_grad_allreduce",
    "model.layers.*.self_attn.out_proj": "rowwise",
    "model.layers.*.feed_forward.w1": "colwise",
    "model.layers.*.feed_forward.w3": "colwise",
    "model.layers.*.feed_forward.w2": "rowwise",
}
_WIDE = {"num_key_value_heads": 4, "num_attention_heads": 8, "hidden_size": 64, "head_dim": 8}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The ranks and options a job runs on, in plain values that can be sent to ranks."""

    strategy: str = "thd_model_parallel"
    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def align(self) -> Alignment | None:
        sequence_parallel = self.options.get("sequence_parallel", False)
        if self.cp == 1 and not sequence_parallel:
            return None
        return Alignment.for_(
            cp=self.cp,
            tp=self.tp,
            sequence_parallel=sequence_parallel,
            layout=self.options.get("context_parallel_layout", "dual_chunk"),
        )

    def make(self, family: str = "qwen3") -> Any:
        if self.strategy == "thd_ddp":
            return THDDDPStrategy(context_parallel_size=self.cp, **self.options)
        return THDModelParallelStrategy(
            context_parallel_size=self.cp,
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            tensor_parallel_plan=LFM2_PLAN if family.startswith("lfm2") and self.tp > 1 else None,
            **self.options,
        )


def missing_dispatch() -> str | None:
    """Return why this release of transformers cannot send tokens to experts of other ranks, or None."""
    try:
        require_dispatch()
    except ValueError as error:
        return str(error)
    return None


needs_dispatch = pytest.mark.skipif(missing_dispatch() is not None, reason=str(missing_dispatch()))


# Family, layout, step and dtype of a job.
Run: TypeAlias = tuple[str, Layout, Packs | Sequences, torch.dtype]


def family_model(family: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a family with the same weights in every process."""
    family, _, depth = family.partition("@")
    chosen = FAMILIES[family]
    arguments = {**chosen.arguments, **({} if chosen.kind == "ssm" else _WIDE)}

    if depth:
        arguments |= {"num_hidden_layers": int(depth.rstrip("t")), "tie_word_embeddings": depth[-1] == "t"}
        kinds = arguments.get("layer_types")
        if kinds is not None:
            arguments["layer_types"] = (kinds * int(depth.rstrip("t")))[: int(depth.rstrip("t"))]

    config = getattr(transformers, chosen.config)(**arguments)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config,
        attn_implementation="thd",
        experts_implementation="eager",  # grouped_mm knows no fp64
    )
    return model.to(dtype).train()


class Job(L.LightningModule):
    """A module trained by AdamW with a large eps, which does not amplify rounding."""

    def __init__(self, family: str = "qwen3", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.model = family_model(family, dtype)
        self.losses: list[float] = []
        self.microbatches = 0
        self.real_tokens: list[int] = []

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        self.microbatches += 1
        self.real_tokens.append(batch.stats.real_tokens)
        loss = causal_lm_loss(self.model, batch)
        self.log("train/loss", loss.detach(), sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: THDBatch, batch_idx: int) -> None:
        self.log("val/loss", causal_lm_loss(self.model, batch), sync_dist=True)

    def predict_step(self, batch: THDBatch, batch_idx: int) -> list[tuple[int, Tensor]]:
        logits = self.model(**batch.hf_kwargs()).logits
        return list(zip(batch.sequence_ids, batch.unpack(logits), strict=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self.model)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


def make_trainer(layout: Layout, family: str = "qwen3", **kwargs: Any) -> L.Trainer:
    defaults = {"max_steps": STEPS, "gradient_clip_val": CLIP, "log_every_n_steps": 1}
    strategy = kwargs.pop("strategy", None) or layout.make(family)
    return quiet_trainer(strategy=strategy, **{**defaults, "devices": layout.world, **kwargs})


def data(step: Packs | Sequences, **kwargs: Any) -> THDDataModule:
    return THDDataModule(sequences(80, labels=True), capacity=CAPACITY, global_batch=step, **kwargs)


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter whole, however it is cut; a collective."""
    parameters = {}
    for name, parameter in model.named_parameters():
        value: Any = parameter.detach()
        parameters[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return parameters


def check_stages(found: Sequence[dict[str, Any]], wanted: dict[str, Any], tolerance: float = 1e-10) -> float:
    """Compare all ranks of a pipeline with one process; returns the largest relative error of a weight."""
    seen: set[str] = set()
    worst = 0.0

    for rank in found:
        names = {
            name: name if name in wanted["params"] else _EMBEDDING for name in rank["params"]
        }  # a tied head
        of_stage = {names[name]: value for name, value in rank["params"].items()}
        worst = max(worst, largest_error(of_stage, {name: wanted["params"][name] for name in of_stage}))
        seen |= set(of_stage)
        for kind in {"losses", "norms"} & wanted.keys():
            assert rank[kind] == pytest.approx(wanted[kind], rel=tolerance)
        if "logged" in rank:  # Lightning keeps logs in fp32
            assert rank["logged"] == pytest.approx(wanted["losses"][-1], rel=1e-6)

    assert seen == set(wanted["params"])
    assert worst < tolerance

    return worst


def strict_warnings() -> None:
    """Make warnings errors on this rank, as in the suite; with NCCL, torch has some of its own."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return
    warnings.simplefilter("error")
    # As in setup.cfg: Lightning's advice about tiny runs, and what it calls that torch deprecates.
    advice = (
        ".*does not have many workers|.*no `val_dataloader`|.*isinstance.treespec|.*exists and is not empty"
        "|GPU available but not used"
    )
    warnings.filterwarnings("ignore", message=advice)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|lightning\\.fabric")


def train(
    family: str,
    layout: Layout,
    step: Packs | Sequences,
    dtype: torch.dtype = torch.float64,
    trainer_options: dict[str, Any] | None = None,
    kind: type[Job] = Job,
) -> dict[str, Any]:
    """Train on this rank and return whole parameters and the mean losses of all ranks."""
    strict_warnings()
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    accumulate = step.n // layout.dp if isinstance(step, Packs) and layout.pp == 1 else 1
    module = kind(family, dtype)
    trainer = make_trainer(layout, family, accumulate_grad_batches=accumulate, **(trainer_options or {}))
    trainer.fit(module, data(step))
    losses = torch.tensor(module.losses, dtype=torch.float64, device=trainer.strategy.root_device)

    if dist.is_initialized():
        dist.all_reduce(losses)
        losses /= dist.get_world_size()

    return {
        "params": full_parameters(module.model),
        "losses": (losses.view(-1, accumulate).sum(1)).tolist(),
        "steps": trainer.global_step,
        "microbatches": module.microbatches,
        "real_tokens": module.real_tokens,
        "logged": float(trainer.callback_metrics["train/loss"]),
    }


def train_all(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Run several jobs on the same ranks, which take longer to start than to train."""
    return [train(*run) for run in runs]


def train_by_hand(
    family: str,
    layout: Layout,
    step: Packs | Sequences,
    dtype: torch.dtype = torch.float64,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Train without packs or ranks on the mean over all loss tokens of a step: the oracle."""
    samples = sequences(80, labels=True)
    planner = PackPlanner(
        [len(s["input_ids"]) for s in samples], CAPACITY, global_batch=step, align=layout.align
    )
    model = family_model(family, dtype)

    def run_alone() -> dict[str, Any]:
        batches = ([samples[i] for i in ids] for ids in planned(planner, steps, layout.dp))
        params, losses = train_alone(model, batches, make_optimizer(model), clip=CLIP)
        return {"params": params, "losses": losses}

    name = f"job {family}, {step}, dp {layout.dp}, {layout.align}, {steps} steps"
    return kept(name, model.state_dict(), run_alone)
