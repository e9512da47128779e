"""Faults in what is believed of files, and in how much work they may ask for; and in what a step
believes of a model that it has seen, or has in main memory, or has left between its halves."""

from tests.mutants.faults import Fault

BOUNDS = "tests/data/test_bounds.py::"
MOVED = "tests/train/test_streamed_weights.py::"
OF_RANKS = "tests/engine/test_streamed_ranks.py::"
STREAMED = "tests/engine/test_streamed_weights.py::"
PACKED = "tests/hf/test_quantized.py::"
CACHE = "tests/data/test_store.py::"
RESULTS = ("tests/engine/test_tracing.py::test_results_that_are_known_are_those_of_torch",)
RECORD = "tests/train/test_record.py::"
INDEX = "tests/sparse/test_index.py::"
EDITED = "tests/field/test_edits.py::test_an_edit_is_taken_up"
LOOPS = "tests/field/test_own_loops.py::"
OF_RUN = "tests/sparse/test_train.py::TestIndex::"

OVERRIDES = "tests/field/test_overrides.py::"

TRUST = (
    Fault(
        "overrides: one that changes nothing is taken",
        "elif computing(other) == whole and not",
        "elif False and not",
        (f"{OVERRIDES}TestActing::test_an_override_that_changes_nothing_is_named",),
    ),
    Fault(
        "overrides: one that a family writes over is taken",
        "not _holds(model.config, change)",
        "False",
        (f"{OVERRIDES}TestActing::test_an_override_that_changes_nothing_is_named",),
    ),
    Fault(
        "overrides: one that restates a default is refused",
        "if computing(make(build(others))) != whole:",
        "if False:",
        (f"{OVERRIDES}TestActing::test_an_override_that_acts_is_taken",),
    ),
    Fault(
        "overrides: an older spelling in the file wins",
        'if fields.pop("rope_scaling", None) or not isinstance(fields.get(ROPE), dict):',
        "if not isinstance(fields.get(ROPE), dict):",
        (f"{OVERRIDES}TestRope::test_an_older_spelling_in_the_file_gives_way",),
    ),
    Fault(
        "overrides: entries of the old scaling stay under a new type",
        "known = {name: value for name, value in known.items() if name not in SCALINGS}",
        "pass",
        (f"{OVERRIDES}TestRope::test_a_part_keeps_the_rest",),
    ),
    Fault(
        "positions: a factor counts under any type of RoPE",
        'if rope["rope_type"] not in STRETCHED or not original or not factor:',
        "if not original or not factor:",
        (f"{OVERRIDES}TestLength::test_a_factor_counts_where_it_stretches",),
    ),
    Fault(
        "positions: a configuration that was changed afterwards counts",
        'if model is not None and not _has_frequencies(model, kind, rope["rope_type"]):',
        "if False:",
        (f"{OVERRIDES}TestLength::test_a_configuration_changed_afterwards_stretches_nothing",),
    ),
    Fault(
        "probe: a draw passes whatever it is compared with",
        "if not torch.equal(low, high):",
        "if False:",
        ("tests/field/test_models.py::TestAdapters::test_a_draw_that_decides",),
    ),
    Fault(
        "record: the value of a secret argument is written down",
        "secret = bool(SECRET & set(re.split(",
        "secret = bool(set() & set(re.split(",
        (RECORD + "test_a_command_is_written_without_secrets_and_home",),
    ),
    Fault(
        "record: laps of memory are forgotten",
        "self.peak = max(self.peak, found)",
        "self.peak = found",
        (RECORD + "test_the_measured_peak_is_the_runs_own",),
    ),
    Fault(
        "report: a curve loses its last point",
        "indices = {round(place * (many - 1) / (POINTS - 1)) for place in range(POINTS)}",
        "indices = {place * many // POINTS for place in range(POINTS)}",
        ("tests/report/test_run.py::test_a_long_curve_is_thinned_and_keeps_its_ends",),
    ),
    Fault(
        "trace: results are known by arguments that are equal, whatever they are",
        "key += type(value), value",
        "key.append(value)",
        RESULTS,
    ),
    Fault(
        "trace: results are known by shapes alone",
        "key += value.shape, value.stride(), value.dtype",
        "key += value.shape, value.dtype",
        RESULTS,
    ),
    Fault(
        "trace: what sees another's memory is made anew",
        "apart = out.is_meta and not _is_of(storage._cdata, args)",
        "apart = out.is_meta",
        RESULTS,
    ),
    Fault(
        "cache: a block with another digest is read",
        "if not np.array_equal(_digest(self.data, block), self.digests[block]):",
        "if len(_digest(self.data, block)) != len(self.digests[block]):",
        (CACHE + "test_a_bit_that_changed_is_found_and_mended",),
    ),
    Fault(
        "cache: the last block of a document is not compared",
        "last = len(self.digests) if stop is None else -(-stop // _BLOCK)",
        "last = len(self.digests) if stop is None else stop // _BLOCK",
        (CACHE + "test_damaged_tokens_are_found_where_they_are_read_and_made_anew",),
    ),
    Fault(
        "cache: what another user put there is read",
        "if status.st_uid != os.geteuid():",
        "if status.st_uid == -1:",
        (CACHE + "test_a_cache_of_another_user_is_refused",),
    ),
    Fault(
        "templates: may take any memory",
        "limit = pages * resource.getpagesize() + MEMORY",
        "limit = pages * resource.getpagesize() + (MEMORY << 10)",
        ("tests/data/test_chat.py::test_a_template_has_limits",),
    ),
    Fault(
        "templates: may take four times as long",
        "signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)",
        "signal.setitimer(signal.ITIMER_PROF, 4 * CPU_SECONDS)",
        ("tests/data/test_chat.py::test_a_template_has_limits",),
    ),
    Fault(
        "run file: an alias counts as one value",
        "self._values += self._behind.get(id(node), 1) if alias else own",
        "self._values += 1 if alias else own",
        (BOUNDS + "test_aliases_of_aliases", BOUNDS + "test_merge_keys_of_merge_keys"),
    ),
    Fault(
        "configuration: sizes within its parts are not looked at",
        'refuse_huge(value, f"{where}{name}.")',
        'refuse_huge({}, f"{where}{name}.")',
        (BOUNDS + "test_sizes_in_parts_of_a_configuration",),
    ),
    Fault(
        "kernels: torch's switches are not asked again",
        "key = batch, tokens, evaluation, is_cut, deterministic, by_cudnn",
        "key = batch, tokens, evaluation, is_cut, by_cudnn",
        ("tests/engine/test_kernels.py::test_kernels_are_chosen_once",),
    ),
    Fault(
        "step: a model that was accepted once is not looked at again",
        "_accepted: set[bool] = field(default_factory=set)",
        "_accepted: set[bool] = field(default_factory=lambda known=set(): known)",
        ("tests/hf/test_adapters.py::test_a_step_that_would_train_nothing_is_refused",),
    ),
    Fault(
        "step: an edit of the model is not seen",
        "if seen != was.look or not was.is_current():",
        "if not was.is_current():",
        (EDITED + "[llama-a layer replaced-device]",),
    ),
    Fault(
        "step: what was prepared for another model is taken up",
        "if one.look == seen and one.is_current()",
        "if one.is_current()",
        (EDITED + "[gemma2-soft cap of a module-device]",),
    ),
    Fault(
        "edits: attributes that are numbers are not looked at",
        "return kind, value\n        if isinstance(value, Tensor):",
        "return kind\n        if isinstance(value, Tensor):",
        (EDITED + "[gemma2-soft cap of a module-device]",),
    ),
    Fault(
        "edits: what a configuration holds is not looked at",
        "if other or isinstance(value, nn.Module | PretrainedConfig):",
        "if isinstance(value, nn.Module):",
        ("tests/field/test_edits.py::test_looks_are_equal_in_a_copy_but_for_identity",),
    ),
    Fault(
        "edits: methods that a forward calls are not seen",
        "methods = [(name, x) for name, x in values if isinstance(x, FunctionType)]",
        'methods = [(n, x) for n, x in values if n == "forward" and isinstance(x, FunctionType)]',
        ("tests/field/test_edits.py::test_a_method_set_on_a_class_is_taken_up",),
    ),
    Fault(
        "weights: layers in another order are not seen",
        "if not here or self._layers != list(stages.layers):",
        "if not here:",
        (EDITED + "[llama-layers swapped-host]",),
    ),
    Fault(
        "gradients: a hook of a weight is called with those of a chunk",
        '[(parameter, "_backward_hooks", None) for parameter in hooked]',
        "[]",
        (LOOPS + "test_a_hook_may_replace_a_complete_gradient[False-device]",),
    ),
    Fault(
        "gradients: hooks after accumulation are not called",
        "            hook(parameter)\n",
        "            pass\n",
        (LOOPS + "test_a_hook_after_accumulation_sees_what_the_call_leaves",),
    ),
    Fault(
        "weights on the host: buffers stay there while a step runs",
        "(table, name, b.to(self.device)) for table",
        "(table, name, b) for table",
        (STREAMED + "test_a_device_apart_computes_everything_and_main_memory_keeps_the_model",),
    ),
    Fault(
        "swap: what is put into a model stays there after an error",
        "    finally:\n        for holder, name, value in before:",
        "    except ZeroDivisionError:\n        for holder, name, value in before:",
        ("tests/hf/test_swap.py::test_a_context_restores",),
    ),
    Fault(
        "fsdp: shards are not put back if a gather was interrupted",
        "self.gathered = True  # until all are back, also if this is interrupted",
        "pass",
        ("tests/hf/test_swap.py::test_an_interrupted_gather_is_released",),
    ),
    Fault(
        "weights on the host: gradients lie in the order of the weights",
        "sorted(self.parameters, key=lambda p: _divides(p.sum_bytes())):",
        "self.parameters:",
        (STREAMED + "test_no_room_is_left_between_parameters_of_any_size",),
    ),
    Fault(
        "weights on the host: a step moves those that checkpoints refer to",
        'how["weights"] = weights',
        'how["weights"] = None',
        (MOVED + "test_everything_refers_to_the_weights_where_they_lie",),
    ),
    Fault(
        "weights on the host: a group comes while it is updated",
        "            one.settle()\n            copies.fetch(",
        "            copies.fetch(",
        (MOVED + "test_an_update_beside_the_next_step_changes_nothing[bfloat16-host]",),
    ),
    Fault(
        "weights on the host: a checkpoint is written while they are updated",
        "            self._ctx.optimizer.settle()\n            state =",
        "            state =",
        (MOVED + "test_an_update_beside_the_next_step_changes_nothing[lora-disk]",),
    ),
    Fault(
        "weights on the host: an update beside the next step is for nothing in plans",
        "self.issued = max(self.issued, self.updated[i.group])",
        "self.issued = max(self.issued, 0.0)",
        ("tests/planner/test_timeline.py::test_an_update_beside_the_next_step_is_waited_for",),
    ),
    Fault(
        "quantised: the rank's limit is that of the packed shape",
        "min(quantized.shape_of(module.weight))",
        "min(module.weight.shape)",
        (PACKED + "test_the_limit_of_the_rank_is_that_of_what_is_packed",),
    ),
    Fault(
        "quantised: another scale of a frozen block goes unseen",
        "for part in parts_of(p)",
        "for part in parts_of(p)[:1]",
        (PACKED + "test_scales_are_part_of_the_frozen_weights",),
    ),
    Fault(
        "quantised: scales of scales stay where they are",
        "state.offset, state.state2.absmax, state.state2.code = rest[2:]",
        "state.offset, _, state.state2.code = rest[2:]",
        (PACKED + "test_streamed_bytes_are_those_of_the_packing",),
    ),
    Fault(
        "weights: scales that were put elsewhere are not seen",
        "all(_addresses(p.own) == p.addresses for p in self._all())",
        "all(p.own.data_ptr() == p.addresses[0] for p in self._all())",
        (PACKED + "test_scales_that_are_others_are_read_where_they_lie",),
    ),
    Fault(
        "weights: earlier batches' sums are forgotten by ranks",
        "yield cut.own, self._sum(state, cut, total, before.get(cut.own))",
        "yield cut.own, self._sum(state, cut, total)",
        (OF_RANKS + "test_ranks_train_to_the_bits_of_resident_weights[ulysses2-0]",),
    ),
    Fault(
        "weights: earlier batches' sums come before those of ranks",
        "begins = alone and _takes_sums(p.own) and not is_hooked(p.own)",
        "begins = _takes_sums(p.own) and not is_hooked(p.own)",
        (OF_RANKS + "test_ranks_train_to_the_bits_of_resident_weights[ulysses2-0]",),
    ),
    Fault(
        "weights: sums leave before those of other ranks are added",
        "            ledger.emit(Reduce(group.index))\n        ledger.emit(Close(group.index))",
        "            ledger.emit(Close(group.index), Reduce(group.index))\n            continue\n"
        "        ledger.emit(Close(group.index))",
        (OF_RANKS + "test_programs_are_whole_and_nothing_races",),
    ),
    Fault(
        "weights: a stage closes only its layers",
        "return group == 0 or self.share.rank.layout.pipeline > 1",
        "return group == 0",
        (OF_RANKS + "test_ranks_train_to_the_bits_of_resident_weights[pipeline2-0]",),
    ),
    Fault(
        "weights: stages cut chunks by the weights that each counts",
        "products = layer.work.products or ((1, linear_products(spec, layer)),)",
        "products = layer.work.products",
        (OF_RANKS + "test_ranks_train_to_the_bits_of_resident_weights[pipeline2-0]",),
    ),
    Fault(
        "quantised: a layer is copied with all that lies beside it",
        "memo |= {id(weight): made, id(_state(weight)): made.quant_state}",
        "made.requires_grad = False",
        (PACKED + "test_a_copy_of_a_layer_has_its_own_bytes_alone",),
    ),
    Fault(
        "plan: a slot has packed weights whole",
        "return elements * model.element_bytes - sum(work.packed for work in works)",
        "return elements * model.element_bytes",
        ("tests/planner/test_quantized.py::test_streamed_bytes_are_as_planned",),
    ),
    Fault(
        "run: a plan that is kept has its weights where they were",
        "schedule = replace(schedule, weights=question.weights)",
        "refuse_together(schedule, layout)",
        (MOVED + "test_a_planned_run_keeps_its_plan_where_its_weights_move",),
    ),
    Fault(
        "quantised: bitsandbytes packs anew what evaluates",
        "module.support_avx512bf16_for_cpu = False",
        "module.support_avx512bf16_for_cpu = True",
        (PACKED + "test_what_evaluates_keeps_its_gradients",),
    ),
    Fault(
        "values: shards stay whole between the halves",
        "self.release()  # the code between the halves gathers its own\n",
        "pass\n",
        ("tests/engine/test_values.py::test_ranks",),
    ),
    Fault(
        "values: the last chunk has none",
        "is_read = is_stored or self.ledger.cut_after > Cut.NONE",
        "is_read = is_stored",
        ("tests/program/test_check.py::test_every_cut_program_passes",),
    ),
    Fault(
        "values: memory that another call took is read",
        "stands = self.runner.memory.open_forward is self",
        "stands = True",
        ("tests/engine/test_values.py::test_memory_that_another_call_took",),
    ),
    Fault(
        "values: each rank trains its own head",
        "                sharded.ranks.among(*AXES).sum(total)\n",
        "",
        ("tests/engine/test_values.py::test_ranks",),
    ),
    Fault(
        "values: the gradient of a padding token counts",
        "given * 0 if is_padding else given",
        "given",
        ("tests/engine/test_values.py::test_ranks",),
    ),
    Fault(
        "loss: weights of tokens are forgotten by its value",
        "            losses = (losses * weights.flatten()).sum()\n",
        "            losses = losses.sum()\n",
        ("tests/engine/test_values.py::test_a_weighted_sum_in_one_pass",),
    ),
    Fault(
        "packing: a pair's answers are numbered as those of another source",
        "before + number for number in row",
        "number for number in row",
        ("tests/data/test_pairs.py",),
    ),
    Fault(
        "attention: both calls of a layer get the first half of its values",
        "later = whole.chunk(2, 1)[1].repeat(1, 2, 1, 1)",
        "later = whole.chunk(2, 1)[0].repeat(1, 2, 1, 1)",
        ("tests/hf/test_two_calls.py::test_two_steps_are_exact",),
    ),
    Fault(
        "autocast: products keep the dtype of the weights",
        "x.dtype is weight.dtype and not casts(x.device.type)",
        "x.dtype is weight.dtype",
        ("tests/engine/test_autocast.py::test_products_that_add_to_sums_are_left_to_autocast",),
    ),
    Fault(
        "autocast: steps leave it out",
        "self.now.stages.autocast = self.autocast",
        "self.now.stages.autocast = None",
        ("tests/engine/test_autocast.py::test_gradients_are_as_near_as_plain_ones",),
    ),
    Fault(
        "logits: the stages of a pipeline wait for the last one's",
        "if sharded is not None and sharded.ranks.layout.pipeline > 1:",
        "if sharded is not None and sharded.ranks.layout.pipeline > 2:",
        ("tests/engine/test_routers.py::test_logits_of_stages_are_refused",),
    ),
    Fault(
        "evaluate: replicas read the same documents",
        "index = min(begin + world.replica, count - 1)",
        "index = begin",
        ("tests/cli/test_evaluate.py::test_ranks_print_what_one_prints",),
    ),
    Fault(
        "losses: KTO's prompts keep their own answers",
        "said = [first[:, :room], *(both[:, span] for span in own[:-1])]",
        "said = [both[:, span] for span in own]",
        ("tests/data/test_pairs.py::test_mismatched_answers_follow_other_prompts",),
    ),
    Fault(
        "losses: KTO's answers come from the sequence itself",
        "(*chosen[chosen.index(index) - 1 :: -1], *chosen",
        "(*chosen[chosen.index(index) :: -1], *chosen",
        ("tests/train/test_kto.py::test_a_run_has_trl_s_numbers",),
    ),
    Fault(
        "losses: KTO's divergence is compared with that of the first update",
        "else self._update_of(micros)",
        "else 0",
        ("tests/train/test_kto.py::test_references_are_the_same_numbers",),
    ),
    Fault(
        "losses: KTO's rewards are averaged over one replica's answers",
        "good = self.batches.over_replicas(good)",
        "good += 0",
        ("tests/train/test_kto.py::test_an_update_is_one_batch_however_it_is_cut",),
    ),
    Fault(
        "losses: adapters are part of the reference",
        "layer._disable_adapters = True",
        "layer._disable_adapters = False",
        ("tests/train/test_losses.py::test_references_agree_while_adapters_are_zero",),
    ),
    Fault(
        "losses: of replicas one tells its own",
        "gathered = self.ctx.world.gather_replicas([local])",
        "gathered = [local]",
        ("tests/train/test_losses.py::test_ranks_train_as_one_process_does",),
    ),
    Fault(
        "losses: what is stored is computed anew from trained weights",
        "if self._stored is None and updates == 0:",
        "if self._stored is None:",
        ("tests/train/test_losses.py::test_what_is_stored_belongs_to_its_run",),
    ),
    Fault(
        "far: keys that a layer sees by choice are streamed like near ones",
        "blocks = self.far.near(spec, blocks, queries[0])",
        "self.far.near(spec, blocks, queries[0])",
        ("tests/sparse/test_traffic.py",),
    ),
    Fault(
        "far: a backward begins as a forward",
        "cell.far.begin_backward(i, cell.key_values)",
        "cell.far.begin(cell.key_values)",
        ("tests/engine/test_far.py",),
    ),
    Fault(
        "sparse: the mass that a budget keeps is that of the first pages",
        "chosen = far.gather(3, order).sum((0, 1, 2)).cumsum(0)",
        "chosen = far.sum((0, 1, 2)).cumsum(0)",
        ("tests/sparse/test_train_budget.py::test_masses_are_those_of_a_softmax_and_a_mask",),
    ),
    Fault(
        "sparse: an index learns from the first head of a group alone",
        "q = taught.q.to(mass.dtype) @ maps.queries.flatten(0, 1)",
        "q = taught.q.to(mass.dtype) @ maps.queries[:, :1].expand_as(maps.queries).flatten(0, 1)",
        (f"{INDEX}TestLearning::test_gradients_are_plain_autograd_s[device]",),
    ),
    Fault(
        "sparse: an index learns from keys of another document",
        "seen = seen & (token.unsqueeze(2) >= call.far.documents[:, None, span, None, None])",
        "seen = seen | (token.unsqueeze(2) >= call.far.documents[:, None, span, None, None])",
        (f"{INDEX}TestLearning::test_gradients_are_plain_autograd_s[device]",),
    ),
    Fault(
        "sparse: pages are compared by the keys of another layer's index",
        "index = None if self.index is None else self.index[i.layer]",
        "index = None if self.index is None else self.index[i.layer // 2]",
        (f"{INDEX}test_a_step_is_exact_for_its_choice[host]",),
    ),
    Fault(
        "sparse: an index of another model is told by the first step",
        "index.refuse_misfit(layers, config.index_dim)",
        "pass",
        (f"{OF_RUN}test_is_told_before_text_is_read",),
    ),
    Fault(
        "sparse: an index that is not there is told when the model is",
        'index = world.run_on_rank0(partial(index_of, run.sparse, blank), "reading the index")',
        "index = None",
        (f"{OF_RUN}test_is_told_before_text_is_read",),
    ),
    Fault(
        "sparse: a run goes on with another index of as many dims",
        "self._identity[INDEX_OF_KEYS] = ctx.index.digest()",
        "self._identity[INDEX_OF_KEYS] = str(ctx.index.dim)",
        (f"{OF_RUN}test_another_one_at_its_place_is_refused",),
    ),
    Fault(
        "sparse: that keys are on host is told by the first cell that learns",
        "refuse_keys_on_host(schedule)",
        "pass",
        (f"{INDEX}TestLearning::test_keys_are_on_host",),
    ),
    Fault(
        "sparse: pages are compared by an index as it was before it learned",
        "if before != now or self.learns():",
        "if before is None or self.learns():",
        ("tests/engine/test_memory.py::test_maps_of_an_index_are_there_once_and_counted",),
    ),
    Fault(
        "sparse: pages are compared by an index as it was before a fused optimizer's step",
        "if before != now or self.learns():",
        "if before != now:",
        (f"{INDEX}test_fused_optimizers_change_its_maps",),
    ),
)
