"""Faults in how situations from the field are met: each is honoured or named."""

from tests.mutants.faults import Fault

MERGING = "tests/field/test_merging.py::"
TRAINERS = "tests/field/test_trainer.py::"
FORECAST = "tests/train/test_forecast.py::"
ONE_AUTO = "tests/train/test_one_auto.py::"
LOOP = "tests/train/test_loop.py::"
CHOICE = "tests/train/test_choice.py::"
EXPORT = "tests/checkpoint/test_export.py::"
STREAMS = "tests/data/test_streaming.py::"

RANKS = "tests/engine/test_ranks.py::"
ROUTERS = "tests/engine/test_routers.py::"
PLANNED = "tests/train/test_planned.py::"

FIELD = (
    Fault(
        "runs: a start searches again for the plan that placed everything",
        "if plan is None or replace(plan.question, machine=question.machine) != question:",
        "if plan is None or plan.question != question:",
        (PLANNED + "test_the_plan_of_a_start_is_what_a_search_for_the_memory_of_now_finds",),
    ),
    Fault(
        "ranks: what a stranger wrote ends the thread that watches them",
        "except _MALFORMED as error:  # raised for entries that the task read",
        "except ZeroDivisionError as error:",
        ("tests/distributed/test_messages.py::test_a_foreign_request_to_stop_is_named",),
    ),
    Fault(
        "runs: a plan is kept though its memory is gone",
        "return renewed if renewed.fits and renewed.fit >= plan.fit else None",
        "return renewed",
        (PLANNED + "test_the_plan_of_a_start_is_what_a_search_for_the_memory_of_now_finds",),
    ),
    Fault(
        "runs: the forecast of a step leaves out what its cells hold",
        "return lambda program: momentary(question, program) + values",
        "return lambda _: values",
        (FORECAST + "test_the_first_step_is_forecast_and_not_rehearsed",),
    ),
    Fault(
        "runs: a schedule that ran out of memory is begun with again",
        "found = self._again(*ran_out)",
        "found = ran_out[0]",
        (CHOICE + "test_a_named_schedule_that_ran_out_is_found_again",),
    ),
    Fault(
        "runs: a chunk is halved for next to nothing",
        "if less > now - WORTH * before:",
        "if less >= now:",
        (CHOICE + "test_what_takes_next_to_nothing_away_is_not_given_up",),
    ),
    Fault(
        "steps: ranks keep whole weights on a device that has no room for them",
        "if on_host != (was.weights is not None):",
        "if on_host == (was.weights is not None):",
        (ONE_AUTO + "test_on_ranks_they_answer_alike",),
    ),
    Fault(
        "trainers: states go to the device where a resumed run has its weights on the host",
        "if of_planner and (Path(str(checkpoint)) / _MOVED).exists():",
        "if of_planner and not Path(str(checkpoint)).exists():",
        (ONE_AUTO + "test_a_trainer_s_states_follow_its_weights",),
    ),
    Fault(
        "runs: step 1 waits for held-out text that nobody asked for",
        "(step == 0 and asked.on_start)",
        "step == 0",
        (LOOP + "test_nothing_is_evaluated_before_step_one_unless_asked",),
    ),
    Fault(
        "machines: a card's memory does not tell it from another",
        "n for n in found if said[n] == memory or abs",
        "n for n in found if said[n] != 0 or abs",
        ("tests/planner/test_machines.py::test_cards_by_their_usual_names",),
    ),
    Fault(
        "machines: rates of a busy machine are kept",
        '; these measurements are used once and not kept", words)\n        return file.spec',
        '; these measurements are used once and not kept", words)',
        ("tests/engine/test_calibrate.py::test_what_a_busy_machine_gave_is_used_once",),
    ),
    Fault(
        "plan: of two tiers that are short one is said",
        '(("device", plan.device), ("main", plan.host))',
        '(("device", plan.device),)',
        ("tests/report/test_plan.py::test_every_tier_that_is_short_is_said",),
    ),
    Fault(
        "plan: a file that is there is refused after planning",
        'check_place(write, "write", new=True)',
        'check_place(write, "write")',
        ("tests/cli/test_plan_run.py::test_a_place_is_looked_at_before_anything_is_planned",),
    ),
    Fault(
        "trainers: a batch without trained tokens lowers the mean",
        "if trained == 0:  # as the plain",
        "if trained < 0:  # as the plain",
        (TRAINERS + "test_an_evaluation_is_the_plain_trainer_s",),
    ),
    Fault(
        "trainers: first labels of GPT-2 are left out",
        "found += 0 if shifts else",
        "found += 0 if True else",
        ("tests/posttrain/test_hugging_face.py::test_a_loss_is_divided_by_transformers_count",),
    ),
    Fault(
        "kto: an answer is paired with its own prompt",
        "if found.answers[0][-1].number != own:",
        "if True:",
        ("tests/train/test_kto.py::test_no_answer_is_paired_with_its_own_prompt",),
    ),
    Fault(
        "kto: stored sums are those of any evaluation",
        "row = len(self.batches.evaluated()) if",
        "row = -1 if",
        ("tests/train/test_kto.py::test_an_evaluation_of_fewer_sequences_lacks_its_references",),
    ),
    Fault(
        "adapters: a router that returns a tuple is adapted",
        "if type(module).forward in own or",
        "if True or",
        ("tests/hf/test_adapters.py::test_adapters_are_only_where_they_have_gradients",),
    ),
    Fault(
        "plans: weights that layers share may leave the device",
        "question.weights is Tier.DEVICE and not question.model.shares",
        "question.weights is Tier.DEVICE",
        ("tests/planner/test_plans.py::test_shared_weights_stay_on_one_device",),
    ),
    Fault(
        "trainers: a mean of batches is one of tokens",
        "if not counts or not self.model_accepts_loss_kwargs:",
        "if not counts:",
        (TRAINERS + "test_means_are_those_that_the_trainer_asks_for",),
    ),
    Fault(
        "merge: a tied weight is adapted twice",
        "head.weight = nn.Parameter(head.weight.detach().clone())",
        "pass",
        (MERGING + "test_adapters_of_a_tied_weight_keep_their_function",),
    ),
    Fault(
        "merge: the rank is that of the configuration",
        "ranked = kind == ",
        "ranked = kind != ",
        (MERGING + "test_a_damaged_configuration_is_named",),
    ),
    Fault(
        "merge: values that are not finite are merged",
        "tensor).isfinite().all()):",
        "tensor).isnan().any()):",
        (MERGING + "test_values_that_are_not_finite_are_named",),
    ),
    Fault(
        "merge: links of an adapters' folder are followed",
        'refuse_links(folder, *[folder.resolve().parents[1] / "blobs"] * cached)',
        "assert cached in (True, False)",
        (MERGING + "test_links_are_not_followed",),
    ),
    Fault(
        "export: a damaged model is the result",
        "if digests.get(name) != files[name])",
        "if name not in digests)",
        (EXPORT + "test_a_damaged_model_is_exported_again",),
    ),
    Fault(
        "files: a bracket in a text ends an element of an array",
        "(np.isin(data, list(signs)) & ~quoted for",
        "(np.isin(data, list(signs)) for",
        ("tests/field/test_files.py::test_elements_of_an_array_are_those_of_json",),
    ),
    Fault(
        "files: a long text is cut where its ids change",
        "if self._bare(left) + self._bare(right) == self._bare(left + right):",
        "if left:",
        ("tests/data/test_long.py::test_parts_have_the_ids_of_the_whole",),
    ),
    Fault(
        "files: what is no data in a folder is read",
        "return (plain if records else data) or files",
        "return data or files",
        ("tests/field/test_files.py::test_a_folder_s_other_files_are_skipped_and_counted",),
    ),
    Fault(
        "command line: output that is lost is a success",
        "if not done.code and 1 in Lasting.lost:",
        "if done.code and 1 in Lasting.lost:",
        ("tests/cli/test_encodings.py::test_output_that_is_lost_is_no_success",),
    ),
    Fault(
        "auto: what moves more is taken for nothing",
        "return plan.update_seconds() < best.update_seconds() * (1 - TOLERANCE)",
        "return plan.update_seconds() <= best.update_seconds()",
        ("tests/train/test_optimizer_place.py::test_the_fastest_placement_that_fits_is_chosen",),
    ),
    Fault(
        "auto: a drive that nobody named is used",
        "can_drive = free.drive and layout.devices() == 1",
        "can_drive = layout.devices() == 1",
        ("tests/train/test_weights_place.py::test_what_the_run_file_says_is_kept",),
    ),
    Fault(
        "streams: a window's next reader begins one document early",
        "if [d.file, d.line] > place[:2])",
        "if [d.file, d.line] >= place[:2])",
        (STREAMS + "test_ranks_that_take_turns_go_on_behind_each_other_s_windows",),
    ),
    Fault(
        "streams: documents held out of the first window train",
        "np.arange(store.documents()) if window else self.choose(store)",
        "np.arange(store.documents())",
        (STREAMS + "test_held_out_documents_of_the_first_window_never_train",),
    ),
    Fault(
        "streams: a run goes on with windows that are not its own",
        "if own != expected:",
        "if window and not expected:",
        ("tests/train/test_streams.py::test_data_that_changed_since_a_checkpoint_are_named",),
    ),
    Fault(
        "folders: a profile is kept by following what has its name",
        'write_bytes(apart, json.dumps(to_json([profile])[0]).encode("utf-8"))',
        "apart.write_text(json.dumps(to_json([profile])[0]))",
        ("tests/test_folders.py::test_no_command_writes_elsewhere_or_through_a_link",),
    ),
    Fault(
        "folders: what is nested deeply is read",
        "if depth > DEEPEST:",
        "if depth < 0:",
        ("tests/test_odd_files.py::test_what_nests_deeply_is_named",),
    ),
    Fault(
        "folders: the file of a run folder trusts code",
        'if run.model.trust_remote_code and path.name == "config.yaml" and not said:',
        "if False:",
        ("tests/test_folders.py::test_the_file_of_a_run_folder_trusts_no_code",),
    ),
    Fault(
        "checkpoints: boxes that overlap are taken",
        "if all(a < b + m and b < a + n for a, n, b, m in sides):",
        "if not sides:",
        ("tests/checkpoint/test_format.py::test_a_list_that_does_not_fit_is_refused",),
    ),
    Fault(
        "data: a missing field of any two is named by a key of prompts",
        "return self.keys[self.columns.index(column)]",
        'return "data.completion"',
        ("tests/data/test_forms.py::test_a_new_form_is_its_row",),
    ),
    Fault(
        "routers: tokens that keep a rank in step are counted",
        "routers.is_padding = self.attention.is_padding(chunk)",
        "routers.is_padding = False",
        (RANKS + "test_every_layout_is_exact[ulysses2-0]",),
    ),
    Fault(
        "routers: a rank knows its own tokens' choices alone",
        "            add_up(self._sums)\n",
        "            pass\n",
        (RANKS + "test_every_layout_is_exact[ulysses2-0]",),
    ),
    Fault(
        "routers: padding has a gradient",
        "found = found if rows is None else found * rows",
        "found = found",
        (ROUTERS + "test_padding_does_not_count",),
    ),
    Fault(
        "routers: the caller's weight of the loss is lost",
        "self.inputs.routers.scale = routers.double()",
        "self.inputs.routers.scale = torch.ones_like(routers.double())",
        (ROUTERS + "test_a_loss_of_log_probabilities",),
    ),
    Fault(
        "routers: a backward begins before the top layer's choices are counted",
        "return Cut.AFTER_LAYERS if self.routers else Cut.NONE",
        "return Cut.NONE",
        (ROUTERS + "test_families_as_transformers_trains_them",),
    ),
    Fault(
        "routers: a run adds the sum over its batches",
        "share = 1 / (len(batches) * self._batches.replicas)",
        "share = 1.0",
        ("tests/train/test_routers.py::test_a_run_adds_its_routers_losses",),
    ),
    Fault(
        "loss: labels are smoothed in the loss, not in the gradient",
        "            self._smooth(rows, targets.flatten())\n",
        "",
        ("tests/engine/test_values.py::test_the_fused_loss_weighs_tokens_as_the_plain_one",),
    ),
    Fault(
        "runs: dropout draws alike in every update",
        "step.drawn = self.at.step * len(batches) + place",
        "step.drawn = place",
        (LOOP + "test_every_batch_has_random_numbers_of_its_own",),
    ),
)
