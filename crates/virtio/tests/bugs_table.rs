//! Which test holds which kind of public fault, of those that have to do with
//! rings, budgets and fairness (the project's list of them, sections 1 and 3).
//!
//! A kind has tests, or a reason why it cannot exist here. The table is checked:
//! no kind is missing, every test that it names exists, and every test that bears
//! a kind's number is named.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// A kind of fault.
struct Kind {
    /// Its number in the list: B-01 is 1.
    number: u8,
    what: &'static str,
    /// `crate/path of the file::test`.
    tests: &'static [&'static str],
    /// What of it cannot exist here, and why.
    not_here: Option<&'static str>,
}

/// Every kind of sections 1 and 3; numbers that are left out are not in the list.
const LISTED: &[u8] = &[
    1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 17, 18, 19, 20, 21, 22, 25, 26, 27, 28, 29, 30, 56,
    57, 58, 59, 61, 63, 64, 66,
];

const KINDS: &[Kind] = &[
    Kind {
        number: 1,
        what: "guest address checked at its first byte only",
        tests: &[
            "virtio/tests/hostile_chain.rs::b01_buffers_and_tables_over_the_end_of_a_region",
            "virtio/tests/hostile_chain.rs::b01_receive_buffers_over_a_border",
            "virtio/tests/hostile_memory.rs::ring_areas_that_do_not_fit_are_refused_by_name",
            "virtio/tests/hostile_memory.rs::packed_ring_areas_that_do_not_fit_are_refused_by_name",
            "virtio/tests/hostile_memory.rs::chains_in_too_many_pieces_are_dropped_and_bounded",
            "virtio/src/memory.rs::spans_stay_inside_one_region_and_pieces_cross",
        ],
        not_here: None,
    },
    Kind {
        number: 3,
        what: "chain shorter than, or exactly, its net header",
        tests: &["virtio/tests/hostile_chain.rs::b03_chains_as_short_as_their_net_header"],
        not_here: None,
    },
    Kind {
        number: 4,
        what: "fast path without address check",
        tests: &[
            "virtio/tests/hostile_packed.rs::b04_descriptors_of_a_line_are_checked_one_by_one",
        ],
        not_here: None,
    },
    Kind {
        number: 5,
        what: "offload fields trusted",
        tests: &["virtio/tests/hostile_chain.rs::b05_offload_fields_are_not_trusted"],
        not_here: Some("no offload is offered, so every request for one is refused"),
    },
    Kind {
        number: 6,
        what: "field read twice",
        tests: &[
            "virtio/tests/hostile_race.rs::b06_b07_everything_changes_under_the_device",
            "virtio/tests/hostile_race.rs::b06_a_net_header_that_flips",
            "packet/src/batch.rs::the_head_does_not_follow_later_changes",
        ],
        not_here: None,
    },
    Kind {
        number: 7,
        what: "length changed between translation and copy",
        tests: &["virtio/tests/hostile_race.rs::b06_b07_everything_changes_under_the_device"],
        not_here: None,
    },
    Kind {
        number: 8,
        what: "indirect tables of bad length, nested, leading outside",
        tests: &[
            "virtio/tests/hostile_chain.rs::b08_indirect_tables",
            "virtio/tests/hostile_chain.rs::b08_entries_of_a_split_table_lead_anywhere_in_it",
            "virtio/tests/hostile_packed.rs::b08_next_means_nothing_in_a_packed_table",
            "virtio/tests/hostile_chain.rs::every_chain_error_has_its_own_count",
        ],
        not_here: None,
    },
    Kind {
        number: 9,
        what: "RX chain smaller than its net header",
        tests: &[
            "virtio/tests/hostile_rx.rs::b09_receive_chains_smaller_than_the_net_header",
            "virtio/tests/hostile_rx.rs::b09_a_net_header_over_many_buffers",
        ],
        not_here: None,
    },
    Kind {
        number: 10,
        what: "ring size changed under an in-flight table",
        tests: &[],
        not_here: Some("in-flight tables (INFLIGHT_SHMFD) are not offered"),
    },
    Kind {
        number: 11,
        what: "chains that lead to themselves or do not end",
        tests: &[
            "virtio/tests/hostile_chain.rs::b11_loops_of_a_split_ring_end",
            "virtio/tests/hostile_chain.rs::b11_long_buffers_end_a_walk",
            "virtio/tests/hostile_packed.rs::b11_a_chain_that_does_not_end_breaks_that_ring_alone",
            "virtio/tests/hostile_packed.rs::b11_what_came_before_a_chain_that_does_not_end_is_kept",
            "virtio/tests/hostile_packed.rs::b11_a_chain_that_leads_out_of_what_is_available",
            "datapath/tests/isolation_packed.rs::b11_a_chain_that_does_not_end_breaks_that_queue_alone",
        ],
        not_here: None,
    },
    Kind {
        number: 13,
        what: "more chains for one frame than a batch has",
        tests: &[
            "virtio/tests/hostile_rx.rs::b13_one_frame_in_a_thousand_chains_behind_a_full_batch",
            "virtio/tests/model_rings.rs::the_longest_frame_in_the_smallest_buffers",
        ],
        not_here: None,
    },
    Kind {
        number: 14,
        what: "frame larger than the buffer",
        tests: &[
            "virtio/tests/hostile_rx.rs::b14_a_frame_larger_than_its_buffer",
            "datapath/tests/switching.rs::a_frame_that_does_not_fit_an_unmerged_buffer_is_dropped_alone",
        ],
        not_here: None,
    },
    Kind {
        number: 15,
        what: "zero-length descriptors",
        tests: &["virtio/tests/hostile_chain.rs::b15_zero_lengths_anywhere"],
        not_here: Some("entries of the dirty log: it comes with migration (issue 5)"),
    },
    Kind {
        number: 17,
        what: "missed calls and kicks, stale heads",
        tests: &[
            "virtio/tests/hostile_wakeup.rs::b17_b58_no_call_and_no_kick_is_missed",
            "virtio/tests/hostile_wakeup.rs::b17_a_driver_that_arms_while_the_device_publishes",
            "virtio/src/notify/model.rs::split_rings_by_flags_lose_nothing",
            "virtio/src/notify/model.rs::split_rings_by_event_index_lose_nothing",
            "virtio/src/notify/model.rs::packed_rings_by_flags_lose_no_call_and_no_kick",
            "virtio/src/notify/model.rs::packed_rings_by_position_lose_no_call_and_no_kick",
        ],
        not_here: None,
    },
    Kind {
        number: 18,
        what: "first signal after a start; event suppression in both forms",
        tests: &[
            "virtio/tests/hostile_ring.rs::b18_the_first_signal_after_a_start_is_unconditional",
            "virtio/tests/hostile_packed.rs::b18_calls_by_position_on_each_side_of_the_wrap",
            "virtio/tests/hostile_packed.rs::b18_a_batch_calls_if_the_event_is_in_it",
            "virtio/tests/hostile_packed.rs::b18_calls_by_flags_of_a_packed_ring",
            "virtio/tests/change_in_place.rs::the_first_publication_for_a_new_eventfd_calls",
            "virtio/src/notify.rs::the_first_signal_after_a_start_reaches_every_event",
            "virtio/src/notify/model.rs::the_first_publication_after_a_restart_wakes_a_sleeper",
            "vhost/src/session/tests.rs::a_call_can_change_at_any_time",
        ],
        not_here: None,
    },
    Kind {
        number: 19,
        what: "more made available than the ring holds",
        tests: &[
            "virtio/tests/hostile_ring.rs::b19_index_jumps_break_that_ring_alone",
            "virtio/tests/hostile_ring.rs::b19_an_index_never_goes_back_behind_what_was_seen",
            "virtio/tests/hostile_packed.rs::b19_the_device_keeps_its_own_position_in_a_packed_ring",
            "virtio/tests/hostile_race.rs::b19_a_ring_that_is_always_available_again_is_bounded",
            "virtio/tests/hostile_long.rs::b19_frames_that_make_their_own_descriptor_available_again",
            "virtio/tests/hostile_ring.rs::heads_outside_the_table_break_that_ring_alone",
            "virtio/tests/hostile_ring.rs::the_device_keeps_its_own_position_in_the_used_ring",
            "virtio/tests/model_split.rs::an_index_jump_breaks_the_ring_where_rust_vmm_refuses_it",
            "datapath/tests/isolation.rs::a_wild_tx_index_breaks_that_queue_alone",
            "datapath/tests/isolation.rs::a_wild_rx_index_breaks_that_queue_alone",
        ],
        not_here: None,
    },
    Kind {
        number: 20,
        what: "torn index, misaligned ring",
        tests: &[
            "virtio/tests/hostile_wakeup.rs::b20_the_used_index_is_never_torn",
            "virtio/tests/hostile_wakeup.rs::b20_what_comes_back_is_whole",
            "virtio/tests/hostile_memory.rs::ring_areas_that_do_not_fit_are_refused_by_name",
            "virtio/tests/hostile_memory.rs::packed_ring_areas_that_do_not_fit_are_refused_by_name",
        ],
        not_here: None,
    },
    Kind {
        number: 21,
        what: "wrong `used.len` or `used.id`",
        tests: &[
            "virtio/tests/hostile_ring.rs::b21_used_entries_of_a_split_ring_name_the_head_and_the_bytes_written",
            "virtio/tests/hostile_packed.rs::b21_used_descriptors_name_the_last_id_and_the_bytes_written",
            "virtio/tests/hostile_packed.rs::b21_a_batch_in_order_is_one_used_descriptor",
        ],
        not_here: Some("control queues: none is offered"),
    },
    Kind {
        number: 22,
        what: "`num_buffers` without mergeable buffers",
        tests: &["virtio/tests/hostile_ring.rs::b22_num_buffers_of_every_kind_of_driver"],
        not_here: None,
    },
    Kind {
        number: 25,
        what: "net header and frame cut anywhere",
        tests: &[
            "virtio/tests/hostile_ring.rs::b25_header_and_frame_cut_anywhere",
            "virtio/tests/model_rings.rs::a_short_chain_cut_at_every_pair_of_points",
            "virtio/tests/model_rings.rs::receive_chains_cut_at_every_pair_of_points",
        ],
        not_here: None,
    },
    Kind {
        number: 26,
        what: "one bad address stops the ring",
        tests: &[
            "virtio/tests/hostile_chain.rs::b26_bad_addresses_stop_nothing_else",
            "virtio/tests/hostile_rx.rs::rx_chains_before_a_bad_one_go_back_with_it",
        ],
        not_here: None,
    },
    Kind {
        number: 27,
        what: "part of a frame's buffers taken",
        tests: &["virtio/tests/hostile_ring.rs::b27_all_of_a_frames_buffers_or_none"],
        not_here: Some("with the dirty log: it comes with migration (issue 5)"),
    },
    Kind {
        number: 28,
        what: "asserts reachable by size changes, packed lengths, crafted messages",
        tests: &[
            "virtio/tests/hostile_chain.rs::b08_indirect_tables",
            "virtio/tests/change_in_place.rs::a_ring_that_cannot_be_moved_is_unchanged",
            "vhost/src/session/tests.rs::what_decides_how_a_ring_is_read_cannot_change_while_it_runs",
            "vhost/tests/hostile_messages.rs::random_messages_with_random_descriptors_harm_nobody",
        ],
        not_here: Some("in-flight tables (INFLIGHT_SHMFD) are not offered"),
    },
    Kind {
        number: 29,
        what: "other queues with a walker of their own",
        tests: &[
            "virtio/tests/hostile_chain.rs::b11_loops_of_a_split_ring_end",
            "virtio/tests/model_rings.rs::every_position_of_the_rings_over_the_wrap",
        ],
        not_here: Some("control queues: none is offered; TX and RX have one walker"),
    },
    Kind {
        number: 30,
        what: "frames shorter than an Ethernet header",
        tests: &[
            "virtio/tests/hostile_chain.rs::b30_frames_shorter_than_an_ethernet_header",
            "switch/tests/verdicts.rs::b30_runts_in_the_middle_of_a_batch",
        ],
        not_here: None,
    },
    Kind {
        number: 56,
        what: "work that costs no budget",
        tests: &[
            "virtio/tests/hostile_rx.rs::b56_malformed_tx_chains_cost_the_budget",
            "virtio/tests/hostile_rx.rs::b56_tiny_receive_buffers_cost_the_budget",
            "virtio/tests/hostile_rx.rs::b56_receive_chains_that_share_a_tail",
            "virtio/tests/hostile_long.rs::b56_a_last_chain_that_leads_to_the_first_breaks_the_ring",
            "virtio/tests/hostile_long.rs::b56_every_descriptor_of_a_packed_chain_is_paid_for",
            "virtio/tests/hostile_long.rs::b56_the_end_of_a_long_receive_chain_is_looked_for_once",
            "virtio/tests/hostile_long.rs::b56_the_end_of_a_long_chain_ahead_of_a_burst_is_looked_for_once",
            "virtio/tests/hostile_memory.rs::a_long_chain_that_is_too_small_is_walked_once",
            "datapath/tests/isolation.rs::b56_floods_end_a_visit_by_their_copies",
            "datapath/tests/isolation.rs::a_guest_with_buffers_of_one_byte_costs_others_nothing",
            "datapath/tests/isolation.rs::a_flood_of_looped_chains_spends_its_own_budget",
            "datapath/tests/isolation.rs::a_flood_of_chains_outside_memory_spends_its_own_budget",
            "datapath/tests/isolation.rs::a_flood_of_runts_spends_its_own_budget",
            "datapath/tests/isolation.rs::a_flood_of_longest_chains_spends_its_own_budget",
            "datapath/tests/isolation_packed.rs::b56_longest_bad_chains",
            "datapath/tests/isolation_packed.rs::b56_chains_outside_memory",
            "datapath/tests/isolation_packed.rs::b56_runts",
            "datapath/tests/isolation_packed.rs::b56_longest_chains",
        ],
        not_here: None,
    },
    Kind {
        number: 57,
        what: "a flood of small frames keeps other queues waiting",
        tests: &[
            "datapath/tests/fairness.rs::b57_tiny_frames_end_a_visit_by_their_number",
            "datapath/tests/fairness.rs::b57_long_frames_end_a_visit_by_their_bytes",
            "datapath/tests/fairness.rs::b57_a_visit_can_be_a_ring_of_tiny_frames",
            "datapath/src/budget.rs::the_default_is_twice_the_ring_and_half_a_mebibyte",
            "datapath/src/budget.rs::unlimited_is_limited_and_zero_is_one",
        ],
        not_here: None,
    },
    Kind {
        number: 58,
        what: "kick lost between the last look and asking for it",
        tests: &[
            "virtio/tests/hostile_wakeup.rs::b17_b58_no_call_and_no_kick_is_missed",
            "virtio/tests/hostile_wakeup.rs::b58_a_device_that_arms_while_the_driver_publishes",
            "virtio/tests/hostile_packed.rs::b58_kicks_of_a_packed_ring_are_asked_for_at_the_position",
            "virtio/tests/model_notify.rs::kicks_by_flag_and_event_index",
            "virtio/tests/model_notify.rs::work_that_is_left_over_is_seen_before_sleeping",
            "virtio/src/notify/model.rs::looking_before_arming_loses_a_notification",
        ],
        not_here: Some("in the worker: it polls, and never sleeps on a kick"),
    },
    Kind {
        number: 59,
        what: "retrying for a stuck guest slows other ports",
        tests: &[
            "datapath/tests/isolation.rs::a_guest_without_buffers_costs_others_nothing",
            "datapath/tests/isolation_packed.rs::b59_a_packed_guest_without_room_costs_others_nothing",
            "datapath/tests/stuck.rs::workers_that_deliver_to_a_blocking_guest_are_freed",
        ],
        not_here: None,
    },
    Kind {
        number: 61,
        what: "housekeeping counted in turns, not by the clock",
        tests: &[
            "datapath/tests/fairness.rs::b61_ageing_goes_by_the_clock_under_load",
            "datapath/tests/fairness.rs::b61_turns_age_nothing",
            "datapath/tests/switching.rs::in_real_time_addresses_age_by_themselves",
        ],
        not_here: None,
    },
    Kind {
        number: 63,
        what: "dirty log missed or marked too much",
        tests: &[],
        not_here: Some("the dirty log (LOG_ALL) comes with migration (issue 5)"),
    },
    Kind {
        number: 64,
        what: "false sharing, slow set-up, prefaulting",
        tests: &[
            "virtio/tests/hostile_memory.rs::b64_setting_up_touches_few_pages",
            "virtio/tests/hostile_memory.rs::b64_counters_of_two_rings_share_no_line",
        ],
        not_here: None,
    },
    Kind {
        number: 66,
        what: "wrong drop counters; reading them makes drops",
        tests: &[
            "datapath/tests/apply.rs::looking_disturbs_nobody",
            "datapath/tests/apply.rs::snapshots_of_many_ports_are_of_one_moment",
            "datapath/src/counters.rs::a_reader_sees_one_moment",
            "datapath/src/counters.rs::a_reader_of_all_ports_sees_one_moment",
            "pollux/tests/testpmd.rs::every_frame_between_two_processes_is_delivered_or_counted",
        ],
        not_here: None,
    },
];

