"""The package as a Python has it installed -> four stories of a user, run in an empty folder.

    python -m tests.wheel --python .venv-wheel/bin/python [--overlay DIR]

The README's example, examples/quickstart.yaml, the monitor without packs, and ``packed_trainer`` around
transformers' and TRL's trainers with the configs that they have by default. It needs no package by itself.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TWO_STEPS = """
import lightning as L

full = L.Trainer
L.Trainer = lambda **given: full(**{**given, "max_steps": min(2, given["max_steps"]), "accelerator": "cpu"})
"""
CHECK = """
import lightning_thd

assert trainer.global_step == 2, trainer.global_step
print(lightning_thd.__file__)
"""
MONITOR = """
import lightning as L
import torch
from lightning_thd import THDThroughputMonitor

mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
rows = [{"input_ids": torch.ones_like(mask), "attention_mask": mask}] * 4


class Padded(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10))

    def training_step(self, batch, batch_idx):
        return self.model(batch["input_ids"]).logsumexp(-1).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


monitor = THDThroughputMonitor(peak=1e12, every_n_steps=2)
off = {"logger": False, "enable_checkpointing": False}
trainer = L.Trainer(max_steps=4, callbacks=[monitor], accelerator="cpu", **off)
trainer.fit(Padded(), torch.utils.data.DataLoader(rows, batch_size=None))
assert round(monitor.latest["train/packing/fill"], 3) == 0.667
import lightning_thd

print(lightning_thd.__file__)
"""
TRAINERS = """
import datasets
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
import lightning_thd
from lightning_thd.integrations import packed_trainer

words = {word: i for i, word in enumerate(["<pad>", "<eos>", "a", "pack", "of", "documents"])}
inner = Tokenizer(models.WordLevel(words, unk_token="a"))
inner.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
sizes = {"vocab_size": 6, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
data = datasets.Dataset.from_list([{"text": "a pack of documents " * (1 + i % 5)} for i in range(40)])
ids = data.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"])


def model():
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd")


own = {"output_dir": "out", "max_steps": 2, "use_cpu": True, "report_to": []}
plain = packed_trainer()(
    model=model(), args=transformers.TrainingArguments(**own), train_dataset=ids, capacity=64
)
tuned = packed_trainer(trl.SFTTrainer)(
    model=model(), args=trl.SFTConfig(**own), train_dataset=data, processing_class=tokenizer, capacity=64
)
for trainer in (plain, tuned):
    trainer.train()
    assert trainer.state.global_step == 2
print(lightning_thd.__file__)
"""


def stories() -> dict[str, list[str]]:
    """Return each story's name and the arguments of Python that run it."""
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)
    assert block is not None
    quick = (ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8")
    Path("quickstart.yaml").write_text(quick, encoding="utf-8")
    short = ["--trainer.max_steps", "2", "--trainer.accelerator", "cpu"]
    command = (
        "import lightning_thd; from lightning_thd.cli import main; main(); print(lightning_thd.__file__)"
    )
    return {
        "README": ["-c", TWO_STEPS + block[1] + CHECK],
        "quickstart.yaml": ["-c", command, "fit", "--config", "quickstart.yaml", *short],
        "monitor without packs": ["-c", MONITOR],
        "packed_trainer": ["-c", TRAINERS],
    }


def main(words: list[str]) -> int:
    """Run the stories, print one line for each, and return how many failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument(
        "--overlay", action="append", default=[], help="a folder of packages before the others"
    )
    arguments = parser.parse_args(words)
    python = str(Path(arguments.python).absolute())
    overlays = [str(Path(overlay).resolve()) for overlay in arguments.overlay]
    environment = {**os.environ, "PYTHONPATH": ":".join(overlays), "PYTHONSAFEPATH": "1"}
    failed = 0

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, command in stories().items():
            began = time.monotonic()
            done = subprocess.run(
                [python, *command], env=environment, capture_output=True, text=True, check=False
            )
            package = (done.stdout.split() or [""])[-1]
            if done.returncode == 0 and package.startswith(str(ROOT)) and ".venv" not in package:
                raise SystemExit(f"{name} ran the package of this checkout, {package}.")
            print(f"{name}: {'failed' if done.returncode else 'ran'} in {time.monotonic() - began:.0f} s")
            if done.returncode:
                print(done.stdout[-2000:], done.stderr[-4000:])
                failed += 1
        os.chdir(ROOT)

    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
