"""Faults that the tests must catch: one or two lines of `src/farspan`, and what stands in their
place. A text is there once, whichever file it is in; whoever changes it changes it here, too."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and tests of a few seconds that fail with it."""

    name: str
    old: str  # found once in all of src/farspan
    new: str
    tests: tuple[str, ...]  # pytest's node ids


BLOCKS = ("tests/program/test_blocks.py",)
TWO_PARTS = "tests/attention/test_cell.py::test_parts_that_kernels_join_two_at_a_time"
CAUGHT = "tests/program/test_check.py::"
CELL = ("tests/attention/test_cell.py::test_equals_dense_attention_in_float64",)
CHECKPOINT = ("tests/checkpoint/test_saver.py",)
EXPORT = "tests/checkpoint/test_export.py::"
COPIES = ("tests/engine/test_overlap.py::test_the_same_bits_in_any_order",)
DOCUMENT = (
    "tests/engine/test_documents.py::test_documents_of_one_token_train_nothing",
    "tests/engine/test_documents.py::test_a_document_does_not_see_another",
    "tests/engine/test_documents.py::test_documents_give_what_they_give_alone",
)
RECURRENT = ("tests/hf/test_recurrent.py::test_documents_of_a_token",)
GIVEN = ("tests/hf/test_recurrent.py::test_states_go_on_from_a_chunk_and_not_from_a_document",)
HOST = "tests/train/test_optimizer_host.py::"
FIELDS = "tests/field/test_records.py::"
BEGUN = "tests/train/test_origin.py::"
RESUMED = "tests/train/test_interrupt.py::"
RACES = ("tests/program/test_waits.py::test_nothing_races",)

WALK = "tests/planner/test_walk.py::"

PROFILES = (
    Fault(
        "profile: O and LSE that a graph holds are not counted",
        "graph = 0 if kind.kept else at(lines.graph, *tokens) + stays",
        "graph = 0 if kind.kept else at(lines.graph, *tokens)",
        (WALK + "test_every_instruction_is_predicted",),
    ),
)

PROGRAMS = (
    Fault(
        "checker: a buffer may lie outside of its arena",
        "self.need(top <= self.program.arena_bytes[buffer.tier],",
        "self.need(top - 64 <= self.program.arena_bytes[buffer.tier],",
        (CAUGHT + "test_a_buffer_outside_its_arena_is_caught",),
    ),
    Fault(
        "checker: overlapping buffers pass",
        "apart = low >= min(other.address + other.bytes, top)",
        "apart = low + 64 >= min(other.address + other.bytes, top)",
        (CAUGHT + "test_an_overlap_is_caught",),
    ),
    Fault(
        "checker: a chunk in another's place is read",
        "found == (what, layer, chunk),",
        "found is not False and found[:2] == (what, layer),",
        (CAUGHT + "test_another_layer_chunk_or_group_is_caught",),
    ),
    Fault(
        "checker: races between two writers pass",
        "meet &= (wrote == 1) | writes",
        "meet &= (wrote == 0) & writes",
        ("tests/program/test_waits.py::test_no_wait_is_spare",),
    ),
    Fault(
        "program: a slot too few for the chunks",
        "return ring[turn % len(ring)]",
        "return ring[0]",
        (
            "tests/planner/test_timeline.py::test_copies_hide_on_a_gpu",
            "tests/engine/test_overlap.py::test_without_waits_of_instructions",
        ),
    ),
    Fault(
        "waits: a write does not follow reads",
        "            if writes:\n                _raise(after, last.read)",
        "            if not writes:\n                _raise(after, last.read)",
        RACES,
    ),
    Fault(
        "waits: who follows a lane need not follow it far enough",
        "self.then[third][after[third]][other] >= after[other]",
        "self.then[third][after[third]][other] >= 0",
        RACES,
    ),
    Fault(
        "waits: addresses are reused before their last use",
        "return max(self.owners[lane], self.every.written[lane], self.every.read[lane])",
        "return max(self.owners[lane], self.every.written[lane])",
        RACES,
    ),
    Fault(
        "simulation: dK, dV of earlier keys do not go home",
        "                yield False, Kind.DKV, size",
        "                yield False, Kind.DKV, 0",
        (
            "tests/program/test_simulate.py::test_streamed_prefixes_grow_with_the_square",
            "tests/program/test_simulate.py::test_streamed_states_are_those_of_the_chunk_before",
        ),
    ),
)

