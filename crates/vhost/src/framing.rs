//! Messages out of a stream of bytes and file descriptors.
//!
//! A message is a header of 12 bytes (request, flags, size of the body; all in
//! the byte order of the machine, which both ends are on) and a body
//! (vhost-user specification, "Header"). [`Framer`] says how many bytes it wants
//! next and never wants more than the message at hand has: so descriptors that
//! come with them belong to this message.

use std::os::fd::OwnedFd;

use vhost::vhost_user::message::VhostUserHeaderFlag;

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 12;
/// Most bytes of a body: far above the largest message, a table of 8 regions
/// with 264 bytes.
pub(crate) const BODY_BYTES_MAX: usize = 4096;
/// Most descriptors of a message: one for each region of SET_MEM_TABLE.
pub(crate) const FDS_MAX: usize = 8;

/// The stream cannot be understood any further: the connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FramingError {
    #[error("the header has version {0} instead of 1")]
    Version(u32),
    #[error("a reply came where a request should be")]
    Reply,
    #[error("the header announces a body of {0} bytes, more than {BODY_BYTES_MAX}")]
    BodyTooLong(u32),
    #[error("more than {FDS_MAX} file descriptors came with one message")]
    TooManyFds,
    #[error("file descriptors were cut off a message: too many came, or too many files are open")]
    FdsCutOff,
    #[error("the stream ended inside a message")]
    EndInside,
}

/// A message of the frontend. Dropping it closes its descriptors.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) request: u32,
    flags: u32,
    pub(crate) body: Vec<u8>,
    pub(crate) fds: Vec<OwnedFd>,
}

impl Message {
    /// True if the frontend waits for an acknowledgement (`need_reply`).
    pub(crate) fn needs_reply(&self) -> bool {
        self.flags & VhostUserHeaderFlag::NEED_REPLY.bits() != 0
    }
}

/// The bytes of a reply to `request`.
pub(crate) fn reply(request: u32, body: &[u8]) -> Vec<u8> {
    let flags = 1 | VhostUserHeaderFlag::REPLY.bits();
    let size = u32::try_from(body.len()).expect("a reply is short");
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len());
    for word in [request, flags, size] {
        bytes.extend(word.to_ne_bytes());
    }
    bytes.extend(body);
    bytes
}

/// Puts messages together.
#[derive(Debug, Default)]
pub(crate) struct Framer {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Framer {
    /// How many bytes to read next, at least 1.
    pub(crate) fn wanted(&self) -> usize {
        self.len() - self.bytes.len()
    }

    /// Takes up to [`wanted`](Self::wanted) bytes and what came with them;
    /// returns a message once it is whole.
    ///
    /// # Errors
    /// [`FramingError`]; the descriptors were closed.
    pub(crate) fn push(
        &mut self,
        bytes: &[u8],
        fds: impl IntoIterator<Item = OwnedFd>,
    ) -> Result<Option<Message>, FramingError> {
        debug_assert!(bytes.len() <= self.wanted());
        self.fds.extend(fds);
        if self.fds.len() > FDS_MAX {
            return Err(FramingError::TooManyFds);
        }
        let had_header = self.bytes.len() >= HEADER_BYTES;
        self.bytes.extend(bytes);
        if !had_header && self.bytes.len() >= HEADER_BYTES {
            self.check_header()?;
        }
        if self.bytes.len() < self.len() {
            return Ok(None);
        }
        let body = self.bytes.split_off(HEADER_BYTES);
        let message = Message {
            request: self.word(0),
            flags: self.word(1),
            body,
            fds: std::mem::take(&mut self.fds),
        };
        self.bytes.clear();
        Ok(Some(message))
    }

    /// The stream has ended.
    ///
    /// # Errors
    /// If it ended inside a message.
    pub(crate) fn end(&self) -> Result<(), FramingError> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            Err(FramingError::EndInside)
        }
    }

    /// Bytes of the message at hand, as far as is known.
    fn len(&self) -> usize {
        if self.bytes.len() < HEADER_BYTES {
            HEADER_BYTES
        } else {
            HEADER_BYTES + usize::try_from(self.word(2)).unwrap_or(usize::MAX)
        }
    }

    fn check_header(&self) -> Result<(), FramingError> {
        let (flags, size) = (self.word(1), self.word(2));
        let version = flags & VhostUserHeaderFlag::VERSION.bits();
        if version != 1 {
            return Err(FramingError::Version(version));
        }
        if flags & VhostUserHeaderFlag::REPLY.bits() != 0 {
            return Err(FramingError::Reply);
        }
        if usize::try_from(size).is_ok_and(|size| size <= BODY_BYTES_MAX) {
            Ok(())
        } else {
            Err(FramingError::BodyTooLong(size))
        }
    }

    /// A word of the header, which is there.
    fn word(&self, index: usize) -> u32 {
        let bytes = &self.bytes[4 * index..4 * index + 4];
        u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes_of(request: u32, flags: u32, size: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [request, flags, size]
            .iter()
            .flat_map(|word| word.to_ne_bytes())
            .collect();
        bytes.extend(body);
        bytes
    }

    fn fd() -> OwnedFd {
        pollux_sys::memfd("test", 4096).expect("memfd")
    }

    #[test]
    fn a_message_in_single_bytes_is_put_together() {
        let mut framer = Framer::default();
        for round in 0..2 {
            let bytes = bytes_of(7 + round, 0x9, 3, b"abc");
            for (index, byte) in bytes.iter().enumerate() {
                assert!(framer.wanted() >= 1 && framer.wanted() <= bytes.len() - index);
                let fds = (index == 0 || index == 13).then(fd);
                let message = framer.push(&[*byte], fds).expect("sound");
                if index + 1 < bytes.len() {
                    assert!(message.is_none());
                    continue;
                }
                let message = message.expect("whole");
                assert_eq!(
                    (message.request, &message.body[..]),
                    (7 + round, &b"abc"[..])
                );
                assert_eq!(message.fds.len(), 2);
                assert!(message.needs_reply());
            }
        }
        assert_eq!(framer.end(), Ok(()));
    }

    #[test]
    fn what_cannot_be_a_request_is_refused() {
        let error = |bytes: &[u8], fds: usize| {
            Framer::default()
                .push(bytes, (0..fds).map(|_| fd()))
                .expect_err("bad")
        };
        assert_eq!(error(&bytes_of(1, 2, 0, &[]), 0), FramingError::Version(2));
        assert_eq!(error(&bytes_of(1, 5, 0, &[]), 0), FramingError::Reply);
        assert_eq!(
            error(&bytes_of(1, 1, 4097, &[]), 0),
            FramingError::BodyTooLong(4097)
        );
        assert_eq!(error(&[1], 9), FramingError::TooManyFds);
        let mut framer = Framer::default();
        assert!(
            framer
                .push(&bytes_of(1, 1, 8, &[]), [])
                .expect("sound")
                .is_none()
        );
        assert_eq!(framer.wanted(), 8);
        assert_eq!(framer.end(), Err(FramingError::EndInside));
    }
}
