"""Where each row of PAIN_POINTS that is promised today has its named test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = {
    1: "tests/dist/test_checkpoint_engine.py::test_row01_an_engine_resumes_at_another_world_and_stage",
    2: "tests/dist/test_engine_pain_points.py::test_rows_01_02_37_another_world_and_stage_goes_on",
    3: "tests/dist/test_engine_pain_points.py::test_row03_a_ragged_epoch_equals_big_batches",
    4: "tests/dist/test_parity.py::test_row04_stages_equal_one_process",
    5: "tests/dist/test_engine_pain_points.py::test_row05_random_delays_change_no_bit",
    6: "tests/dist/test_rlhf_weight_sync.py::test_rows_06_43_greedy_tokens_and_logprobs_are_the_gathered_model_s",
    7: "tests/dist/test_expert_parallel.py::test_row07_disjoint_routing_and_unhit_experts_complete_at_stage_3",
    8: "tests/dist/test_engine.py::test_row08_a_random_branch_every_step",
    10: "tests/dist/test_gathered_parameters.py::test_row10_shape_and_init_as_unsharded",
    11: "tests/dist/test_rlhf_steps.py::test_row11_what_is_saved_is_the_merged_model_and_an_adapter_that_is_not_empty",
    12: "tests/dist/test_engine_pain_points.py::test_row12_recomputation_with_dropout_changes_no_bit",
    13: "tests/unit/test_zero_init.py::test_row13_nothing_of_torch_is_patched_and_other_models_stay_plain",
    14: "tests/dist/test_engine.py::test_row14_three_engines_interleaved_equal_three_runs",
    15: "tests/dist/test_engine.py::test_row15_two_losses_shared_modules_retained_graphs",
    16: "tests/dist/test_engine.py::test_row16_the_unmodified_loop_gives_the_same",
    17: "tests/dist/test_engine.py::test_row17_live_tensors_have_the_dtypes_of_the_config",
    18: "tests/dist/test_engine_pain_points.py::test_row18_a_model_without_hidden_size_takes_auto",
    19: "tests/unit/test_config_resolve.py::test_row19_a_mismatch_shows_both_sides_and_the_missing_launcher_variable",
    20: "tests/dist/test_engine_pain_points.py::test_rows_18_19_20_bad_input_is_one_clear_error",
    21: "tests/dist/test_plan.py::test_row21_offload_stays_within_the_plan_and_saves_what_it_says",
    22: "tests/dist/test_plan.py::test_row22_the_activations_of_many_tokens_are_in_the_plan",
    23: "tests/dist/test_offload_rows.py::test_row23_transfers_run_beside_the_computation",
    24: "tests/unit/test_optim_nvme_step.py::test_row24_a_tensor_larger_than_the_buffer",
    25: "tests/repo/test_wheel.py::test_wheel_works_without_a_compiler",
    26: "tests/repo/test_wheel.py::test_wheel_works_without_a_compiler",
    27: "tests/repo/test_import_cost.py::test_import_is_quick",
    28: "tests/e2e/test_run_concurrent.py::test_row28_ranks_that_train_stay_within_a_budget_of_lines",
    29: "tests/dist/test_launchers.py::test_row29_ranks_of_every_launcher_meet",
    30: "tests/e2e/test_run_concurrent.py::test_two_jobs_run_at_once",
    31: "tests/e2e/test_run_failures.py::test_killing_one_rank_ends_the_job",
    32: "tests/dist/test_engine.py::test_row32_memory_returns_after_an_engine",
    33: "tests/unit/test_checkpoint_save.py::test_row33_no_pickle_on_disk",
    34: "tests/unit/test_checkpoint_export_hf.py::test_row34_an_export_loads_equal_with_ties_on_and_off",
    37: "tests/dist/test_engine_pain_points.py::test_rows_01_02_37_another_world_and_stage_goes_on",
    38: "tests/dist/test_pipeline_engine.py::test_row38_a_pipeline_with_any_stage_of_zero_equals_one_process",
    39: "tests/dist/test_ulysses.py::test_row39_odd_lengths_masks_heads_and_documents",
    40: "tests/dist/test_engine_pain_points.py::test_row40_compiled_equals_eager",
    41: "tests/unit/test_serve_engine.py::test_row41_the_server_gives_what_hugging_face_gives",
    42: "tests/unit/test_serve_engine.py::test_row42_overload_completes_and_a_broken_engine_fails_health",
    43: "tests/dist/test_rlhf_weight_sync.py::test_rows_06_43_greedy_tokens_and_logprobs_are_the_gathered_model_s",
    44: "tests/dist/test_engine_pain_points.py::test_row44_each_optimiser_at_each_stage",
    "44, offloaded": "tests/dist/test_optim_onebit.py::test_row44_offloaded_states_follow_the_papers_algorithm",
    "44, bytes": "tests/dist/test_optim_onebit.py::test_row44_offloaded_bytes_are_counted",
    45: "tests/dist/test_frozen.py::test_row45_a_frozen_base_in_few_bits_trains_its_adapters_and_thaws",
    46: "tests/dist/test_engine.py::test_row46_one_curve_for_any_world_and_accumulation",
    47: "tests/dist/test_expert_parallel.py::test_row47_experts_are_stored_under_global_ids",
}


@pytest.mark.parametrize("row", ROWS)
def test_the_row_has_its_test(row):
    path, _, name = ROWS[row].partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
