"""Faults in what layers pass on besides a hidden state, and in what their indexers choose."""

from tests.mutants.faults import Fault

CARRIED = "tests/hf/test_carried.py::"

INDEXER = "tests/hf/test_indexer.py::"

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
    Fault(
        "activations: an output that was changed is taken for what is made again",
        "if remade is not None and tensor._version == remade.version:",
        "if remade is not None:",
        ("tests/test_activations.py::test_what_is_not_as_it_was_made_is_stored_itself[output]",),
    ),
    Fault(
        "activations: a part of a tensor is taken for the whole of it",
        "whole = _start(out) == 0 and _reach(out) == out.untyped_storage().nbytes()",
        "whole = True",
        ("tests/test_activations.py::test_what_is_not_as_it_was_made_is_stored_itself[view]",),
    ),
    Fault(
        "activations: what runs again gives its first tensor to all",
        "of.again = dict(enumerate(found))",
        "of.again = dict(enumerate(found[:1] * len(found)))",
        ("tests/test_activations.py::test_code_that_runs_again_stores_its_inputs",),
    ),
    Fault(
        "kernels: a gate that kept cells make again has another activation",
        "remade(out, partial(swiglu, act=act), gate, up)",
        "remade(out, partial(swiglu, act=Act.GELU), gate, up)",
        ("tests/hf/test_fused.py::test_a_step_on_the_kernels",),
    ),
    Fault(
        "plan: what kept cells compute again costs nothing",
        "traffic = work.backward_traffic + work.remade_traffic * (i.activations is not None)",
        "traffic = work.backward_traffic",
        ("tests/planner/test_seconds.py::test_a_kept_cell_computes_a_little_again",),
    ),
    Fault(
        "plan: kernels.remake is not asked for",
        "remakes = self.kernels.remake",
        "remakes = True",
        ("tests/planner/test_ask.py::test_a_plan_without_tensors_made_again_keeps_more",),
    ),
    Fault(
        "indexer: a query chooses from other documents",
        "seen &= places >= of_row[0, queries, None]",
        "pass",
        (f"{INDEXER}test_a_step_gives_transformers_own_gradients[deepseek_v32]",),
    ),
    Fault(
        "indexer: ties are broken by the length of the prefix",
        "missing = self.tokens - args[0].shape[-1]",
        "missing = 0",
        (f"{INDEXER}test_scores_that_are_all_equal",),
    ),
    Fault(
        "indexer: queries see all tokens of a block of keys",
        "scores = scores.masked_fill(hidden.repeat(1, groups, 1)[:, None], -torch.inf)",
        "pass",
        (f"{INDEXER}test_a_step_is_exact[plain-deepseek_v32]",),
    ),
    Fault(
        "indexer: a cell that is given its attention makes no choice for later layers",
        "(self._attends() or call.sizes.passed)",
        "self._attends()",
        (f"{INDEXER}test_later_layers_are_given_a_choice_whose_own_attention_is_known",),
    ),
    Fault(
        "indexer: each rank's queries choose as those of the first rank",
        "start, end = program.share.tokens.ranges[chunk]",
        "start, end = program.chunks[chunk]",
        (f"{INDEXER}test_two_ranks_give_what_one_does",),
    ),
    Fault(
        "indexer: the backward attends to all tokens",
        "call = _choosing(ctx.call, chosen)",
        "call = ctx.call",
        (f"{INDEXER}test_a_step_is_exact[plain-deepseek_v32]",),
    ),
    Fault(
        "stages: recording RecurrentGemma's calls leaves states in its layers",
        'attributes["_setup_cache"] = lambda *_: None',
        "pass",
        ("tests/hf/test_recurrent.py::test_states_that_a_model_keeps_of_a_call_are_no_edit",),
    ),
    Fault(
        "edits: states that RecurrentGemma stores are an edit",
        '*("conv1d_state", "recurrent_states"),',
        "",
        ("tests/hf/test_recurrent.py::test_states_that_a_model_keeps_of_a_call_are_no_edit",),
    ),
    Fault(
        "stages: an exception keeps the tensors of a first call",
        "        except (IndexError, ValueError) as alone:  # a local",
        "        except (IndexError, ValueError) as alone:\n            kept = alone  # a local",
        ("tests/hf/test_families.py::test_a_first_step_leaves_the_collector_no_tensors",),
    ),
)
