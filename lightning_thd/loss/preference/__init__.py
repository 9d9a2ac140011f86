"""Log-probabilities of responses -> preference losses of pairs, or of responses liked or not.

P pairs, N responses, S sequences, T slots. Everything takes one number a response, as
``PackedRollouts.sequence_logprobs`` or ``sequence_sums`` give it; with the chosen responses in the first half
of the rows and the rejected ones in the second, ``chosen, rejected = logps.chunk(2)``. A loss is the mean
over its pairs; for a step of several microbatches or ranks, pass ``scale``, ranks x microbatches / the pairs
of the whole step, and their mean is exact whatever the packing.
"""

from lightning_thd.loss.preference.dpo import DPOKind, dpo_loss
from lightning_thd.loss.preference.odds import orpo_loss, simpo_loss
from lightning_thd.loss.preference.responses import kto_loss, reward_pair_loss
from lightning_thd.loss.preference.rows import sequence_sums

__all__ = [
    "DPOKind",
    "dpo_loss",
    "kto_loss",
    "orpo_loss",
    "reward_pair_loss",
    "sequence_sums",
    "simpo_loss",
]
