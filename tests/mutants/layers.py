"""Faults in what layers pass on besides a hidden state."""

from tests.mutants.faults import Fault

CARRIED = "tests/hf/test_carried.py::"

LAYERS = (
    Fault(
        "carried: shared keys give no gradient to the layer that made them",
        "given = k.contiguous(), v.contiguous()",
        "given = k.detach().contiguous(), v.contiguous()",
        (f"{CARRIED}test_two_steps_are_exact[gemma4_e2b-plain]",),
    ),
    Fault(
        "carried: a layer's own input is that of the layer it is as far from the top",
        "before, after = layer * own, (self.layers - 1 - layer) * own",
        "after, before = layer * own, (self.layers - 1 - layer) * own",
        (f"{CARRIED}test_two_steps_are_exact[gemma3n_text-kept]",),
    ),
    Fault(
        "carried: ranks gather no embedding for layers in the middle",
        "if self.ledger.model.embeds:",
        "if self.ledger.model.embeds and self.index == 0:",
        (f"{CARRIED}test_two_ranks_train_adapters",),
    ),
    Fault(
        "plan: hidden states are counted without what layers pass on besides",
        "return self.hidden + self.carried",
        "return self.hidden",
        (f"{CARRIED}test_two_steps_are_exact[gemma4_e2b-plain]",),
    ),
)