WINDOWS = (
    Fault(
        "window: a token narrower to earlier keys",
        "low = max(low, run.start - window + 1)",
        "low = max(low, run.start - window + 2)",
        BLOCKS,
    ),
    Fault(
        "window: tiles lose their first key",
        "k_start = max(block.k_start, q_start - window + 1)",
        "k_start = max(block.k_start, q_start - window + 2)",
        BLOCKS,
    ),
    Fault(
        "window: a block is taken for whole a token late",
        "if block.q_stop - window <= block.k_start:",
        "if block.q_stop - window <= block.k_start + 1:",
        BLOCKS,
    ),
    Fault(
        "blocks: the last key of a wide call is lost",
        "k_stop = min(k_start + most, last)",
        "k_stop = min(k_start + most, last - 1)",
        BLOCKS,
    ),
)

MERGES = (
    Fault(
        "merge: a part that saw nothing has a weight",
        "weight = weight.masked_fill(part_lse == -torch.inf, 0.0)",
        "weight = weight.masked_fill(part_lse == -torch.inf, 0.5)",
        ("tests/attention/test_merge.py",),
    ),
    Fault(
        "merge: LSE is the greater of two",
        "lse.copy_(torch.logaddexp(lse, part_lse))",
        "lse.copy_(torch.maximum(lse, part_lse))",
        ("tests/attention/test_merge.py",),
    ),
    Fault(
        "sinks: their gradient has the other sign",
        "return -(weight * (dout.to(dtype) * out.to(dtype)).sum(-1))",
        "return (weight * (dout.to(dtype) * out.to(dtype)).sum(-1))",
        CELL,
    ),
    Fault(
        "attention: dV of a block lands at the visit's first key",
        "dv.add(parts[2], rows, block.k_start - visit.start)",
        "dv.add(parts[2], rows, 0)",
        CELL,
    ),
    Fault(
        "attention: the first part of a sum counts twice",
        "if self.sum is None and part.shape == self.like.shape:\n            self.sum = part",
        "if self.sum is None and part.shape == self.like.shape:\n            self.sum = 2 * part",
        CELL,
    ),
    Fault(
        "attention: a sum loses what waits",
        "self.sum, self.waiting = added(self.sum, self.waiting, dtype), []",
        "self.sum, self.waiting = added(self.sum, self.waiting[:1], dtype), []",
        (TWO_PARTS,),
    ),
    Fault(
        "kernel: the nearer end of a merge is the wrong one",
        "old + weight * step, new - (1.0 - weight) * step)",
        "old + weight * step, new - weight * step)",
        ("tests/kernels/test_joining.py::test_merge",),
    ),
)

KERNELS = (
    Fault(
        "kernel: a norm's gradient without its projection",
        "result = (weighted - normal * along) * inverse",
        "result = weighted * inverse",
        ("tests/kernels/test_norm.py::test_norm",),
    ),
    Fault(
        "kernel: rotation does not turn back",
        "new_second = second * cos[1] - first * sin[0]",
        "new_second = second * cos[1] + first * sin[0]",
        ("tests/kernels/test_rotary.py::test_rotary",),
    ),
    Fault(
        "kernel: a capped logit's slope",
        "slope = 1.0 - bent * bent",
        "slope = 1.0 - bent",
        ("tests/kernels/test_loss.py::test_loss",),
    ),
    Fault(
        "kernel: the gate's slope",
        "slope = share + x * share * rest * dy",
        "slope = share + share * rest * dy",
        ("tests/kernels/test_gate.py::test_gate",),
    ),
)

