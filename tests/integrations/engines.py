"""The same training in four integrations: Lightning, Accelerate, Fabric, Hugging Face's Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from transformers import TrainingArguments

from lightning_thd import Packs, Sequences, THDBatch, THDDataModule, causal_lm_loss, prepare_thd
from lightning_thd.integrations import PackedLoop, packed_trainer, prepare_fabric
from tests.tiny import quiet_trainer

ENGINES = ("lightning", "accelerate", "fabric", "trainer")
CLIP = 1.0
Seen = Callable[[int, tuple[int, ...]], None]  # called with the step and the sequences of every microbatch


def optimizer_of(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW, with an eps far above rounding noise, and a decaying learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-5)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


class Job:
    """A training job that every engine can run."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        samples: Any,
        *,
        capacity: int,
        step: Packs | Sequences,
        accumulate: int = 1,
        ranks: int = 1,
        steps: int,
        out: Path | None = None,
        save_every: int = 2,
        seen: Seen = lambda step, ids: None,
    ) -> None:
        self.make_model = make_model
        self.samples = samples
        self.capacity = capacity
        self.step = step
        self.accumulate = accumulate
        self.ranks = ranks
        self.steps = steps
        self.out = out
        self.save_every = save_every
        self.seen = seen

    def data(self) -> THDDataModule:
        return THDDataModule(self.samples, capacity=self.capacity, global_batch=self.step)

    def run(self, engine: str) -> tuple[dict[str, Tensor], list[float]]:
        """Train from the last checkpoint in ``out``, if any; return parameters and losses of the steps."""
        model, losses = getattr(self, f"_{engine}")()
        return {name: p.detach().clone() for name, p in model.named_parameters()}, losses

    def _lightning(self) -> tuple[nn.Module, list[float]]:
        job = self
        losses = []

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = job.make_model()

            def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
                job.seen(self.global_step, batch.sequence_ids)
                loss = causal_lm_loss(self.model, batch)
                self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
                shares.append(float(loss.detach()))
                return loss

            def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                super().optimizer_step(*args, **kwargs)
                losses.append(sum(shares) / len(shares))
                shares.clear()

            def configure_optimizers(self) -> Any:
                optimizer, schedule = optimizer_of(self.model)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        shares: list[float] = []
        callbacks = []
        if self.out is not None:
            folder = self.out / "lightning"
            callbacks.append(ModelCheckpoint(folder, every_n_train_steps=self.save_every, save_last=True))
        ours, lightnings = ("thd", "auto") if self.ranks == 1 else ("thd_ddp", "ddp")
        trainer = quiet_trainer(
            max_steps=self.steps,
            devices=self.ranks,
            strategy=ours if isinstance(self.step, Sequences) else lightnings,
            accumulate_grad_batches=self.accumulate,
            gradient_clip_val=CLIP,
            enable_checkpointing=bool(callbacks),
            callbacks=callbacks,
        )
        module = Module()
        resume = self.out is not None and (self.out / "lightning" / "last.ckpt").exists()
        trainer.fit(module, self.data(), ckpt_path="last" if resume else None)
        return module.model, losses

    def _accelerate(self) -> tuple[nn.Module, list[float]]:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=self.accumulate)
        model = self.make_model()
        loop = prepare_thd(accelerator, model, self.data(), *optimizer_of(model), peak=1e9)

        def clip() -> None:
            accelerator.clip_grad_norm_(loop.model.parameters(), CLIP)

        return model, self._loop("accelerate", loop, clip, accelerator.save_state, accelerator.load_state)

    def _fabric(self) -> tuple[nn.Module, list[float]]:
        ddp = self.ranks > 1
        fabric = L.Fabric(accelerator="cpu", devices=self.ranks, strategy="ddp" if ddp else "auto")
        fabric.launch()
        model = self.make_model()
        optimizer, schedule = optimizer_of(model)
        loop = prepare_fabric(fabric, model, self.data(), optimizer, accumulate=self.accumulate, peak=1e9)
        loop.scheduler = schedule
        state = {"model": loop.model, "optimizer": loop.optimizer, "loader": loop.loader, "loop": loop}
        state["scheduler"] = schedule

        def clip() -> None:
            fabric.clip_gradients(loop.model, loop.optimizer, max_norm=CLIP)

        def save(folder: str) -> None:
            fabric.save(f"{folder}/state.ckpt", state)

        return model, self._loop(
            "fabric", loop, clip, save, lambda folder: fabric.load(f"{folder}/state.ckpt", state)
        )

    def _trainer(self) -> tuple[nn.Module, list[float]]:
        assert isinstance(self.step, Packs), "a Hugging Face Trainer counts its steps in packs"
        job = self
        shares = []
        losses = []

        class Watched(packed_trainer()):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
                job.seen(self.state.global_step, inputs["batch"].sequence_ids)
                loss: Tensor = super().compute_loss(model, inputs, *args, **kwargs)
                shares.append(float(loss.detach()))
                if len(shares) == job.accumulate:
                    losses.append(sum(shares) / len(shares))
                    shares.clear()
                return loss

        model = self.make_model()
        arguments = TrainingArguments(
            output_dir=str((self.out or Path("runs")) / "trainer"),
            max_steps=self.steps,
            gradient_accumulation_steps=self.accumulate,
            max_grad_norm=CLIP,
            save_strategy="no" if self.out is None else "steps",
            save_steps=self.save_every,
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Watched(
            model=model,
            args=arguments,
            train_dataset=self.samples,
            optimizers=optimizer_of(model),
            capacity=self.capacity,
            peak=1e9,
        )
        last = self._last("trainer", "trainer_state.json")
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        return model, losses

    def _loop(
        self,
        engine: str,
        loop: PackedLoop,
        clip: Callable[[], None],
        save: Callable[[str], Any],
        load: Callable[[str], Any],
    ) -> list[float]:
        losses = []
        if (last := self._last(engine, "complete")) is not None:
            load(str(last))

        while loop.global_step < self.steps:
            for step in loop.loader:
                for batch in step.microbatches:
                    self.seen(loop.global_step, batch.sequence_ids)
                losses.append(float(loop.backward(step)))
                clip()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
                loop.scheduler.step()
                if self.out is not None and loop.global_step % self.save_every == 0:
                    folder = self.out / engine / f"checkpoint-{loop.global_step}"
                    _meet()
                    save(str(folder))
                    _meet()
                    (folder / "complete").touch()
                if loop.global_step == self.steps:
                    break

        return losses

    def _last(self, engine: str, whole: str) -> Path | None:
        """Return the newest complete checkpoint, one that has the file written last."""
        if self.out is None:
            return None
        checkpoints = [f for f in (self.out / engine).glob("checkpoint-*") if (f / whole).exists()]
        return max(checkpoints, key=lambda folder: int(folder.name.partition("-")[2]), default=None)


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()
