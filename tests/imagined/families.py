"""Families of tests/models on an imagined GPU in fp32 against stock eager attention on the CPU; a script.

Arguments: the compute capability, then names of families; all of them without names. Ends with an error if a
family differs.
"""

from __future__ import annotations

import logging
import sys
import warnings

from lightning_thd.models import register_thd
from tests.imagined.gpu import data, imagined_gpu
from tests.models import matrix
from tests.models.families import FAMILIES, build


def compare(name: str) -> None:
    state, wanted = matrix.oracle(name)
    model = build(name, "thd")
    model.load_state_dict(state)
    model = model.eval().to("cuda")
    packs = [pack.to("cuda") for pack in matrix.packs()]
    logits, targets = [], []
    for batch in packs:
        logits += batch.unpack(model(**batch.hf_kwargs()).logits.float())
        targets += batch.unpack(batch.targets)
    found = matrix.result_of(model, logits, targets)
    gradients = {key: data(value) for key, value in found.gradients.items()}
    here = matrix.Result([data(x) for x in found.logits], data(found.loss), gradients)
    matrix.assert_same(here, wanted, tolerance=1e-5)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    register_thd()
    wrong = []
    capability = tuple(int(part) for part in sys.argv[1].split("."))
    for name in sys.argv[2:] or FAMILIES:
        with imagined_gpu(capability=capability):
            said = "equal"
            try:
                compare(name)
            except Exception as error:  # the others still run
                wrong.append(name)
                said = f"{type(error).__name__} {str(error)[:300]}"
        sys.stdout.write(f"{name}: {said}\n")
        sys.stdout.flush()
    sys.exit(f"different: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