STATES = (
    Fault(
        "recurrence: a document that begins with a chunk goes on",
        "goes_on, hands_on = run.document_start < start,",
        "goes_on, hands_on = run.document_start <= start,",
        RECURRENT,
    ),
    Fault(
        "recurrence: a document's scan begins with the last one's state",
        "        if not piece.goes_on:\n            return RecurrentStates()",
        "        if not self.before:\n            return RecurrentStates()",
        GIVEN,
    ),
    Fault(
        "recurrence: a scan of Mamba 1 leaves out what it began with",
        "out = (out + remembered * nn.functional.silu(z)).to(out.dtype)",
        "out = (out + 0 * remembered).to(out.dtype)",
        GIVEN,
    ),
    Fault(
        "recurrence: a scan of Mamba 1 forgets what it began with",
        "return out, last + (rate * passed[..., -1:]).exp() * state",
        "return out, last + 0 * (rate * passed[..., -1:]).exp() * state",
        GIVEN,
    ),
    Fault(
        "recurrence: MiniMax's blocks begin with zeros",
        "        return self.state\n\n    def __getattr__",
        "        return 0 * self.state\n\n    def __getattr__",
        GIVEN,
    ),
    Fault(
        "recurrence: RecurrentGemma's begins with zeros",
        'attributes={"recurrent_states": states.get_recurrent_state(0)}',
        'attributes={"recurrent_states": None}',
        tuple(f"{test}[recurrent_gemma]" for test in GIVEN),
    ),
    Fault(
        "recurrence: a mixer beside attention begins with zeros",
        "        if isinstance(x, RecurrentStates):\n            return states",
        "        if isinstance(x, RecurrentStates):\n"
        "            return RecurrentStates(after=states.after)",
        tuple(f"{test}[falcon_h1]" for test in GIVEN),
    ),
    Fault(
        "recurrence: a mixer beside attention sees all documents of a chunk",
        "return run_mixer(mixer, (arguments, keywords), piece.rows, tokens, states)",
        "tokens = slice(0, tokens.stop); return run_mixer(mixer, (arguments, keywords), "
        "piece.rows, tokens, states)[:, piece.start - piece.stop :]",
        tuple(f"{test}[falcon_h1]" for test in GIVEN),
    ),
    Fault(
        "recurrence: a state that needs attention's output is not waited for",
        "            if not self.goes_on():\n                raise KVWritten",
        "            raise KVWritten",
        tuple(f"{test}[zamba2]" for test in GIVEN),
    ),
    Fault(
        "carried: the embedding that layers read gets no gradient",
        "EMBEDDING: pieces[-2].contiguous() if",
        "EMBEDDING: pieces[-2].detach() if",
        tuple(f"{test}[zamba2]" for test in GIVEN),
    ),
    Fault(
        "recurrence: the gradient of a state twice",
        "_held(rows, state).copy_(gradient)",
        "_held(rows, state).copy_(2 * gradient)",
        RECURRENT,
    ),
    Fault(
        "recurrence: a convolution's earlier inputs shift",
        'self._know(f"{CONV}.{state_idx}", whole[..., -size:])',
        'self._know(f"{CONV}.{state_idx}", whole[..., :size])',
        RECURRENT,
    ),
)

GRADIENTS = (
    Fault(
        "gradients: a product overwrites the sum",
        "beta = 0 if fresh else 1",
        "beta = 0",
        ("tests/engine/test_gradients.py::test_a_linear_module_in_its_shell",),
    ),
    Fault(
        "gradients: what was in .grad is lost",
        "total.add_(parameter.grad)",
        "total.add_(0)",
        ("tests/engine/test_gradients.py",),
    ),
    Fault(
        "loss: a chunk's share is of the piece before",
        "assert dpiece is not None\n            gradient[:, span] =",
        "assert dpiece is not None\n            gradient[:, : span.stop - span.start] =",
        ("tests/engine/test_exact.py::test_any_schedule_is_exact",),
    ),
    Fault(
        "prefix: a sum leaves before it is written",
        "add(total)\n        copies.wait(Lane.EVICT,",
        "add(total)\n        copies.wait(Lane.FETCH,",
        COPIES,
    ),
    Fault(
        "prefix: a slot is fetched into while it is read",
        "self.copies.wait(Lane.FETCH, slot.done, hazard)",
        "del hazard",
        COPIES,
    ),
    Fault(
        "saved tensors: a view loses its offset",
        "start = int(base.storage_offset()) + place + packed.offset - low",
        "start = int(base.storage_offset()) + place",
        ("tests/test_activations.py",),
    ),
)