/// Where all crates lie.
fn crates() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this one is among them")
}

/// Names of the functions of a file that are tests.
fn tests_of(file: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut is_test = false;
    let mut names = BTreeSet::new();
    for line in text.lines().map(str::trim) {
        if line == "#[test]" {
            is_test = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            let name = rest.split(['(', '<']).next().expect("the first of some");
            if std::mem::take(&mut is_test) {
                names.insert(name.to_owned());
            }
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            is_test = false;
        }
    }
    names
}

#[test]
fn every_kind_is_in_the_table_with_a_test_or_a_reason() {
    let numbers: Vec<_> = KINDS.iter().map(|kind| kind.number).collect();
    assert_eq!(numbers, LISTED, "each once, in order");
    for kind in KINDS {
        let name = format!("B-{:02} {}", kind.number, kind.what);
        assert!(
            !kind.tests.is_empty() || kind.not_here.is_some(),
            "{name}: neither a test nor a reason"
        );
        assert_ne!(kind.not_here, Some(""), "{name}: no reason");
    }
}

#[test]
fn every_test_in_the_table_exists() {
    for kind in KINDS {
        for test in kind.tests {
            let (file, name) = test.split_once("::").expect("file::test");
            let tests = tests_of(&crates().join(file));
            assert!(tests.contains(name), "B-{:02}: no {test}", kind.number);
        }
    }
}

