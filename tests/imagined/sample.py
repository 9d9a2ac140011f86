"""What steps on a GPU do, asserted: devices, one upload, no read, the CPU's numbers; a script.

Arguments: ``sample`` or a precision, and the compute capability, such as ``9.0``.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from lightning_thd import Sequences, THDBatch, THDDataModule, THDThroughputMonitor, causal_lm_loss
from lightning_thd.batch import THDStep
from lightning_thd.boundaries import Boundaries
from lightning_thd.callbacks import ExpertBias
from lightning_thd.callbacks.cuda_graph import Bucket, GraphedStep, make_buckets
from lightning_thd.cuda_graph.buckets import StaticInputs
from lightning_thd.integrations.hf_evaluation import Rows
from lightning_thd.integrations.hf_rows import _as_rows, _packed
from lightning_thd.integrations.packed_loop import mean_loss
from lightning_thd.loss.rollouts import PackedRollouts
from lightning_thd.models.probe import random_pack
from lightning_thd.module import CausalLMModule
from lightning_thd.precision import fastest_precision
from tests.imagined.gpu import data, imagined_gpu
from tests.loss.cases import CONFIG
from tests.models.families import build
from tests.tiny import quiet_trainer

DATASET = [{"input_ids": list(f"document {i} ".encode()) * (1 + i % 9)} for i in range(200)]
LENGTHS = (200, 1, 100, 57)
STEPS = 4
# bytes: ids and targets of 4 each, and offsets; three int64 a token before
MOST_BYTES_A_TOKEN = 12


def make_model(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG, attn_implementation="thd").to(dtype).train()


def batches() -> dict[str, THDBatch]:
    """Batches of all kinds: plain, with labels, weighted, M-RoPE with extras, odd positions, no samples."""
    plain = [{"input_ids": list(range(n))} for n in LENGTHS]
    learned = [{"input_ids": [*range(n)], "labels": [-100] * (n // 2) + [*range(n // 2, n)]} for n in LENGTHS]
    shifted = [{"input_ids": [*range(n)], "position_ids": [*range(3, n + 3)]} for n in LENGTHS]
    image = {"pixel_values": torch.randn(16, 6), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    positions = [torch.arange(n).expand(3, n) + 2 for n in LENGTHS]
    vision = [{**row, **image, "position_ids": at} for row, at in zip(plain, positions, strict=True)]
    return {
        "plain": THDBatch.collate(plain),
        "labels": THDBatch.collate(learned, pad_to=400),
        "weights": THDBatch.collate([{**row, "weights": 0.5} for row in plain]),
        "vision": THDBatch.collate(vision),
        "shifted positions": THDBatch.collate(shifted),
        "nothing": THDBatch.collate([]),
    }


def check_uploads(log: Any) -> None:
    """Every batch arrives as it was, by one copy from pinned memory, loader or not."""
    for inference in (False, True):  # in which tensors hide that they were written to
        with torch.inference_mode(inference):
            changing = batches()["labels"].pin_memory()
            changing.targets.fill_(7)  # as a hook before the transfer may
            there = changing.to("cuda")
            assert set(data(there.targets).tolist()) == {7}
        assert (there.max_targets is None) is not inference  # more than were counted when they were collated

    step = THDStep([batches()["plain"], batches()["labels"]])
    assert step.pin_memory() is step
    assert step.microbatches[1].step == (step, 1)
    assert step.to("cuda") is not step

    mixed = batches()["plain"].replace(extras={"soft": torch.ones(3, requires_grad=True)})
    assert mixed.replace(position_ids=mixed.position_ids.cuda()).to("cuda").extras["soft"].requires_grad

    for name, batch in batches().items():
        for sent in (batch, batch.pin_memory()):
            log.uploads.clear()
            log.reads.clear()
            there = sent.to("cuda")
            (upload,) = log.uploads
            assert upload[2:4] == (True, True), (name, upload)
            assert not log.reads, (name, log.reads)
            if name in ("plain", "labels"):
                assert upload[1] <= MOST_BYTES_A_TOKEN * batch.stats.slots, (name, upload)
            fields = [name for name in THDBatch.__slots__ if name != "boundaries"]
            both = [(name, getattr(batch, name), getattr(there, name)) for name in fields]
            ours = batch.boundaries
            theirs = there.boundaries
            both += [(name, x, theirs.tensors()[name]) for name, x in ours.tensors().items()]
            host = ("slots", "longest", "max_seqlen", "lengths", "sequence_lengths")
            both += [(name, getattr(ours, name), getattr(theirs, name)) for name in host]
            both += [(k, batch.extras[k], there.extras[k]) for k in batch.extras]
            for field, a, b in both:
                if isinstance(a, torch.Tensor):
                    assert b.is_cuda, (name, field)
                    assert a.dtype == b.dtype, (name, field)
                    assert torch.equal(a, data(b)), (name, field)
                elif field != "extras":
                    assert a == b, (name, field)
            assert not log.reads, (name, log.reads)


def check_offsets(log: Any) -> None:
    """Boundaries know the lengths that they were made of; offsets alone are read once."""
    ours = Boundaries.from_lengths([3, 5], device="cuda")
    others = Boundaries(offsets=ours.offsets, slots=8, max_seqlen=5)
    log.reads.clear()
    assert ours.lengths == (3, 5)
    assert not log.reads
    assert others.lengths == others.lengths == (3, 5)
    assert len(log.reads) == 1, log.reads


class Copies(TorchDispatchMode):
    """Counts the operators that run, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def check_static_inputs() -> None:
    """A captured step's buffers are filled by one copy, or from separate tensors, with the same content."""
    for name, batch in batches().items():
        there = batch.to("cuda")
        axes = 3 if there.position_ids.ndim == 2 else None
        for slots in (400, 512):
            bucket = Bucket(slots=slots, sequences=8, max_seqlen=256)
            options: Any = {"axes": axes, "scale_dtype": torch.float32, "longest": 200}
            inputs = StaticInputs(bucket, torch.device("cuda"), **options)
            results = []
            for sent in (there, there.replace()):
                inputs.fill(inputs.dummy())
                with Copies() as ran:
                    inputs.fill(sent)
                one = sent is there and not batch.extras  # which no captured step takes: there may be no room
                assert len(ran.names) == 1 if one else len(ran.names) <= 6, (name, ran.names)
                inputs.unpack()
                static = inputs.batch
                offsets = (static.cu_seqlens, static.cu_seqlens_padded)
                rows = (static.input_ids, static.targets, static.position_ids, static.loss_scale)
                results.append([data(x).clone() for x in (*rows, *offsets)])
            assert all(map(torch.equal, *results)), name

    written = batches()["plain"].to("cuda")
    assert written.buffer() is not None

    written.targets.fill_(7)
    assert written.buffer() is None


