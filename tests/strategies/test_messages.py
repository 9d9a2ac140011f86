"""Messages of strategies that no other test of the room meets, on ranks that are pretended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torchmetrics import MeanMetric

from lightning_thd import Packs, Sequences, THDBatch, causal_lm_loss
from lightning_thd.parallel.pipeline.cut import cut_model
from lightning_thd.strategies.optimizer_states import complete_groups
from lightning_thd.strategies.pack_cut import BroadcastLoader
from tests.ranks import pretended_ranks
from tests.strategies.jobs import Job, Layout, data, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*no `val_dataloader`|.*does not have many workers")
STAGES = Layout(pp=2)


class Twice(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        return loss + causal_lm_loss(self.model, batch)


class Metric(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        self.log("metric", MeanMetric())
        return causal_lm_loss(self.model, batch)


class Nothing(Job):
    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float64, requires_grad=True)


class Manual(Job):
    def __init__(self, family: str) -> None:
        super().__init__(family)
        self.automatic_optimization = False


def fit(module: Job, train: Any = None, layout: Layout = STAGES, **options: Any) -> None:
    make_trainer(layout, gradient_clip_val=None, **options).fit(module, train or data(Sequences(12)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Manual, "by itself, which automatic_optimization=False would not see. Use automatic"),
        (Twice, r"training_step computed 2 losses of the model for a microbatch; pipeline stages run one"),
        (Nothing, r"training_step computed 0 losses of the model for a microbatch; pipeline stages run one"),
        (Metric, r"self.log\('metric', MeanMetric\) in training_step: only the last pipeline stage has the"),
    ],
)
def test_steps_that_stages_cannot_run(kind: type[Job], message: str) -> None:
    with pretended_ranks(2), pytest.raises((ValueError, MisconfigurationException), match=message):
        fit(kind("qwen3@4"))


def test_a_model_whose_last_step_was_broken_off() -> None:
    module = Twice("qwen3@4")
    with pretended_ranks(2):
        with pytest.raises(ValueError, match="computed 2 losses"):
            fit(module)
        with pytest.raises(ValueError, match="and its last step was broken off. Start a new job"):
            fit(module)


def test_batches_of_another_kind() -> None:
    loader = torch.utils.data.DataLoader([{"input_ids": torch.ones(1, 4)}] * 4, batch_size=None)
    with (
        pretended_ranks(2),
        pytest.raises(MisconfigurationException, match="the dataloader gave dict. Use THD"),
    ):
        fit(Job("qwen3@4"), loader)


class Tuples(nn.Module):
    """A layer that hands more than hidden states to the next."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> Any:
        return self.layer(hidden, **kwargs), hidden


def test_layers_that_return_more_than_hidden_states() -> None:
    module: Any = Job("qwen3@4")
    module.model.model.layers[1] = Tuples(module.model.model.layers[1])
    with (
        pretended_ranks(2),
        pytest.raises(ValueError, match="Tuples returns a tuple of Tensor, Tensor; wanted only the hidden"),
    ):
        fit(module)


class NoPositions(nn.Module):
    """Stands for BART's positions, which packs refuse."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_norm_that_runs_before_the_layers_and_was_registered_behind(rank: int) -> None:
    sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32}
    sizes |= {"encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "vocab_size": 64}
    config = transformers.BartConfig(is_decoder=True, is_encoder_decoder=False, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="thd")
    model.model.decoder.embed_positions = NoPositions()
    dtype = SimpleNamespace(rank=rank, ranks=2, dtype=lambda device: torch.float32)
    stage = cut_model(model, dtype)
    stage.begin(0)
    with pytest.raises(ValueError, match="BartDecoder runs layernorm_embedding before its layers"):
        causal_lm_loss(model, THDBatch.collate([{"input_ids": [1, 2, 3]}]))


def test_a_log_of_the_last_stage_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tell = dist.broadcast_object_list

    def last_stage_tells(message: list[Any], src: int | None = None, **kwargs: Any) -> None:
        if src == 1:
            message[0] = ([1.0] * 8, [{"theirs": 1.0}] * 8, [()] * 8, False)
        else:
            tell(message, src, **kwargs)

    monkeypatch.setattr(dist, "broadcast_object_list", last_stage_tells)
    with (
        pretended_ranks(2),
        pytest.raises(MisconfigurationException, match="logged 'theirs' in training_step and"),
    ):
        fit(Job("qwen3@4"), data(Packs(8)))


def test_degrees_of_a_plan_on_stages() -> None:
    dynamic = {"context_parallel_size": "dynamic", "max_context_parallel_size": 2}

    class Both(Layout):
        def make(self, family: str = "qwen3") -> Any:
            from lightning_thd import THDModelParallelStrategy

            return THDModelParallelStrategy(pipeline_parallel_size=2, **dynamic)

    with (
        pretended_ranks(4),
        pytest.raises(MisconfigurationException, match="='dynamic' with pipeline_parallel_"),
    ):
        fit(Job("qwen3@4"), layout=Both(dp=2, pp=2))


def test_checkpoints_of_other_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({}, path)
    with (
        pretended_ranks(2),
        pytest.raises(
            MisconfigurationException, match="is no checkpoint folder, and a pipeline loads only fol"
        ),
    ):
        make_trainer(STAGES, gradient_clip_val=None).fit(
            Job("qwen3@4"), data(Sequences(12)), ckpt_path=str(path)
        )

    def gather(found: list[Any], own: Any, group: Any = None) -> None:
        found[:] = [own, [*own, []]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with (
        pretended_ranks(2),
        pytest.raises(ValueError, match=r"has \[1, 2\] parameter groups on the stages of the"),
    ):
        complete_groups({"param_groups": [{"params": ["a"]}]}, dist.group.WORLD)


def test_a_broadcast_loader_has_what_its_own_has() -> None:
    class Batches(list[THDBatch]):
        epoch = 3

    with pretended_ranks(2):
        loader: Any = BroadcastLoader(Batches(), dist.group.WORLD)
        assert loader.epoch == 3
        assert not hasattr(loader, "__deepcopy__")
