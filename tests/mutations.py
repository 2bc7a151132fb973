"""Small ways to break meshfit, each with the test that must fail then. `make mutate` tries them all.

A new feature adds its own here: what would go wrong unseen if someone left a line out?
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    what: str  # what goes wrong
    file: str
    old: str  # stands once in the file
    new: str
    test: str  # a test file, or one of its tests, that fails then


STACK = "tests/model/test_stack.py::"
ATTENTION = "tests/model/test_attention.py::"
TRAIN = "tests/test_train.py::"

MUTATIONS = [
    # The checkpointed block
    Mutation(
        "the position of `deterministic` is fixed instead of looked up",
        "model/stack.py", 'static = names.index("deterministic")', "static = 2",
        STACK + "test_the_flag_is_found_wherever_the_block_has_it",
    ),
    Mutation(
        "a traced flag is let through",
        "model/stack.py", 'bound.arguments["deterministic"] = static_bool(flag, block_class.__name__)', "del flag",
        STACK + "test_a_traced_flag_is_refused_before_jax_meets_it",
    ),
    Mutation(
        "dropout key not folded with the layer",
        "model/layers.py", "key = jax.random.fold_in(key, layer)", "key = key",
        STACK + "test_every_layer_of_a_stack_has_its_own_dropout_mask",
    ),
    Mutation(
        "a segment's layers are counted from 0, so that segments share dropout masks",
        "model/stack.py",
        "jnp.arange(segment.first_layer, segment.first_layer + segment.num_layers)", "jnp.arange(segment.num_layers)",
        STACK + "test_layers_never_share_a_mask_and_the_recompute_has_that_of_the_forward_pass",
    ),
    Mutation(
        "one layer is not guarded against merging recompute and forward pass",
        "model/stack.py", "prevent_cse=segment.num_layers == 1", "prevent_cse=False",
        STACK + "test_one_layer_is_guarded_against_merging_recompute_and_forward_pass",
    ),
    Mutation(
        "a saveable tensor loses its name",
        "model/layers.py", "return checkpoint_name(constrain(x, *axes), name)", "return constrain(x, *axes)",
        STACK + "test_saving_names_takes_memory_and_none_takes_most",
    ),
    Mutation(
        "a saveable tensor loses its sharding constraint",
        "model/layers.py", "return checkpoint_name(constrain(x, *axes), name)", "return checkpoint_name(x, name)",
        "tests/parallel/test_sharding.py::test_every_constraint_of_the_block_is_in_the_program",
    ),
    # Attention
    Mutation(
        "the mask ignores segments",
        "model/attention.py", "return segment_ids_BL[:, None, :, None] == segment_ids_BL[:, None, None, :]",
        "return segment_ids_BL[:, None, :, None] == segment_ids_BL[:, None, :, None]",
        "tests/model/test_transformer.py::test_packed_documents_never_see_each_other",
    ),
    Mutation(
        "splash ignores segments",
        "model/attention.py", "splash.SegmentIds(segment_ids_BL, segment_ids_BL)",
        "splash.SegmentIds(0 * segment_ids_BL, 0 * segment_ids_BL)",
        ATTENTION + "test_splash",
    ),
    Mutation(
        "the window of splash is one too wide",
        "model/attention.py", "(window - 1 if window else None, 0)", "(window if window else None, 0)",
        ATTENTION + "test_splash",
    ),
    Mutation(
        "splash does not scale its scores",
        "model/attention.py", "/ math.sqrt(q_BLNH.shape[3])", "/ 1",
        ATTENTION + "test_splash",
    ),
    Mutation(
        "the residuals of splash have no name, so that it runs twice",
        "model/attention.py", "residual_checkpoint_name=NAME", "residual_checkpoint_name=None",
        ATTENTION + "test_saving_attention_saves_what_splash_needs_so_that_it_runs_once",
    ),
    Mutation(
        "the log-sum-exp of cuDNN's kernel has no name, so that it runs twice",
        "model/attention.py", "checkpoint_name(kept, NAME) if is_sum else kept", "kept",
        ATTENTION + "test_residuals_of_a_kernel_are_named_and_nothing_else_is",
    ),
    Mutation(
        "the mask of cuDNN's kernel is saved under the name of the context",
        "model/attention.py", "checkpoint_name(kept, NAME) if is_sum else kept", "checkpoint_name(kept, NAME)",
        ATTENTION + "test_residuals_of_a_kernel_are_named_and_nothing_else_is",
    ),
    Mutation(
        "key heads are not copied where queries are split further",
        "model/attention.py", "if spec_q != spec_kv:", "if False:",
        ATTENTION + "test_on_a_mesh_every_query_meets_its_own_keys",
    ),
    # Loss, step and optimizer
    Mutation(
        "the loss averages the means of microbatches",
        "program.py", 'loss = sums["nll"] / tokens',
        'loss = sums["nll"] / jnp.maximum(sums["tokens"], 1) / config.gradient_accumulation',
        TRAIN + "test_the_loss_is_a_mean_over_valid_tokens_of_all_devices_and_microbatches",
    ),
    Mutation(
        "the logits of all positions exist at one time",
        "losses.py", "    @jax.checkpoint\n", "",
        "tests/test_losses.py::test_no_array_of_all_logits_exists",
    ),
    Mutation(
        "gradients are summed over devices in bfloat16",
        "model/layers.py", "sum_dtype = jnp.promote_types(gradient_dtype, x.dtype)", "sum_dtype = x.dtype",
        TRAIN + "test_gradients_are_summed_in_float32_unless_asked_otherwise",
    ),
    Mutation(
        "the old state stays in memory beside the new one",
        "program.py", "whole), donate_argnums=0)", "whole))",
        TRAIN + "test_the_state_is_donated",
    ),
    Mutation(
        "parameters are made whole before they are split",
        "program.py", "(self._init_params(key))), out_shardings=self.state_shardings)", "(self._init_params(key))))",
        TRAIN + "test_parameters_are_made_on_their_shards",
    ),
    Mutation(
        "norm scales decay",
        "optimizer.py", "mask=decay_mask", "mask=None",
        "tests/test_optimizer.py",
    ),
    Mutation(
        "Adafactor clips all layers of a stack together",
        "optimizer.py", "return per_layer(optax.chain(factored, optax.clip_by_block_rms(1.0)))",
        "return optax.chain(factored, optax.clip_by_block_rms(1.0))",
        "tests/test_optimizer.py::test_a_stacked_model_is_updated_as_an_unstacked_one_value_by_value",
    ),
    Mutation(
        "Muon leaves the kernels of the blocks to Adam",
        "optimizer.py", 'path[0].key == STACKED and path[-1].key == "kernel"', "False",
        "tests/test_optimizer.py::test_a_stacked_model_is_updated_as_an_unstacked_one_value_by_value",
    ),
    Mutation(
        "Muon cuts a kernel of rank 3 into rows and columns in the wrong place",
        "optimizer.py", '"out": 2', '"out": 1',
        "tests/test_optimizer.py::test_a_stacked_model_is_updated_as_an_unstacked_one_value_by_value",
    ),
    Mutation(
        "factored moments are whole on every device",
        "parallel/sharding.py", "return (*split[:i], *split[i + 1 :])", "return ()",
        "tests/test_optimizer.py::test_factored_moments_are_split_like_the_dimensions_that_they_have",
    ),
    Mutation(
        "wsd decays from the end of the warmup on",
        "optimizer.py", "transition_begin=left - decay", "transition_begin=0",
        "tests/test_optimizer.py::test_wsd_stays_at_the_peak_and_falls_over_the_last_steps",
    ),
    # Sampling
    Mutation(
        "top_p leaves out the token that reaches it",
        "generate.py", "jnp.cumsum(p_RV, axis=-1) - p_RV < sample.top_p", "jnp.cumsum(p_RV, axis=-1) < sample.top_p",
        "tests/test_generate.py::test_tokens_are_drawn_from_the_likeliest_with_their_probabilities",
    ),
    Mutation(
        "tokens past the tokenizer's are drawn",
        "generate.py", "[:, 0, :vocab_size]", "[:, 0]",
        "tests/test_generate.py::test_a_sample_ends_where_a_document_begins",
    ),
    Mutation(
        "all samples are the same",
        "generate.py", "jnp.arange(tokens_RT.shape[0])", "jnp.zeros(tokens_RT.shape[0], jnp.int32)",
        "tests/test_generate.py::test_a_sample_depends_on_the_seed_and_its_number_alone",
    ),
    # Checkpoints and data
    Mutation(
        "a resumed run starts the data from the beginning",
        "train.py", "first_example=examples", "first_example=0",
        TRAIN + "test_a_resumed_run_is_the_uninterrupted_one_to_the_bit",
    ),
    Mutation(
        "a batch row is skipped on resume",
        "train.py", "first_example=examples", "first_example=examples and examples + 1",
        TRAIN + "test_a_resumed_run_is_the_uninterrupted_one_to_the_bit",
    ),
    Mutation(
        "a donated state is used again",
        "train.py", "state, values = step_fn(state,", "_, values = step_fn(state,",
        TRAIN + "test_a_resumed_run_is_the_uninterrupted_one_to_the_bit",
    ),
    Mutation(
        "parameters of another dtype are cast silently",
        "checkpointing.py", "elif stored[name].dtype != wanted[name].dtype and not convert_dtype:", "elif False:",
        "tests/test_checkpointing.py::test_another_model_is_refused_with_what_differs",
    ),
    Mutation(
        "the loader goes on one epoch's start too early",
        "input_pipeline/loader.py", "self._first + batch", "batch",
        "tests/input_pipeline/test_loader.py::test_going_on_from_a_number_of_examples_skips_and_repeats_nothing",
    ),
    Mutation(
        "rows of steps that are done again stay in the metrics",
        "metrics.py", ' if row["step"] <= last_step', "",
        "tests/test_metrics.py::test_rows_of_steps_that_are_done_again_are_dropped",
    ),
    Mutation(
        "rows that fill up the last evaluation batch count",
        "evaluate.py", 'tokens + float(sums["tokens"])', "tokens + batch_size * c.context_length",
        TRAIN + "test_evaluation_counts_every_held_out_byte_once_whatever_the_batch",
    ),
    # What a run shows
    Mutation(
        "the wait for data is that of the newest batch, not of the step's own",
        "metrics.py", "self._waits.popleft()", "self._waits.pop()",
        "tests/test_metrics.py::test_the_wait_for_a_batch_is_in_the_row_of_its_step",
    ),
    Mutation(
        "TensorBoard shows steps twice that were done again",
        "metrics.py", ", purge_step=first_step + 1", "",
        "tests/test_metrics.py::test_tensorboard_gets_the_same_numbers_and_hides_steps_that_are_done_again",
    ),
    Mutation(
        "NaN is written as it is, which no JSON reader takes",
        "metrics.py", "None if isinstance(v, float) and not math.isfinite(v) else v", "v",
        "tests/test_metrics.py::test_a_loss_that_is_no_number_is_null_since_json_has_no_nan",
    ),
    Mutation(
        "products in a scan are counted once",
        "remat/trace.py", 'equation.params["length"] if name == "scan" else 1', "1",
        "tests/remat/test_trace.py::test_products_are_found_wherever_they_are",
    ),
    Mutation(
        "a profile has one step too few",
        "profiling.py", "step == self._steps[1]", "step == self._steps[1] - 1",
        TRAIN + "test_a_profile_has_the_steps_that_were_asked_for",
    ),
    Mutation(
        "a profile goes on after the training",
        "profiling.py", "if self._on:  # training", "if False:  # training",
        TRAIN + "test_a_profile_ends_with_the_training",
    ),
    # Mesh and plan
    Mutation(
        "an axis inside the slices crosses the slow network",
        "parallel/mesh.py", "between[axis] = len(slices)", "between[-1] = len(slices)",
        "tests/parallel/test_mesh.py::test_only_the_outermost_possible_axis_crosses_slices",
    ),
    Mutation(
        "a logical axis without a rule is silently not split",
        "parallel/sharding.py", ", fallback=RulesFallback.RAISE_ERROR", "",
        "tests/parallel/test_sharding.py::test_a_name_without_a_rule_is_an_error",
    ),
    Mutation(
        "the first device's limit counts, not the tightest one's",
        "remat/ledger.py", "return min(self.devices, key=lambda d: d.budget)", "return self.devices[0]",
        "tests/remat/test_planner.py::test_what_a_device_reports_and_what_others_use_of_it_counts",
    ),
    Mutation(
        "bytes that others use on a device are taken for free",
        "remat/ledger.py", 'round(config.memory.reserve_gib * GIB) + in_use', "round(config.memory.reserve_gib * GIB)",
        "tests/remat/test_planner.py::test_what_a_device_reports_and_what_others_use_of_it_counts",
    ),
    Mutation(
        "batches that wait beside the step are forgotten",
        "remat/ledger.py", "beside_bytes=batch * (1 + config.data.prefetch_batches)", "beside_bytes=0",
        "tests/remat/test_planner.py::test_parts_are_those_of_the_arrays",
    ),
    Mutation(
        "the cost of a set of names is searched for behind saved ones too",
        "remat/graph.py", "            if self._name(value) in saved:\n                continue\n", "",
        "tests/remat/test_graph.py::test_recompute_and_saved_bytes_of_each_policy",
    ),
    Mutation(
        "a product's FLOPs are those of all devices",
        "remat/graph.py", "flops if local else flops / math.prod", "flops if True else flops / math.prod",
        "tests/remat/test_graph.py::test_recompute_and_saved_bytes_of_each_policy",
    ),
    Mutation(
        "a name that the backward pass does not need is offered",
        "remat/graph.py", "found = self._names_of(self._expand(frozenset())[1])\n        return",
        "found = set(self.names)\n        return",
        "tests/remat/test_graph.py::test_names_that_save_nothing_are_told_apart_with_the_reason",
    ),
    Mutation(
        "only neighbours of the front are mixed",
        "remat/solve.py", "richer = first < second", "richer = first + 1 == second",
        "tests/remat/test_solve.py::test_a_pair_that_is_not_neighbours_can_win",
    ),
    Mutation(
        "the richer policy comes first",
        "remat/solve.py", "parts = [(0, split, self.first), (split, self.num_second, self.second)]",
        "parts = [(0, self.num_second, self.second), (self.num_second, split, self.first)]",
        "tests/remat/test_solve.py::test_segments_put_the_richer_policy_last",
    ),
    Mutation(
        "what a compile showed corrects nothing",
        "remat/planner.py", "model.offset += peak - predicted", "model.offset += 0",
        "tests/remat/test_planner.py::test_a_wrong_model_is_corrected_by_what_was_compiled",
    ),
    Mutation(
        "a segment reads the layers of the first one",
        "model/stack.py", "else lambda slots: _read_layer(stack, layer, slots)",
        "else lambda slots: _read_layer(stack, layer * 0, slots)",
        "tests/model/test_stack.py::test_plans_give_the_gradients_of_full_recompute_to_the_bit",
    ),
    Mutation(
        "the gradients of two segments are joined the wrong way round",
        "model/stack.py", "jnp.concatenate(parts)", "jnp.concatenate(parts[::-1])",
        "tests/model/test_stack.py::test_plans_give_the_gradients_of_full_recompute_to_the_bit",
    ),
    Mutation(
        "offloaded names are recomputed",
        "model/stack.py", "names_which_can_be_offloaded=segment.offload", "names_which_can_be_offloaded=()",
        "tests/remat/test_offload.py::test_what_is_offloaded_is_in_the_program",
    ),
    Mutation(
        "waiting for the host costs nothing",
        "remat/offload.py", "waits = np.maximum(copy - graph.forward_seconds, 0)", "waits = 0 * copy",
        "tests/remat/test_offload.py::test_policies_with_offloading_are_the_best_there_are",
    ),
    Mutation(
        "gradients are not checked before anything is offloaded",
        "remat/offload.py", "    return check_gradients()\n", '    return ""\n',
        "tests/remat/test_offload.py::test_absent_devices_are_asked_to_be_trusted",
    ),
    Mutation(
        "a second segment is free of the first one's tensors",
        "remat/memory_model.py", "k * a + n * (b + g) + self._work", "n * (b + g) + self._work",
        "tests/remat/test_memory_model.py::test_two_policies_peak_where_either_segment_is_entered",
    ),
    Mutation(
        "a record of another model's step is taken",
        "remat/measure.py", "        digest.update(path.read_bytes())\n", "        pass\n",
        "tests/remat/test_measure.py::test_the_fingerprint_is_of_all_that_decides_what_is_compiled",
    ),
    Mutation(
        "compiler flags are no part of a record",
        "remat/measure.py", '        "flags": compiler_flags(),\n', "",
        "tests/remat/test_measure.py::test_the_fingerprint_is_of_all_that_decides_what_is_compiled",
    ),
    Mutation(
        "a record is believed when training starts",
        "remat/planner.py", "if compiler.peak(program) != plan.compiled_peak_bytes:", "if False:",
        "tests/remat/test_measure.py::test_a_record_that_lies_is_found_out_before_training",
    ),
    Mutation(
        "a plan that saves more for the same memory is accepted",
        "remat/planner.py", "if t.segments not in vain", "if True",
        "tests/remat/test_planner.py::test_of_two_plans_with_the_same_memory_the_one_that_promises_more_is_not_accepted",
    ),
    Mutation(
        "evaluation may take what it likes",
        "remat/planner.py", "        if peak > limits.budget:", "        if False:",
        "tests/remat/test_planner.py::test_an_evaluation_that_does_not_fit_is_refused",
    ),
    Mutation(
        "a run that takes more memory than planned says nothing",
        "metrics.py", "not 0.95 * low <= peak <= 1.05 * high", "False",
        "tests/test_metrics.py::test_a_peak_that_is_not_the_plans_is_told_once",
    ),
    Mutation(
        "the turns of a loop are not multiplied out",
        "bench/hlo_flops.py", "times[called] += times[name] * turns", "times[called] += times[name]",
        "tests/bench/test_hlo_flops.py::test_loops_are_multiplied_out",
    ),
    Mutation(
        "a misspelt activation name is accepted",
        "remat/plan.py", "        check_names(config, save)\n", "",
        "tests/configs/test_command_line.py::test_the_command_refuses_what_does_not_fit_the_devices_and_touches_nothing",
    ),
]  # fmt: skip