DOCUMENTS = (
    Fault(
        "documents: a border a token late",
        "begins[:, 1:] = torch.where(step != 0, places[1:], 0)",
        "begins[:, 1:] = torch.where(step != 0, places[:-1], 0)",
        DOCUMENT,
    ),
    Fault(
        "documents: the last token is trained on the next document",
        "targets[:, :-1][last] = IGNORED",
        "targets[:, 1:][last] = IGNORED",
        DOCUMENT,
    ),
    Fault(
        "documents: the run before the chunk is left out",
        "last = bisect_right(starts, q_stop - 1)",
        "last = bisect_right(starts, q_stop)",
        BLOCKS,
    ),
    Fault(
        "packing: documents in a row are one",
        "marks[row, begin + start : end] = number",
        "marks[row, begin + start : end] = 0",
        ("tests/data/test_cut.py", "tests/data/test_corpus.py"),
    ),
    Fault(
        "packing: an epoch's end is cut off",
        "taken = min(length, self._tokens - offset)",
        "taken = min(length, self._tokens)",
        ("tests/data/test_cut.py",),
    ),
    Fault(
        "packing: masks turned round",
        "np.where(trained, ids, UNTRAINED)",
        "np.where(trained, UNTRAINED, ids)",
        (
            "tests/data/test_forms.py",
            "tests/data/test_chat.py",
        ),
    ),
    Fault(
        "store: its digest does not depend on tokens",
        "self.digest.update(self.tokens.append(encoded.ids))",
        "self.tokens.append(encoded.ids)",
        ("tests/data/test_store.py",),
    ),
    Fault(
        "held-out documents: none where the fraction is small",
        "count = max(1, round(fraction * documents))",
        "count = round(fraction * documents)",
        (
            "tests/data/test_corpus.py",
            "tests/data/test_cut.py",
        ),
    ),
)

RECORDS = (
    Fault(
        "records: a field that nothing reads is dropped",
        "unread.add(prefix + name)",
        "pass",
        (FIELDS + "TestUnreadFields::test_are_counted_named_and_ignored",),
    ),
    Fault(
        "records: a list of numbers says nothing",
        "return _is_harmless_name(name) and not says",
        "return _is_harmless_name(name)",
        (FIELDS + "TestTokens::test_what_does_not_fit_is_named",),
    ),
    Fault(
        "records: a form that is ignored is recognised",
        "kinds = _forms_with(left) or _forms_with(fields.keys())",
        "kinds = _forms_with(fields.keys())",
        ("tests/data/test_forms.py::test_of_several_forms_the_error_says_what_to_ignore_for_each",),
    ),
    Fault(
        "records: the last of two fields of one name is read",
        "if len(record) < len(pairs):",
        "if len(record) < 0:",
        ("tests/data/test_files.py::test_a_field_that_is_given_twice_is_named",),
    ),
    Fault(
        "records: the last mask alone is read",
        "trained = trained & _of_each(document, name, mask, tokens)",
        "trained = _of_each(document, name, mask, tokens)",
        (FIELDS + "TestTokens::test_masks_and_labels_must_agree_as_trl_has_them",),
    ),
    Fault(
        "records: a packed row is one document",
        "cuts = np.flatnonzero(starts[1:]) + 1",
        "cuts = np.flatnonzero(starts[:0]) + 1",
        (FIELDS + "TestTokens::test_a_packed_row_is_several_documents",),
    ),
    Fault(
        "records: a turn that is marked off is trained",
        "turns.append(all(marks.values()))",
        "turns.append(True)",
        (FIELDS + "TestTurns::test_a_turn_that_is_marked_off_is_read",),
    ),
    Fault(
        "records: keys that the template does not name are taken for read",
        "return not self.sharegpt and any(map(self.names, (key, *alike)))",
        "return not self.sharegpt",
        (FIELDS + "TestTurns::test_a_key_of_a_turn_that_is_not_read_is_named",),
    ),
    Fault(
        "records: tokens of other ignored fields are taken from the cache",
        "fields = [form.listing(), sorted(ignore), table]",
        "fields = [form.listing(), table]",
        (FIELDS + "TestUnreadFields::test_a_cache_is_of_what_was_ignored",),
    ),
)