/// The numbers that a test bears: `b06_b07_what_it_is`.
fn numbers_of(test: &str) -> impl Iterator<Item = u8> {
    let words = test.split('_').map(|word| word.strip_prefix('b'));
    let numbers = words.map_while(|word| word?.parse().ok());
    numbers.filter(|number| LISTED.contains(number))
}

#[test]
fn every_test_with_a_number_is_in_the_table() {
    let files = |of: &str| -> Vec<PathBuf> {
        let entries = fs::read_dir(crates().join(of)).expect("a directory");
        let paths = entries.map(|entry| entry.expect("readable").path());
        paths.filter(|path| path.is_file()).collect()
    };
    let mut count = 0;
    for of in ["virtio/tests", "datapath/tests", "switch/tests"] {
        for file in files(of) {
            let file_name = file.file_name().and_then(|name| name.to_str());
            let file_name = file_name.expect("source files have plain names");
            for name in tests_of(&file) {
                let entry = format!("{of}/{file_name}::{name}");
                for number in numbers_of(&name) {
                    let kind = KINDS.iter().find(|kind| kind.number == number);
                    let tests = kind.expect("it is listed").tests;
                    assert!(
                        tests.contains(&&*entry),
                        "B-{number:02}: {entry} is left out"
                    );
                    count += 1;
                }
            }
        }
    }
    assert!(count > 30, "{count} tests bear a number");
}
