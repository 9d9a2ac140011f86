"""The same pipeline steps by this package's engine and by torch.distributed.pipelining: numbers, then time.

``python -m benchmarks.pipeline_engines`` cuts one model into as many stages for both engines and prints

1. how far loss and gradients are from one process, in fp64, with 1F1B and interleaved stages, on two and four
   gloo ranks, for Qwen3 and for a model with experts;
2. how many hidden states, or gradients of them, a rank of four holds when a step has ended;
3. seconds of a step on two ranks, wall and CPU, for three corpora, both engines in turn.

torch's engine wants microbatches of one shape, so its packs are padded to the capacity; a stage gets the
number of its microbatch, and looks the pack up. Ours runs packs as they are. Both cut at the same layers, so
that only the engine differs: passes, messages, padding. Four ranks on two cores would measure the cores, so
only two are timed. Ours runs in a Trainer, with its hooks and logs; torch's without one. Goals: torch's is
exact; ours holds no hidden states between steps, and has at least 0.9 times the speed of torch's.
"""

from __future__ import annotations

import argparse
import gc
import sysconfig
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning.pytorch as L
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from benchmarks import results
from benchmarks.context_balance import SHAPES
from lightning_thd import Packs, THDBatch, THDDataModule, THDModelParallelStrategy, causal_lm_loss
from lightning_thd.loss import fused_linear_logprobs
from lightning_thd.packing import PackPlanner
from tests.ranks import run_ranks

Schedule = Literal["1f1b", "interleaved"]
CAPACITY = 8_192
MICROBATCHES = 8
STEPS = 3  # timed, after one that is not
ROUNDS = 1
LAYERS = 8
HIDDEN = 64
VOCABULARY = 260


class Cut(NamedTuple):
    """A pipeline: its ranks, and how many stages each holds."""

    ranks: int
    stages_per_rank: int

    @property
    def stages(self) -> int:
        """Return the number of stages of all ranks."""
        return self.ranks * self.stages_per_rank

    def layers(self, stage: int, layers: int) -> range:
        """Return the layers of a stage; all stages have equally many."""
        each = layers // self.stages
        return range(stage * each, (stage + 1) * each)


# ---- models and packs, the same in every process


def model_of(family: str, dtype: torch.dtype) -> Any:
    """Build a model of eight layers, with weights that depend on nothing but the family."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HIDDEN // 4,
    }
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN}
        config: Any = transformers.Qwen3MoeConfig(**sizes, **experts)
    else:
        config = transformers.Qwen3Config(**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config,
        attn_implementation="thd",
        experts_implementation="eager",  # grouped_mm knows no fp64
    )
    return model.to(dtype).train()


def lengths_of(corpus: str, count: int) -> npt.NDArray[np.int64]:
    """Draw the lengths of a corpus: one of ``SHAPES``, or modules of Python's standard library, cut."""
    if corpus == "library":
        folder = Path(sysconfig.get_paths()["stdlib"])
        sizes = [file.stat().st_size for file in sorted(folder.glob("*.py"))]
        lengths: npt.NDArray[Any] = np.clip(np.resize(sizes, count), 2, CAPACITY)
    else:
        mean, sigma, low, high = SHAPES[corpus]
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), low, min(high, CAPACITY))
    return lengths.astype(np.int64)


def samples_of(lengths: Sequence[int]) -> list[dict[str, list[int]]]:
    """Make sequences of random tokens."""
    rng = np.random.default_rng(1)
    return [{"input_ids": rng.integers(0, VOCABULARY, int(length)).tolist()} for length in lengths]


def steps_of(
    lengths: npt.NDArray[np.int64],
    steps: int,
    *,
    capacity: int,
    pad: bool,
    microbatches: int = MICROBATCHES,
) -> list[list[THDBatch]]:
    """Make the packs of the first steps; all with the step's loss scale."""
    samples = samples_of(lengths.tolist())
    planner = PackPlanner(lengths, capacity, global_batch=Packs(microbatches))
    packed = []
    for k in range(steps):
        packs = planner.step(0, k, 1).indices_by_rank()[0]
        tokens = sum(len(samples[i]["input_ids"]) - 1 for pack in packs for i in pack)
        packed.append(
            [
                THDBatch.collate(
                    [samples[i] for i in pack],
                    pad_to=capacity if pad else None,
                    loss_scale=len(packs) / tokens,
                )
                for pack in packs
            ]
        )
    return packed


# ---- torch's engine


