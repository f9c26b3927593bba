//! One thread, one core.

use std::{fmt, sync::OnceLock};

use core_affinity::CoreId;

/// Why a thread could not be pinned. The text names the core and those that
/// could have been chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PinError {
    /// The core does not exist, or this process may not use it.
    #[error("cannot pin to core {core}: this process may run on cores {}", CoreList(.available))]
    NoSuchCore {
        /// The core that was asked for.
        core: usize,
        /// What [`available_cores`] says.
        available: Vec<usize>,
    },
    /// The kernel refused, although the core was available when the process
    /// started (its cpuset has shrunk, or the core went offline).
    #[error(
        "the kernel refused to pin this thread to core {core}; \
         at the start this process could run on cores {}", CoreList(.available)
    )]
    Refused {
        /// The core that was asked for.
        core: usize,
        /// What [`available_cores`] says.
        available: Vec<usize>,
    },
}

/// The cores that this process may run on, ascending; empty if the kernel does
/// not say.
///
/// Asked once, at the first call: `sched_getaffinity` answers for the calling
/// thread, so after a thread is pinned it and its children would see one core.
/// Call it (or [`pin_current_thread`]) first in a thread that is not pinned.
#[must_use]
pub fn available_cores() -> Vec<usize> {
    static CORES: OnceLock<Vec<usize>> = OnceLock::new();
    CORES
        .get_or_init(|| {
            let ids = core_affinity::get_core_ids().unwrap_or_default();
            ids.into_iter().map(|core| core.id).collect()
        })
        .clone()
}

/// Pins the calling thread to `core`; threads that it starts later inherit that.
///
/// # Errors
///
/// [`PinError::NoSuchCore`] if `core` is not among [`available_cores`],
/// [`PinError::Refused`] if `sched_setaffinity` fails.
pub fn pin_current_thread(core: usize) -> Result<(), PinError> {
    let available = available_cores();
    // First: core_affinity indexes a fixed-size set with the number.
    if !available.contains(&core) {
        return Err(PinError::NoSuchCore { core, available });
    }
    if core_affinity::set_for_current(CoreId { id: core }) {
        Ok(())
    } else {
        Err(PinError::Refused { core, available })
    }
}

/// Core numbers as operators write them: `0-3,8`.
struct CoreList<'a>(&'a [usize]);

impl fmt::Display for CoreList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("(unknown)");
        }
        let runs = self.0.chunk_by(|a, b| a.checked_add(1) == Some(*b));
        for (index, run) in runs.enumerate() {
            let separator = if index == 0 { "" } else { "," };
            match run {
                [first, .., last] => write!(f, "{separator}{first}-{last}")?,
                run => run
                    .iter()
                    .try_for_each(|core| write!(f, "{separator}{core}"))?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn a_pinned_thread_runs_where_it_was_told() {
        let cores = available_cores();
        assert!(!cores.is_empty());
        for core in cores {
            let seen = thread::spawn(move || {
                pin_current_thread(core).unwrap();
                // From a pinned thread the others can still be named.
                assert!(available_cores().contains(&core));
                core_affinity::get_core_ids().unwrap()
            });
            assert_eq!(seen.join().unwrap(), [CoreId { id: core }]);
        }
    }

    #[test]
    fn the_error_names_the_core_and_the_choice() {
        let error = pin_current_thread(usize::MAX).unwrap_err();
        assert!(error.to_string().contains(&usize::MAX.to_string()));
        let error = PinError::NoSuchCore {
            core: 9,
            available: vec![0, 1, 2, 3, 8],
        };
        assert_eq!(
            error.to_string(),
            "cannot pin to core 9: this process may run on cores 0-3,8"
        );
    }
}
