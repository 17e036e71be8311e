"""The list of 48 hostile inputs: each has a test, which this file names.

Requests (1 to 31) are in test_hostile.py, by their numbers; what else is tested of them, the files (32 to 41) and the
faults at runtime (42 to 48) stand below.
"""

import re
from pathlib import Path

import pytest

from tests.serve.test_hostile import CASES

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    5: ["decode/test_sampler.py: test_extreme_temperatures_are_the_limits"],
    22: ["text/test_chat.py: test_hostile_templates_end_in_an_error test_the_process_has_no_files_and_no_environment"],
    23: ["decode/test_grammar.py: test_hostile_grammars_are_refused_in_words"],
    24: [
        "decode/test_grammar.py: test_hostile_grammars_are_refused_in_words"
        " test_a_grammar_that_ends_its_trial_harms_no_other",
        "test_grammars.py: test_others_go_on_while_a_hostile_grammar_is_tried",
    ],
    25: ["decode/test_grammar.py: test_nothing_is_left_of_grammars_that_are_done"],
    27: [
        "test_choosing.py: test_a_width_that_no_search_has_is_refused test_beams_end_at_stop_strings_which_cross_tokens"
        " test_a_length_penalty_at_its_border_can_be_reckoned_at_any_length",
        "test_api.py: test_beams_draw_nothing_whatever_is_said_of_drawing",
        "decode/test_beam.py: test_a_search_is_the_one_of_the_definition",
    ],
    29: ["cache/test_snapshot.py: test_names_that_are_no_files_are_refused"],
    30: ["serve/test_server.py: test_every_route_but_health_demands_a_key test_the_socket_demands_a_key"],
    32: ["checkpoints/test_safetensors.py: test_a_wrong_header_length_is_refused test_damaged_headers_are_refused"],
    33: [
        "checkpoints/test_safetensors.py: test_damaged_headers_are_refused"
        " test_a_shape_that_is_not_the_bytes_is_refused test_a_gap_cannot_make_up_for_a_missing_end"
        " test_a_huge_claim_takes_no_memory"
    ],
    34: [
        "checkpoints/test_folder.py: test_a_truncated_shard_is_told_by_how_much test_a_tensor_in_two_shards_is_refused"
        " test_missing_shards_and_an_index_that_leaves_the_folder_are_refused test_pickles_and_pointers_are_named"
    ],
    35: [
        "checkpoints/test_folder.py: test_missing_extra_and_renamed_tensors_are_listed"
        " test_an_untied_head_must_be_there test_values_that_are_not_finite_are_refused_by_name"
        " test_other_dtypes_are_refused"
    ],
    36: [
        "checkpoints/test_families.py: test_values_out_of_range_are_refused_by_name test_heads_share_evenly"
        " test_arithmetic_that_we_lack_is_refused_by_name test_unknown_keys_are_refused_and_harmless_ones_pass"
    ],
    37: [
        "text/test_tokenizer.py: test_damaged_folders_are_refused_with_the_reason"
        " test_a_pattern_that_backtracks_for_ever_is_an_error_not_a_crash"
        " test_tokens_that_the_model_has_no_rows_for_are_refused_when_used"
    ],
    38: [
        "checkpoints/test_gguf.py: test_forged_headers_are_refused",
        "checkpoints/test_damaged.py: test_damaged_gguf_files test_a_damaged_part_of_a_model",
    ],
    39: [
        "cache/test_snapshot.py: test_a_pickle_runs_nothing",
        "checkpoints/test_folder.py: test_pickles_and_pointers_are_named",
    ],
    40: [
        "cache/test_snapshot.py: test_every_flipped_bit_is_found test_every_truncation_is_found"
        " test_another_model_is_refused_by_name test_the_newest_of_two_writers_stays_whole"
        " test_a_file_that_is_deleted_while_it_is_read_is_read test_killed_while_saving_leaves_the_old_or_the_new_file"
    ],
    41: [
        "cache/test_snapshot.py: test_names_that_are_no_files_are_refused test_a_failing_disk_leaves_the_old_file"
        " test_a_disk_that_fails_while_the_file_is_read_is_told",
        "checkpoints/test_packing.py: test_a_folder_that_cannot_be_written_is_told",
        "serve/test_faults.py: test_41_a_disk_that_fails_while_the_model_is_loaded"
        " test_41_a_network_disk_that_hangs_while_the_model_is_loaded",
    ],
    42: [
        "serve/test_server.py: test_a_client_that_goes_away_frees_its_pages"
        " test_a_closed_connection_is_noticed_behind_another_request",
        "serve/test_waiting.py: test_a_client_that_goes_away_at_the_end_harms_nobody",
    ],
    43: [
        "serve/test_server.py: test_a_slow_reader_pauses_its_request",
        "serve/test_parts.py: test_a_slow_reader_of_several_texts_pauses_them",
        "serve/test_limits.py: test_a_client_that_reads_nothing_is_closed",
    ],
    44: [
        "serve/test_server.py: test_a_drain_lets_requests_finish_and_refuses_new_ones"
        " test_the_second_signal_ends_at_once test_a_fault_of_the_engine_reaches_health_and_every_client",
        "serve/test_load.py: test_sigterm_loses_no_accepted_reply",
        "serve/test_readiness.py: test_requests_that_wait_for_the_model_are_told_that_the_server_ends"
        " test_a_request_that_is_being_prepared_when_the_server_ends_is_told",
        "engine/test_failing_memory.py: test_texts_end_right_all_the_same",
        "cache/test_snapshot.py: test_killed_while_saving_leaves_the_old_or_the_new_file",
    ],
    45: [
        "serve/test_faults.py: test_45_the_clock_is_set_back_again_and_again",
        "backends/test_threads.py: test_a_fork_in_the_midst_of_a_step_of_another_thread",
        "engine/test_loop.py: test_a_forked_child_is_told_and_ends",
    ],
    46: ["test_llm.py: test_nan_weights_of_one_row_fail_that_prompt_and_keep_the_others"],
    47: ["serve/test_faults.py: test_47_hashes_of_pages_are_keyed"],
    48: ["engine/test_loop.py: test_cancel_ends_a_request_in_every_state_and_nobody_else"],
}


def source(file: str) -> str:
    return (TESTS / file).read_text(encoding="utf-8")


def test_each_input_has_a_test() -> None:
    by_name = {int(number) for number in re.findall(r"\ndef test_(\d+)_", source("serve/test_hostile.py"))}
    assert {case.number for case in CASES} | by_name | ELSEWHERE.keys() == set(range(1, 49))
    assert set(range(1, 32)) <= {case.number for case in CASES} | by_name, "each request is asked over HTTP"


@pytest.mark.parametrize("number", ELSEWHERE)
def test_other_inputs_are_tested(number: int) -> None:
    for entry in ELSEWHERE[number]:
        file, names = entry.split(": ")
        for name in names.split():
            assert f"\ndef {name}(" in source(file), f"{file} has no {name}"