class CutModel(nn.Module):
    """The layers of one stage; the first begins with the embedding, the last returns the loss ``[1]``."""

    def __init__(self, model: Any, cut: Cut, stage: int) -> None:
        super().__init__()
        layers = model.model.layers
        self.is_first = stage == 0
        self.is_last = stage == cut.stages - 1
        self.embedding = model.model.embed_tokens if self.is_first else None
        self.head = model.lm_head if self.is_last else None
        self.decoder = model.model
        self.decoder.layers = nn.ModuleList(layers[i] for i in cut.layers(stage, len(layers)))
        self.decoder.config.num_hidden_layers = len(self.decoder.layers)
        self.decoder.embed_tokens = None
        if not self.is_last:
            self.decoder.norm = nn.Identity()
        self.batches: list[THDBatch] = []

    def forward(self, hidden: Tensor, *, number: Tensor) -> Tensor:
        """Run one microbatch; ``number`` is its place in the step, a host tensor ``[1]``."""
        batch = self.batches[int(number)]
        if self.embedding is not None:
            hidden = self.embedding(batch.input_ids)
        arguments = {name: value for name, value in batch.hf_kwargs().items() if name != "input_ids"}
        output: Tensor = self.decoder(inputs_embeds=hidden.view(1, -1, hidden.shape[-1]), **arguments)[0]
        if self.head is None:
            return output
        values = fused_linear_logprobs(output[0], self.head.weight, batch.targets.view(-1))
        return -values.logp.sum().view(1) * batch.loss_scale


class TorchEngine:
    """Runs steps through torch's schedule; one schedule, since every step has as many microbatches."""

    def __init__(
        self, models: list[Any], cut: Cut, rank: int, *, slots: int, microbatches: int = MICROBATCHES
    ) -> None:
        from torch.distributed import pipelining

        dtype = next(models[0].parameters()).dtype
        device = torch.device("cpu")
        self.rank, self.cut = rank, cut
        numbers = [rank + chunk * cut.ranks for chunk in range(cut.stages_per_rank)]
        self.parts = [CutModel(model, cut, number) for model, number in zip(models, numbers, strict=True)]
        stages: list[Any] = []
        for number, part in zip(numbers, self.parts, strict=True):
            states = torch.empty(1, slots, HIDDEN, dtype=dtype, device="meta", requires_grad=True)
            first_input = torch.empty(1, dtype=torch.int64, device="meta")
            loss = torch.empty(1, dtype=torch.promote_types(dtype, torch.float32), device="meta")
            stages.append(
                pipelining.PipelineStage(
                    part,
                    number,
                    cut.stages,
                    device,
                    input_args=first_input if number == 0 else states,
                    output_args=loss if part.is_last else states,
                )
            )
        if cut.stages_per_rank == 1:
            self.schedule: Any = pipelining.Schedule1F1B(
                stages[0], microbatches, loss_fn=_returned, scale_grads=False
            )
        else:
            self.schedule = pipelining.ScheduleInterleaved1F1B(
                stages, microbatches, loss_fn=_returned, scale_grads=False
            )
        self.numbers = torch.arange(microbatches)

    def step(self, batches: list[THDBatch]) -> float:
        """Run forward and backward of a step; return its loss on the last rank, 0 elsewhere."""
        for part in self.parts:
            part.batches = batches
        losses: list[Tensor] = []
        first = (self.numbers,) if self.rank == 0 else ()
        is_last = self.rank == self.cut.ranks - 1
        target = self.numbers if is_last else None
        self.schedule.step(*first, number=self.numbers, target=target, losses=losses, return_outputs=False)
        # Each microbatch's loss has the step's scale, which counts on a mean over microbatches.
        scale = 1 / len(self.numbers)
        for part in self.parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad *= scale
        return float(torch.stack(losses).mean()) if is_last else 0.0


