//! Names of ports: the number, and the number with its life.

use core::fmt;

/// Number of a port: index into the port tables of the switch.
///
/// Numbers are reused after a port was removed. What must not survive a reuse
/// holds a [`PortRef`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(pub u16);

impl PortId {
    /// The number as an index.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for PortId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// One life of a port number, from [`Fdb::open_port`](crate::Fdb::open_port)
/// to the next `open_port` or `close_port` of that number.
///
/// It stays the same over flushes, so workers keep one for as long as they
/// poll the port. With an outdated one nothing can be learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PortRef {
    pub(crate) id: PortId,
    pub(crate) generation: u16,
}

impl PortRef {
    /// Number of the port.
    #[inline]
    #[must_use]
    pub const fn id(self) -> PortId {
        self.id
    }

    /// Which life of the number this is; it wraps.
    #[inline]
    #[must_use]
    pub const fn generation(self) -> u16 {
        self.generation
    }
}