OPTIMIZER = (
    Fault(
        "decay: of norms and biases too",
        "name: parameter.ndim >= 2",
        "name: parameter.ndim >= 1",
        ("tests/train/test_optimizer.py",),
    ),
    Fault(
        "decay: an embedding's",
        "and id(parameter) not in embeddings",
        "and id(parameter) in {*embeddings, id(parameter)}",
        ("tests/train/test_optimizer.py",),
    ),
    Fault(
        "learning rate: the cosine a step late",
        "done = (step + 1 - (steps - falls)) / falls",
        "done = (step - (steps - falls)) / falls",
        ("tests/train/test_optimizer.py",),
    ),
    Fault(
        "host optimizer: an update counts for two",
        "[self._updates[piece.name] - 1]",
        "[self._updates[piece.name]]",
        (HOST + "test_the_bits_are_those_of_states_on_the_device",),
    ),
    Fault(
        "host optimizer: reads a gradient on its way",
        "_await(slot.arrived)",
        "del slot.arrived",
        (HOST + "test_copies_may_be_as_late_as_events_allow",),
    ),
    Fault(
        "host optimizer: pieces one short",
        "yield _ParameterSlice(name, start, min(start + self._staged, parameter.numel()))",
        "yield _ParameterSlice(name, start, min(start + self._staged - 1, parameter.numel()))",
        (HOST + "test_the_bits_are_those_of_states_on_the_device",),
    ),
)

RESUMES = (
    Fault(
        "start: adapters that count otherwise are taken",
        "if here.rank != rank or here.scale() / here.rank != alpha / rank:",
        "if here.rank != rank:",
        (BEGUN + "test_adapters_of_another_kind_are_refused",),
    ),
    Fault(
        "start: states beside other frozen weights are taken",
        "for key, value in self._identity.items() if key == FROZEN}",
        "for key, value in self._identity.items() if key == ''}",
        (BEGUN + "test_another_base_is_told",),
    ),
    Fault(
        "start: a run that is resumed forgets where it began",
        "if run.start is None and start is not None:",
        "if run.start is not None and start is not None:",
        (BEGUN + "test_it_resumes_without_being_told_again",),
    ),
    Fault(
        "resume: random state is not restored",
        "restore_rng(restored.rng, self._ctx.device)",
        "pass",
        (RESUMED + "test_random_numbers_of_an_abandoned_step_are_drawn_again",),
    ),
    Fault(
        "interrupt: SIGHUP ends a run under nohup",
        "if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:",
        "if False:",
        (RESUMED + "test_under_nohup_a_terminal_may_close",),
    ),
    Fault(
        "merge: adapters count alpha alone",
        'config["lora_alpha"] / config["r"]',
        'config["lora_alpha"]',
        ("tests/hf/test_merge.py::test_a_sum_is_rounded_once",),
    ),
    Fault(
        "merge: a weight is written where its header begins",
        "new.seek(start + header",
        "new.seek(header",
        ("tests/hf/test_merge.py::test_lora_is_added_where_the_weights_lie",),
    ),
    Fault(
        "calibrate: believed with any torch",
        "if _basis(file.measured_on, device) in (None, _basis(now, device)):",
        "if True:",
        ("tests/engine/test_calibrate.py::test_another_machine_or_torch_is_measured_again",),
    ),
    Fault(
        "output: a pipe that is closed ends a run",
        "if error.errno not in GONE:",
        "if True:",
        ("tests/cli/test_cli.py::test_only_a_reader_that_is_gone_is_no_error",),
    ),
    Fault(
        "resume: skipped steps are forgotten",
        "TrainState(step + 1, tokens, self.at.skipped + (not finite))",
        "TrainState(step + 1, tokens, int(not finite))",
        ("tests/train/test_nonfinite.py::test_such_a_batch_can_be_skipped",),
    ),
    Fault(
        "checkpoint: a changed byte passes",
        "in (None, digest.hexdigest())",
        "not in (digest, None, 0)",
        CHECKPOINT,
    ),
    Fault(
        "checkpoint: a user's copy is taken for one",
        "if _NAME.fullmatch(name)]",
        "if _NAME.match(name)]",
        CHECKPOINT,
    ),
    Fault(
        "checkpoint: a changed list passes",
        'if listed.pop("xxh3", None) != _sum(listed):',
        'if not listed.pop("xxh3", None):',
        CHECKPOINT,
    ),
    Fault(
        "checkpoint: a start leaves one too many",
        "            self._prune(saved=False)\n",
        "            pass\n",
        ("tests/train/test_keeping.py::test_a_kill_before_an_old_one_is_removed_leaves_no_more",),
    ),
    Fault(
        "export: what the user put there is deleted",
        "    if theirs:\n        aside = _set_aside(folder)",
        "    if theirs and not folder.exists():\n        aside = _set_aside(folder)",
        (EXPORT + "test_what_somebody_put_into_the_models_folder_stays",),
    ),
    Fault(
        "checkpoint: the oldest is resumed",
        "problems: dict[str, UnsupportedError] = {}\n    for path in reversed(paths):",
        "problems: dict[str, UnsupportedError] = {}\n    for path in paths:",
        CHECKPOINT,
    ),
    Fault(
        "checkpoint: one too many is removed",
        "known[: len(known) - len(later)][:-keep]",
        "known[: len(known) - len(later)][: 1 - keep]",
        CHECKPOINT,
    ),
    Fault(
        "checkpoint: what could not be read is removed",
        "for p in list_checkpoints(folder) if p.name not in self._kept]",
        "for p in list_checkpoints(folder)]",
        ("tests/checkpoint/test_unreadable.py",),
    ),
    Fault(
        "checkpoint: what could not be read is replaced",
        "    if path.name in spared:\n",
        "    if path.name in spared and not path.exists():\n",
        ("tests/checkpoint/test_unreadable.py",),
    ),
    Fault(
        "checkpoint: published before it is on the disk",
        "                sync(inner)",
        "                inner.stat()",
        ("tests/test_durable.py",),
    ),
    Fault(
        "records: a torn line passes",
        "if file.write(line) < len(line):",
        "if file.write(line) < 0:",
        ("tests/train/test_folder.py",),
    ),
)

