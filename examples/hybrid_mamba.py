"""A state-space hybrid on packs: no document passes its state to the next, with or without fused kernels.

python examples/hybrid_mamba.py
"""

import argparse

import lightning as L
from transformers import AutoModelForCausalLM, BambaConfig

from lightning_thd import THDDataModule, THDThroughputMonitor, check_packing
from lightning_thd.callbacks import PackingCheck
from lightning_thd.data import ByteTokenizer, StdlibText
from lightning_thd.module import CausalLMModule
from lightning_thd.precision import fastest_precision


def make_hybrid() -> AutoModelForCausalLM:
    config = BambaConfig(
        num_hidden_layers=2,
        attn_layer_indices=[1],  # layer 0 is Mamba2, layer 1 attention
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_expand=2,
        vocab_size=ByteTokenizer.vocab_size,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="thd").train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    print(check_packing(make_hybrid()))  # raises and names the layer if one document sees another
    trainer = L.Trainer(
        max_steps=args.steps,
        precision=fastest_precision(),  # bf16-mixed on a GPU that has it
        callbacks=[THDThroughputMonitor(), PackingCheck()],
        log_every_n_steps=5,
    )
    trainer.fit(
        CausalLMModule(make_hybrid(), lr=1e-3), THDDataModule(StdlibText(max_bytes=512), capacity=2_048)
    )


if __name__ == "__main__":
    main()