def check_whole_sets(log: Any) -> None:
    """An evaluation reads once, also the rows that become a pack with shared prefixes."""
    model = make_model().cuda()
    sets = [batches()[name] for name in ("plain", "labels", "nothing")]
    log.reads.clear()
    mean_loss(causal_lm_loss, model, sets, device=torch.device("cuda"))

    assert len(log.reads) == 1, log.reads
    written = sets[1].to("cuda")
    written.targets.fill_(7)
    causal_lm_loss(model, written)  # more targets than were counted when it was collated
    log.reads.clear()
    with torch.no_grad():
        Rows(None, inputs=True).add(model, sets[0].to("cuda"))

    assert len(log.reads) == 3, log.reads  # logits, labels and ids
    rows = torch.ones(3, 8, dtype=torch.int64, device="cuda")
    model._thd_shares_prefixes = True
    log.reads.clear()
    _packed(model, rows, rows, rows, {})
    _as_rows(torch.ones(24, device="cuda", requires_grad=True), rows).sum().backward()

    assert len(log.reads) == 1, log.reads


def check_module(log: Any) -> None:
    """Our module, and experts balanced by biases, read nothing between logs."""
    model = build("deepseek_v3", "thd").train()
    model.set_experts_implementation("batched_mm")  # in fp32 torch reads the offsets of a grouped one
    rows = [{"input_ids": [7 + i % 50] * (1 + i % 9)} for i in range(200)]
    trainer = quiet_trainer(accelerator="gpu", max_steps=STEPS, callbacks=[ExpertBias()])
    log.clear()
    start = log.step
    trainer.fit(CausalLMModule(model), THDDataModule(rows, capacity=64))
    reads = [r for r, at in zip(log.reads, log.read_steps, strict=True) if start + 1 < at < start + STEPS]
    assert not reads, reads


