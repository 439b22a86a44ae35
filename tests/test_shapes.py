"""Calls of the library have the shapes that it annotates. Quick tests are run again with the checks on: they call five
of six functions that annotate a shape.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WALK = """
check_wrong_shapes.py
methods/controllers/test_auto.py::test_a_batch_is_decoded_by_its_own_costs
methods/controllers/test_auto.py::test_what_a_batch_costs_is_measured_in_a_batch
methods/controllers/test_calibrated_length.py::test_it_changes_no_text_and_one_token_is_drafted_at_least
methods/controllers/test_predicted.py::test_the_command_trains_and_the_controller_loads
methods/controllers/test_selected.py::test_the_command_trains_and_the_controller_loads
integrations/test_grammar.py::test_a_batch_is_asked_about_row_by_row_and_nothing_else_is_answered_for_all
tools/test_advice.py::test_the_command_and_its_pictures
tools/test_along.py::test_the_a_of_other_trees_is_told_only_where_the_text_does_not_depend_on_the_tree
decoding/test_reuse.py::test_a_drafter_that_keeps_nothing_is_shown_the_whole_prompt
methods/drafters/test_blocks.py::test_a_model_of_transformers_is_loaded_by_its_spec
methods/drafters/test_blocks.py::test_convolutions_that_leave_rows_as_they_are_make_a_dflash_model
methods/drafters/test_blocks.py::test_the_text_is_the_target_s_in_float32[DSpark of DeepSpec, RNN]
methods/drafters/test_blocks.py::test_the_text_is_the_target_s_in_float32[Domino]
methods/drafters/test_block_files.py::TestProbe::test_its_numbers_are_those_of_the_loops
methods/drafters/test_blocks.py::test_nothing_is_drafted_below_a_parent_of_little_confidence
methods/drafters/test_eagle3.py::test_norms_may_be_named_apart
methods/drafters/test_early_exit.py::TestFiles::test_what_was_saved_drafts
methods/drafters/test_few.py
methods/drafters/test_mtp.py::test_the_first_token_is_what_transformers_drafts
methods/drafters/test_one_pass.py::test_nothing_is_known_beyond_the_last_head
methods/drafters/test_parallel_spec.py::TestFiles::test_it_is_loaded_by_its_spec
methods/drafters/test_store.py::TestCommand::test_rows_of_prompt_and_answer_and_given_constants
methods/drafters/test_trimmed.py::test_a_wrong_vocabulary_is_one_line
backends/test_cuda_graphs.py::test_a_copy_makes_its_own_and_a_watched_layer_begins_anew
integrations/test_log_probs.py::test_one_of_them_alone_and_none_without_the_output_object
models/test_canonical_target.py::test_what_cannot_be_canonical_is_refused
models/test_chain_lm.py::test_sampled_trees_with_equal_siblings_are_drafted_and_judged
models/test_recurrent.py::test_a_layer_that_was_given_another_forward_is_not_passed_by
models/test_state_space.py::test_the_scan_along_every_path
methods/policies/test_policies_field.py::test_drawn_examples
methods/policies/test_policies_field.py::test_sequoia_draws_its_shape
training/test_heads_training.py::test_each_kind_is_trained_by_its_papers_recipe_unless_told_otherwise
training/test_heads_training.py::test_the_feature_loss_is_on_what_the_output_layer_reads
training/test_parallel_training.py::test_every_place_of_a_block_is_asked_what_follows_its_parent
methods/verifiers/test_verifiers_field.py::test_a_drafter_may_lack_tokens
methods/verifiers/test_verifiers_field.py::test_equal_ratios_have_to_be_ordered_as_they_are_chosen
methods/verifiers/test_verifiers_field.py::test_the_tree_keeps_the_law_that_every_child_was_drawn_from
methods/verifiers/test_verifiers_field.py::test_typical_acceptance_keeps_the_longest_plausible_path
"""


@pytest.mark.slow
def test_calls_have_the_shapes_that_are_annotated(kernel: None) -> None:
    """In a process of its own: the checks are put in where the library is imported. A test that is not found has
    another name, or is gone: another one that calls the same is to take its place.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-m", ""]
    command += [f"tests/{name}" for name in WALK.split("\n") if name]
    found = subprocess.run(command, cwd=ROOT, env=environment | {"CHECK_SHAPES": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-5000:] + found.stderr[-2000:]
