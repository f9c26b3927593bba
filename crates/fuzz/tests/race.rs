//! The saved lies of the lying guest once more, while another thread changes
//! every word under the device.

use std::fs;

use pollux_fuzz::{inputs_dir, lying_guest};

/// Each input is run so often: a second or two in all.
const ROUNDS: u64 = 8;

#[test]
fn the_device_holds_while_everything_changes() {
    let entries = fs::read_dir(inputs_dir("corpus", "lying_guest")).expect("the corpus");
    let mut count = 0;
    for entry in entries {
        let path = entry.expect("a file").path();
        println!("{}", path.display());
        let bytes = fs::read(&path).expect("a file");
        lying_guest::run_racing(&bytes, ROUNDS);
        count += 1;
    }
    assert!(count > 0, "there is nothing to run");
}
