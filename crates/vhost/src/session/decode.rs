//! Values out of the bodies and descriptors of messages.

use std::os::fd::OwnedFd;

use pollux_sys::EventFd;
use vhost::vhost_user::message::{VhostUserMsgValidator, VhostUserU64, VhostUserVringState};
use vm_memory::ByteValued;

use super::error::RequestError;
use super::vring::RINGS;
use crate::framing::Message;

pub(super) fn ring_index(index: u32) -> Result<usize, RequestError> {
    match usize::try_from(index) {
        Ok(wide) if wide < RINGS => Ok(wide),
        _ => Err(RequestError::NoSuchRing { index }),
    }
}

/// A value out of the bytes of a body, which has to be exactly that long.
pub(super) fn decode<T>(bytes: &[u8]) -> Result<T, RequestError>
where
    T: ByteValued + Default + VhostUserMsgValidator,
{
    let mut value = T::default();
    let wanted = size_of::<T>();
    if bytes.len() != wanted {
        return Err(RequestError::BodyLength {
            got: bytes.len(),
            wanted,
        });
    }
    value.as_mut_slice().copy_from_slice(bytes);
    if value.is_valid() {
        Ok(value)
    } else {
        Err(RequestError::Invalid)
    }
}

/// The ring of a message about one, and the number that it carries.
pub(super) fn ring_and_number(message: &Message) -> Result<(usize, u32), RequestError> {
    no_fds(message)?;
    let state: VhostUserVringState = decode(&message.body)?;
    Ok((ring_index(state.index)?, state.num))
}

/// The body of a message that is one number.
pub(super) fn number(message: &Message) -> Result<u64, RequestError> {
    decode::<VhostUserU64>(&message.body).map(|number| number.value)
}

pub(super) fn no_fds(message: &Message) -> Result<(), RequestError> {
    if message.fds.is_empty() {
        return Ok(());
    }
    Err(RequestError::FdCount {
        got: message.fds.len(),
        wanted: "none",
    })
}

pub(super) fn one_fd(message: &Message) -> Result<&OwnedFd, RequestError> {
    match &message.fds[..] {
        [fd] => Ok(fd),
        fds => Err(RequestError::FdCount {
            got: fds.len(),
            wanted: "one",
        }),
    }
}

/// SET_VRING_KICK, CALL and ERR: which ring (bits 0 to 7), and its descriptor,
/// or none if bit 8 says that there is none (VHOST_USER_VRING_NOFD_MASK).
pub(super) fn notifier(mut message: Message) -> Result<(usize, Option<EventFd>), RequestError> {
    const INDEX_MASK: u64 = 0xff;
    const NOFD: u64 = 1 << 8;
    let number = number(&message)?;
    let index = u32::try_from(number & !NOFD).unwrap_or(u32::MAX);
    let index = ring_index(index).map_err(|error| {
        if number & !(NOFD | INDEX_MASK) == 0 {
            error
        } else {
            RequestError::Invalid
        }
    })?;
    if number & NOFD != 0 {
        no_fds(&message)?;
        return Ok((index, None));
    }
    one_fd(&message)?;
    let fd = message.fds.remove(0);
    let eventfd =
        EventFd::from_peer(fd).map_err(|error| RequestError::Notifier(error.to_string()))?;
    Ok((index, Some(eventfd)))
}

pub(super) fn clone_of(eventfd: Option<&EventFd>) -> Result<Option<EventFd>, RequestError> {
    let clone = eventfd.map(EventFd::try_clone).transpose();
    clone.map_err(|error| RequestError::Notifier(error.to_string()))
}
