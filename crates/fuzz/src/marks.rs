//! What an input has led to. Coverage shows which code ran; a mark says which
//! situation was met, in words that a report can print and a file can be named
//! after.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Debug;

use pollux_virtio::{ChainError, ChainErrorCounts};

thread_local! {
    static REACHED: RefCell<BTreeSet<String>> = const { RefCell::new(BTreeSet::new()) };
}

/// Notes that the input at hand has led to `mark`: lower case and hyphens.
pub(crate) fn reach(mark: &str) {
    REACHED.with_borrow_mut(|reached| {
        if !reached.contains(mark) {
            reached.insert(mark.to_owned());
        }
    });
}

/// Notes that `value` was met, by the name of its variant.
pub(crate) fn reach_variant(prefix: &str, value: impl Debug) {
    reach(&format!("{prefix}-{}", kebab(&value)));
}

/// Notes every chain error that a ring has counted.
pub(crate) fn reach_chain_errors(prefix: &str, counts: ChainErrorCounts) {
    for error in ChainError::ALL {
        if counts.get(*error) > 0 {
            reach_variant(prefix, error);
        }
    }
}

/// The marks of chain errors on a ring, other than those in `never`.
pub(crate) fn chain_error_marks(prefix: &str, never: &[ChainError]) -> Vec<String> {
    let errors = ChainError::ALL.iter();
    errors
        .filter(|error| !never.contains(error))
        .map(|error| format!("{prefix}-{}", kebab(error)))
        .collect()
}

/// The marks since the last call on this thread.
#[must_use]
pub fn take() -> BTreeSet<String> {
    REACHED.take()
}

/// `AvailIndex { from: 1 }` as `avail-index`.
fn kebab(value: &impl Debug) -> String {
    let text = format!("{value:?}");
    let name = text.split([' ', '(', '{']).next().unwrap_or_default();
    let mut mark = String::with_capacity(name.len() + 4);
    for c in name.chars() {
        if c.is_ascii_uppercase() && !mark.is_empty() {
            mark.push('-');
        }
        mark.push(c.to_ascii_lowercase());
    }
    mark
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_taken_once() {
        let _ = take();
        reach_variant("tx", ChainError::IndirectLength);
        reach("kept");
        reach("kept");
        let marks: Vec<String> = take().into_iter().collect();
        assert_eq!(marks, ["kept", "tx-indirect-length"]);
        assert!(take().is_empty());
        let all = chain_error_marks("tx", &[ChainError::Runt]);
        assert_eq!(all.len() + 1, ChainError::ALL.len());
    }
}