RANKS = (
    Fault(
        "ranks: facts that differ are not seen",
        "len({table[n][number] for n in peers}) > 1",
        "len({table[n][number] for n in peers}) > 2",
        ("tests/field/test_ranks.py::test_what_one_rank_has_otherwise_is_named_on_both",),
    ),
    Fault(
        "ranks: a refusal of one rank is not told",
        "self._exchange(mine, digests, _words_of(error))",
        "self._exchange(mine, digests, None)",
        ("tests/field/test_ranks.py::test_what_one_rank_has_otherwise_is_named_on_both",),
    ),
    Fault(
        "ranks: a parameter that was replaced is not looked for",
        "old, new = self._slots.get(name), now.get(name)",
        "old = new = self._slots.get(name, now.get(name))",
        ("tests/field/test_ranks.py::test_what_is_replaced_in_a_shared_model_is_refused_by_name",),
    ),
    Fault(
        "ranks: a step by way of DTensors is no change of weights",
        "for x in (*found, *shards)]",
        "for x in shards]",
        ("tests/field/test_ranks.py::test_what_one_rank_has_otherwise_is_named_on_both",),
    ),
    Fault(
        "ranks: a silent store is waited for",
        "while work.is_alive() and self._silence < SILENCE:",
        "while work.is_alive():",
        ("tests/distributed/test_failure.py::test_a_silent_store_is_not_waited_for",),
    ),
    Fault(
        "ranks: a store that is silent while all join is waited for",
        "    watchdog.start()\n",
        "",
        ("tests/distributed/test_failure.py::test_a_rank_that_freezes_while_all_join_is_named",),
    ),
    Fault(
        "ranks: a process that is there is called dead",
        "        if not self._lives(rank):\n            return _exited(rank)",
        "        if self._where:\n            return _exited(rank)",
        ("tests/distributed/test_failure.py::test_a_frozen_rank_is_named_and_not_called_dead",),
    ),
    Fault(
        "ring: rows come from the other neighbour",
        "source = (self.peers.index - step) % self.peers.size",
        "source = (self.peers.index + step) % self.peers.size",
        ("tests/distributed/test_kv_sharding.py::test_a_ring_equals_attention_of_one_rank",),
    ),
    Fault(
        "ring: gradients of one peer's keys are lost",
        "                rows.add(*sums.wait())",
        "                sums.wait()",
        ("tests/distributed/test_kv_sharding.py::test_a_ring_equals_attention_of_one_rank",),
    ),
    Fault(
        "shares: a part begins a token late",
        "return start + size * index // count, start",
        "return start + (size * index + 1) // count, start",
        ("tests/program/test_share.py",),
    ),
    Fault(
        "fsdp: a micro-batch's gradient replaces the sum",
        "state.held[parameter] += total",
        "state.held[parameter] = total",
        ("tests/distributed/test_fsdp.py::test_stages_differ_in_what_they_keep",),
    ),
    Fault(
        "tensor: the bias of a block's end is left out",
        "own if self.last_bias is None else own + self.last_bias",
        "own",
        ("tests/distributed/test_tensor.py::test_biases_norms_and_tiles",),
    ),
    Fault(
        "replicas read the same sequences",
        "start = (number * self.replicas + self.replica) * size",
        "start = number * self.replicas * size",
        ("tests/train/test_ranks.py::test_an_update_of_replicas_is_one_of_micro_batches",),
    ),
)

