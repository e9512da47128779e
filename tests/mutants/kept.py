"""Faults in what steps and cells keep of what they have made."""

from tests.mutants.faults import Fault

ARENA = "tests/engine/test_arena.py::"

KEPT = (
    Fault(
        "arena: views stay when their block is released",
        "views.clear()\n        self._block =",
        "pass\n        self._block =",
        (f"{ARENA}test_a_view_is_of_the_present_block",),
    ),
    Fault(
        "arena: two who ask for a view share its version",
        "return {part: view.data for part, view in self._chunk(name, chunk, layer).items()}",
        "return self._chunk(name, chunk, layer)",
        (f"{ARENA}test_a_view_that_is_asked_for_again_has_its_own_version",),
    ),
    Fault(
        "arena: a view of an evaluation cannot be saved by a step",
        "with torch.inference_mode(False):  # a backward",
        "if True:  # a backward",
        (f"{ARENA}test_a_view_first_asked_for_in_inference_mode_can_be_saved_for_a_backward",),
    ),
    Fault(
        "arena: all views are kept",
        "if len(self._views) == VIEWS_KEPT:",
        "if False:",
        (f"{ARENA}test_views_beyond_those_kept_are_as_right",),
    ),
    Fault(
        "stages: what is written into embeddings is not seen",
        "return self.hidden is out and out._version == version",
        "return self.hidden is out",
        ("tests/hf/test_lookup.py::test_what_a_decoder_writes_into_its_embeddings_is_seen",),
    ),
    Fault(
        "stages: all first layers are given what the table holds",
        "self._once(LOOKUP, record.is_lookup)",
        "self._once(LOOKUP, lambda: True)",
        ("tests/hf/test_lookup.py::test_a_family_embeds_to_the_same_bits",),
    ),
    Fault(
        "stages: shells of one step stay for the next",
        "before, self._kept = self._kept, {}",
        "before = self._kept = self._kept or {}",
        ("tests/hf/test_rope.py::test_a_step_keeps_no_table_for_the_next",),
    ),
    Fault(
        "stages: the head's pass writes a table into the model",
        "modules = self._with_layers(layers, self._shell) | self._settled",
        "modules = self._with_layers(layers, self._shell)",
        ("tests/hf/test_rope.py::test_steps_write_no_table_into_the_model",),
    ),
    Fault(
        "engine: parameters trained in an earlier layer are taken for those of this one",
        "return known[layer]",
        "return next(iter(known.values()))",
        ("tests/engine/test_step.py::test_what_is_edited_between_steps_is_seen",),
    ),
)