def _returned(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def run_torch(
    rank: int,
    ranks: int,
    stages_per_rank: int,
    corpus: str,
    family: str = "qwen3",
    *,
    exact: bool = False,
) -> Any:
    """Run steps on one rank; return its seconds (wall and CPU) a step, or its loss and gradients."""
    warnings.simplefilter("ignore")
    cut = Cut(ranks, stages_per_rank)
    dtype = torch.float64 if exact else torch.float32
    capacity, steps = (64, 1) if exact else (CAPACITY, STEPS + 1)
    models = [model_of(family, dtype) for _ in range(stages_per_rank)]
    engine = TorchEngine(models, cut, rank, slots=capacity)
    lengths = exact_lengths() if exact else lengths_of(corpus, 4_000)
    seconds = []
    loss = 0.0
    for batches in steps_of(lengths, steps, capacity=capacity, pad=True):
        for part in engine.parts:
            part.zero_grad()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = engine.step(batches)
        seconds.append((time.perf_counter() - wall, time.process_time() - cpu))
    if not exact:
        return seconds[1:]
    gradients = {}
    for chunk, part in enumerate(engine.parts):
        places = cut.layers(rank + chunk * cut.ranks, LAYERS)
        for name, parameter in part.named_parameters():
            gradients[_whole_name(name, places)] = parameter.grad
    return loss, gradients


def count_of_torch(ranks: int, stages_per_rank: int, microbatches: int) -> int:
    """Run a step in fp64 on this rank; return how many hidden states it holds at the end."""
    warnings.simplefilter("ignore")
    models = [model_of("qwen3", torch.float64) for _ in range(stages_per_rank)]
    engine = TorchEngine(
        models, Cut(ranks, stages_per_rank), dist.get_rank(), slots=64, microbatches=microbatches
    )
    (batches,) = steps_of(exact_lengths(), 1, capacity=64, pad=True, microbatches=microbatches)
    engine.step(batches)
    return hidden_states()


def hidden_states() -> int:
    """Count the tensors of this process that have the shape of a microbatch's hidden states."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
    return sum(each.ndim == 3 and each.shape[0] == 1 and each.shape[2] == HIDDEN for each in tensors)


def exact_lengths() -> npt.NDArray[np.int64]:
    """Return lengths of few and short sequences, for runs in fp64."""
    return np.random.default_rng(0).integers(2, 40, 200)


def _whole_name(name: str, layers: range) -> str:
    """Turn a stage's name of a parameter into the whole model's."""
    head, _, rest = name.partition(".")
    if head == "embedding":
        return f"model.embed_tokens.{rest}"
    if head == "head":
        return f"lm_head.{rest}"
    parts = rest.split(".")
    if parts[0] == "layers":
        parts[1] = str(layers[int(parts[1])])
    return ".".join(["model", *parts])


# ---- ours


class Timed(L.LightningModule):
    """Trains a model and keeps the seconds of forward and backward passes of every step."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = model_of("qwen3", dtype)
        self.seconds: list[tuple[float, float]] = []
        self._began = (0.0, 0.0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin to measure once all ranks are here."""
        dist.barrier()
        self._began = (time.perf_counter(), time.process_time())

    def training_step(self, batch: THDBatch, batch_idx: int) -> Tensor:
        """Return the loss of a microbatch."""
        return causal_lm_loss(self.model, batch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop to measure: all backward passes have run."""
        wall, cpu = self._began
        self.seconds.append((time.perf_counter() - wall, time.process_time() - cpu))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer without state; its step is not measured."""
        return torch.optim.SGD(self.model.parameters(), lr=0.0)


def run_ours(rank: int, ranks: int, stages_per_rank: int, corpus: str) -> list[tuple[float, float]]:
    """Train on one rank; return its seconds (wall and CPU) of every step but the first."""
    warnings.simplefilter("ignore")
    module = Timed()
    samples = samples_of(lengths_of(corpus, 4_000).tolist())
    trainer = trainer_of(ranks, stages_per_rank)
    trainer.fit(module, THDDataModule(samples, capacity=CAPACITY, global_batch=Packs(MICROBATCHES)))
    return module.seconds[1:]


class Counted(Timed):
    """Counts the hidden states that a rank holds when a step has ended."""

    def __init__(self) -> None:
        super().__init__(torch.float64)
        self.held = -1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count."""
        self.held = hidden_states()


def count_of_ours(ranks: int, stages_per_rank: int, microbatches: int) -> int:
    """Train on this rank; return how many hidden states it holds at the end of a step."""
    warnings.simplefilter("ignore")
    module = Counted()
    samples = samples_of(exact_lengths().tolist())
    trainer = trainer_of(ranks, stages_per_rank, steps=1)
    trainer.fit(module, THDDataModule(samples, capacity=64, global_batch=Packs(microbatches)))
    return module.held


def trainer_of(ranks: int, stages_per_rank: int, steps: int = STEPS + 1) -> L.Trainer:
    """Make a Trainer of a pipeline whose stages have equally many layers."""
    each = LAYERS // (ranks * stages_per_rank)
    strategy = THDModelParallelStrategy(
        pipeline_parallel_size=ranks,
        pipeline_schedule="interleaved" if stages_per_rank > 1 else "1f1b",
        stages_per_rank=stages_per_rank,
        pipeline_split=[each] * (ranks * stages_per_rank),
    )
    return L.Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


# ---- what is printed


def compare_numbers() -> None:
    """Print how far torch's engine is from one process."""
    print(f"{'family':>10}{'schedule':>13}{'ranks':>7}{'loss off':>10}{'gradients off':>15}  (fp64)")
    worst = 0.0
    for family in ("qwen3", "qwen3_moe"):
        model = model_of(family, torch.float64)
        (batches,) = steps_of(exact_lengths(), 1, capacity=64, pad=False)
        loss: Any = torch.stack([causal_lm_loss(model, batch) for batch in batches]).mean()
        loss.backward()
        whole_loss = float(loss.detach())
        expected = {name: p.grad for name, p in model.named_parameters()}
        for ranks, stages_per_rank in ((2, 1), (2, 2), (4, 1), (4, 2)):
            found = run_ranks(run_exact, ranks, ranks, stages_per_rank, family, timeout_s=400.0)
            off = abs(found[-1][0] - whole_loss) / whole_loss
            gradients = {name: value for _, part in found for name, value in part.items()}
            missing = expected.keys() - gradients.keys()
            if missing:
                raise AssertionError(f"no rank has the gradients of {sorted(missing)[:4]}")
            error = max(
                float((gradients[name] - value).norm() / value.norm().clamp_min(1e-12))
                for name, value in expected.items()
                if value is not None
            )
            name = "interleaved" if stages_per_rank > 1 else "1f1b"
            print(f"{family:>10}{name:>13}{ranks:>7}{off:>10.1e}{error:>15.1e}")
            worst = max(worst, off, error)
    what = "torch's pipeline engine, loss and gradients off one process"
    results.less(what, worst, "", 1e-9, precision="fp64")


def compare_memory() -> None:
    """Print how many hidden states, and gradients of them, the fullest of four ranks holds after a step."""
    print(f"\n{'schedule':>13}{'microbatches':>14}{'ours':>6}{'torch':>7}  hidden states held after a step")
    for stages_per_rank, name in ((1, "1f1b"), (2, "interleaved")):
        for microbatches in (8, 32):
            case = (4, stages_per_rank, microbatches)
            ours = max(run_ranks(count_of_ours, 4, *case, timeout_s=400.0))
            theirs = max(run_ranks(count_of_torch, 4, *case, timeout_s=400.0))
            print(f"{name:>13}{microbatches:>14}{ours:>6}{theirs:>7}")
            what = f"hidden states held after a step of {microbatches} microbatches, {name}"
            results.less(what, ours, "", 0, peer=theirs)


def run_exact(ranks: int, stages_per_rank: int, family: str) -> Any:
    """Run one step in fp64 on this rank."""
    return run_torch(dist.get_rank(), ranks, stages_per_rank, "", family, exact=True)


def time_torch(ranks: int, stages_per_rank: int, corpus: str) -> Any:
    """Time torch's engine on this rank."""
    return run_torch(dist.get_rank(), ranks, stages_per_rank, corpus)


def time_ours(ranks: int, stages_per_rank: int, corpus: str) -> Any:
    """Time our engine on this rank."""
    return run_ours(dist.get_rank(), ranks, stages_per_rank, corpus)


def compare_times() -> None:
    """Print seconds of a step of both engines, in turn."""
    print(
        f"\n{'corpus':>9}{'schedule':>13}{'fill':>7}{'ours s':>9}{'torch s':>9}{'ratio':>8}{'CPU ratio':>11}"
    )
    for corpus in ("library", "long", "chat"):
        steps = steps_of(lengths_of(corpus, 4_000), STEPS + 1, capacity=CAPACITY, pad=False)
        slots = [batch.stats.slots for step in steps for batch in step]
        fill = sum(slots) / (len(slots) * CAPACITY)
        for stages_per_rank in (1, 2):
            ours, theirs = [], []
            for _ in range(ROUNDS):
                ours += _slowest(run_ranks(time_ours, 2, 2, stages_per_rank, corpus, timeout_s=900.0))
                theirs += _slowest(run_ranks(time_torch, 2, 2, stages_per_rank, corpus, timeout_s=900.0))
            (wall, cpu), (their_wall, their_cpu) = np.median(ours, 0), np.median(theirs, 0)
            name = "interleaved" if stages_per_rank > 1 else "1f1b"
            ratio, cpu_ratio = their_wall / wall, their_cpu / cpu
            print(
                f"{corpus:>9}{name:>13}{fill:>7.1%}{wall:>9.2f}{their_wall:>9.2f}{ratio:>8.3f}{cpu_ratio:>11.3f}"
            )
            what = f"step of {MICROBATCHES} packs, {corpus}, {name}"
            results.faster(what, wall, their_wall, "s", 0.9, precision="fp32")


def _slowest(found: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Return each step's wall seconds of the slowest rank, and the CPU seconds of all ranks."""
    each = np.array(found)  # [ranks, steps, 2]
    return list(zip(each[..., 0].max(0), each[..., 1].sum(0), strict=True))


def main(argv: list[str] | None = None) -> None:
    """Compare both engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--numbers", action="store_true", help="errors and memory, but not the time")
    args = parser.parse_args(argv)
    compare_numbers()
    compare_memory()
    if not args.numbers:
        compare_times()


if __name__ == "__main__":
    main()