def check_precisions() -> None:
    """The fastest precision of a device is a fact of its tensor cores."""
    for capability, expected in (((9, 0), "bf16-mixed"), ((7, 5), "16-mixed"), ((6, 1), "32-true")):
        with imagined_gpu(capability=capability):
            assert fastest_precision() == expected, capability
            assert fastest_precision("cpu") == "32-true"


def check_second_device() -> None:
    """A step is captured on streams of its own device, whichever is current."""
    with imagined_gpu(devices=2):
        step = GraphedStep(causal_lm_loss, make_model().to("cuda:1"), buckets=make_buckets((8,), slots=512))
        step(batches()["plain"].to("cuda:1"))
        assert step._subject.backend._side().device_index == 1  # type: ignore[attr-defined]


class Module(L.LightningModule):
    """The README's model in small; keeps its losses where they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = make_model(dtype)
        self.losses = list[torch.Tensor]()

    def training_step(self, batch: THDBatch, batch_idx: int) -> torch.Tensor:
        loss = causal_lm_loss(self.model, batch)
        self.losses.append(loss.detach())
        self.log("train/loss", loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-4)


def train(precision: str, accelerator: str) -> list[float]:
    """Return the losses of all microbatches; on the GPU after asserting what a step reads and uploads."""
    dtype = torch.float64 if precision == "64-true" else torch.float32
    module = Module(dtype)
    trainer = quiet_trainer(
        accelerator=accelerator,
        devices=1,
        strategy="thd",
        precision=precision,
        max_steps=STEPS,
        callbacks=[THDThroughputMonitor(peak=1e12, every_n_steps=100)],
        log_every_n_steps=100,
        gradient_clip_val=1.0,
    )
    trainer.fit(module, THDDataModule(DATASET, capacity=512, global_batch=Sequences(16)))
    return [float(data(loss)) if loss.is_cuda else float(loss) for loss in module.losses]


def check_training(log: Any, precision: str) -> None:
    """The CPU's losses, no read by our code, one pinned upload a microbatch."""
    expected = train(precision, "cpu")
    log.clear()
    start = log.step
    results = train(precision, "gpu")

    assert len(results) == len(expected) > STEPS
    away = max(abs(a - b) / b for a, b in zip(results, expected, strict=True))
    rounding = {"32-true": 1e-6, "64-true": 1e-9, "bf16-true": 2e-2}.get(precision, 5e-3)

    assert away < rounding, (precision, away, results, expected)
    reads = [r for r, at in zip(log.reads, log.read_steps, strict=True) if start + 1 < at < start + STEPS]
    scaler = ("item", "optimizer_step") if precision == "16-mixed" else None  # torch's GradScaler reads
    ours = [read for read in reads if scaler is None or any(word not in str(read) for word in scaler)]

    assert not ours, ours
    sent = [u for u in log.uploads if "batch/upload" in str(u[-1])]
    # fp64 runs on the portable kernel, which sends its own tables of the batch.
    assert len(sent) == len(results) * (1 + (precision == "64-true")), (len(sent), len(results))
    assert all(upload[2:4] == (True, True) for upload in sent)

    sys.stdout.write(f"{precision}: {len(results)} microbatches, {away:.1e} from the CPU's losses\n")


def main() -> None:
    warnings.simplefilter("ignore")
    what = sys.argv[1]
    if what == "sample":
        check_precisions()
        check_second_device()

    with imagined_gpu(capability=tuple(map(int, sys.argv[2].split(".")))) as log:
        if what == "sample":
            check_uploads(log)
            check_offsets(log)
            check_static_inputs()
            check_whole_sets(log)
            with torch.device("cuda"):  # a script's default device
                random_pack(make_model(), None, (5, 9), 0)
                PackedRollouts.from_padded(*torch.ones(2, 2, 9, dtype=torch.int64))
                check_module(log)
        check_training(log, "bf16-mixed" if what == "sample" else what)


if __name__ == "__main__":
    main()