SPARSE = (
    Fault(
        "sparse: a rank has the index of its neighbour's heads",
        "x.chunk(ranks)[number] for x in (self.queries, self.keys)",
        "x.chunk(ranks)[number - 1] for x in (self.queries, self.keys)",
        ("tests/sparse/test_index.py::test_ranks_choose_as_one_does",),
    ),
    Fault(
        "sparse: a page of the document before is chosen",
        "return (pages < self.first[..., None]).unsqueeze(1)",
        "return (pages < self.first[..., None] - 1).unsqueeze(1)",
        (
            "tests/sparse/test_select.py::test_a_chunk_chooses_by_its_votes",
            "tests/sparse/test_select.py::test_a_choice_of_a_sequence_keeps_its_promise",
        ),
    ),
    Fault(
        "sparse: a document behind the last page ranks what its superpage lacks",
        "documents.add_(SUPERPAGE * sparse.page * (documents >= tokens))",
        "documents.add_(0)",
        (
            "tests/sparse/test_select.py::"
            "test_of_many_pages_those_of_the_best_superpages_are_compared",
        ),
    ),
    Fault(
        "sparse: a page that two queries chose counts twice",
        "first[1:] &= ordered[1:] != ordered[:-1]",
        "first[1:] &= ordered[1:] >= ordered[:-1]",
        ("tests/sparse/test_slabs.py::test_slabs_hold_each_entry_of_a_choice_and_each_unit_once",),
    ),
)

ALLOCATORS = (
    Fault(
        "placement: of a plan's two orders the higher is kept",
        "        if found.height < best.height:",
        "        if found.height > best.height:",
        ("tests/program/test_placement.py",),
    ),
    Fault(
        "memory: a greedy order has more time than there is",
        "seconds=end - perf_counter(), below=below)",
        "seconds=inf, below=below)",
        ("packages/farspan-memory/tests/memory/test_greedy.py",),
    ),
    Fault(
        "memory: a greedy order ends at once that is lower than the best",
        "below = MOST_BYTES if best is None else best.height",
        "below = MOST_BYTES if best is None else bound",
        ("packages/farspan-memory/tests/memory/test_greedy.py",),
    ),
    Fault(
        "allocator: what its package refuses is no refusal of farspan's",
        "    except refused as error:",
        "    except AssertionError as error:",
        ("tests/train/test_allocator.py::test_what_the_package_refuses_is_refused",),
    ),
    Fault(
        "placement: the sweep passes a neighbour above",
        "            if above < low + size:",
        "            if above < low:",
        ("packages/farspan-memory/tests/memory/test_check.py",),
    ),
    Fault(
        "caching allocator: a large block is cut at a rest of 1 MiB",
        "return size < self.settings.max_split and rest > SMALL_REQUEST",
        "return size < self.settings.max_split and rest >= SMALL_REQUEST",
        ("packages/farspan-memory/tests/memory/compare/test_caching.py",),
    ),
    Fault(
        "caching allocator: waits for other streams forgotten",
        "if block is not None and stream != block.pool.stream:",
        "if block is not None and stream == block.pool.stream:",
        ("packages/farspan-memory/tests/memory/compare/test_caching.py",),
    ),
    Fault(
        "expandable segments: the room beyond a block is not seen",
        "return entry[0] + (after.size if after is not None and not after.mapped else 0)",
        "return entry[0]",
        ("packages/farspan-memory/tests/memory/compare/test_expandable.py",),
    ),
)

VERIFY = (
    Fault(
        "verify: an ill-conditioned gradient may be anything",
        "min(MOVES * m, ILL_CONDITIONED)",
        "min(1e3 * MOVES * m, 1.0)",
        ("tests/engine/test_verify.py::TestIllConditioned",),
    ),
)

FAULTS = (
    *(*PROGRAMS, *WINDOWS, *MERGES, *KERNELS, *STATES, *GRADIENTS, *DOCUMENTS, *RECORDS),
    *(*OPTIMIZER, *RESUMES, *RANKS, *SPARSE, *ALLOCATORS, *VERIFY, *PROFILES),
)
