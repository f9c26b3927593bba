//! What an operator is told when something cannot be done: what was asked, of
//! which object, why not, and what to do next.

use std::fmt;

/// Exit codes of every command. They are part of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done = 0,
    /// Failed on the way; what had been done was undone.
    Failed = 1,
    /// The command line or the plan file is wrong as it is written: trying again
    /// does not help.
    Usage = 2,
    /// Well written, but this machine refuses it now (a core that is not there, a
    /// socket that is taken). Nothing was changed.
    Refused = 5,
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Which object: a file with its line, a port, a socket.
    pub(crate) object: String,
    /// Why it cannot be used.
    pub(crate) why: String,
    /// What to do next.
    pub(crate) next: String,
}

impl Fault {
    pub(crate) fn new(
        object: impl Into<String>,
        why: impl Into<String>,
        next: impl Into<String>,
    ) -> Self {
        Self {
            object: object.into(),
            why: why.into(),
            next: next.into(),
        }
    }
}

/// Something that was asked for and not done, with everything that is wrong
/// with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The code that the process ends with.
    pub(crate) exit: Exit,
    /// What was asked for.
    pub(crate) asked: String,
    /// Never empty.
    pub(crate) faults: Vec<Fault>,
}

impl Refusal {
    pub(crate) fn new(exit: Exit, asked: impl Into<String>, faults: Vec<Fault>) -> Self {
        Self {
            exit,
            asked: asked.into(),
            faults,
        }
    }
}

impl fmt::Display for Refusal {
    /// Aligned lines; a further line of a part is indented like its first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome = match self.exit {
            Exit::Failed => "failed, and undone",
            _ => "refused, nothing was changed",
        };
        match self.faults.len() {
            0 | 1 => writeln!(f, "pollux: {outcome}")?,
            count => writeln!(f, "pollux: {outcome}; {count} problems")?,
        }
        write_part(f, "asked", &self.asked)?;
        for fault in &self.faults {
            if self.faults.len() > 1 {
                writeln!(f)?;
            }
            write_part(f, "object", &fault.object)?;
            write_part(f, "why", &fault.why)?;
            write_part(f, "next", &fault.next)?;
        }
        Ok(())
    }
}

fn write_part(f: &mut fmt::Formatter<'_>, label: &str, text: &str) -> fmt::Result {
    let mut label = label;
    for line in text.lines() {
        writeln!(f, "  {label:<8}{line}")?;
        label = "";
    }
    Ok(())
}

impl std::error::Error for Refusal {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_fault_has_four_parts() {
        let refusal = Refusal::new(
            Exit::Refused,
            "run plan two.toml",
            vec![Fault::new(
                "port \"vm1\"",
                "its socket\nis taken",
                "end that process",
            )],
        );
        assert_eq!(
            refusal.to_string(),
            "\
pollux: refused, nothing was changed
  asked   run plan two.toml
  object  port \"vm1\"
  why     its socket
          is taken
  next    end that process
"
        );
    }

    #[test]
    fn several_faults_are_told_apart() {
        let fault = |object| Fault::new(object, "no", "yes");
        let refusal = Refusal::new(Exit::Failed, "run", vec![fault("a"), fault("b")]);
        assert_eq!(
            refusal.to_string(),
            "\
pollux: failed, and undone; 2 problems
  asked   run

  object  a
  why     no
  next    yes

  object  b
  why     no
  next    yes
"
        );
    }
}
