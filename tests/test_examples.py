"""Every example runs, for a step or two on small packs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import EXAMPLES, run_python, smaller_examples

ARGUMENTS = {
    "quickstart.py": None,  # tests/test_quickstart.py
    "parallel.py": None,  # tests/strategies
    "ray_train.py": None,  # tests/integrations/test_ray.py
    "slurm_streams.py": ["--steps", "2", "--out", "{out}", "--scratch", "{out}"],  # and tests/strategies
    "accelerate_loop.py": ["--steps", "1", "--out", "{out}"],
    "chat_sft.py": ["--steps", "1"],
    "classification.py": ["--steps", "1", "--out", "{out}"],
    "embeddings.py": ["--steps", "2"],
    "distillation.py": ["--steps", "2"],
    "fabric_loop.py": ["--steps", "1", "--out", "{out}"],
    "grpo.py": ["--steps", "2"],
    "hf_trainer.py": ["--steps", "1", "--out", "{out}"],
    "hybrid_mamba.py": ["--steps", "2"],
    "one_step_by_hand.py": [],
    "own_module.py": ["--steps", "2"],
    "preference.py": ["--steps", "2"],
    "rl_logprobs.py": [],
    "fp8.py": ["--steps", "3"],
    "trl_lora_chat.py": ["--steps", "1", "--out", "{out}"],
    "vision_chat.py": ["--steps", "1"],
    "vision_language.py": ["--steps", "1"],
}


def test_every_example_is_listed() -> None:
    files = {file.name for file in EXAMPLES.glob("*.py")}
    assert files <= set(ARGUMENTS)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smaller_examples(tmp_path_factory.mktemp("examples"))


SLOW = {"hybrid_mamba.py", "fabric_loop.py", "vision_language.py", "distillation.py", "fp8.py"}
NAMES = [name for name, arguments in ARGUMENTS.items() if arguments is not None]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in NAMES]
)
def test_example_runs(name: str, smaller: Path, tmp_path: Path) -> None:
    arguments = [text.format(out=tmp_path) for text in ARGUMENTS[name] or []]
    run_python(smaller / name, *arguments, cwd=tmp_path, timeout_s=500)
