//! What becomes of chains and frames.

use pollux_packet::DropReason;

use super::memory::Memory;
use super::model::{Chain, Model};

/// Longest and shortest frame.
const FRAME_MAX: u32 = 65_535;
const FRAME_MIN: u32 = 14;
/// Pieces of a buffer beyond one: a map has three regions at most.
const CUTS_MAX: usize = 2;

/// What a TX chain is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Frame(Vec<u8>),
    Drop(DropReason),
}

#[derive(Debug)]
pub(super) struct Judged {
    pub(super) outcome: Outcome,
    pub(super) pieces_max: usize,
}

impl Judged {
    /// The ring is disabled.
    pub(super) fn discarded() -> Self {
        Self {
            outcome: Outcome::Drop(DropReason::QueueDisabled),
            pieces_max: 0,
        }
    }

    pub(super) fn drop(&self) -> Option<DropReason> {
        match self.outcome {
            Outcome::Frame(_) => None,
            Outcome::Drop(reason) => Some(reason),
        }
    }
}

/// The frame of a TX chain, behind its net header.
pub(super) fn judge(memory: &Memory, chain: &Chain, header_bytes: u32) -> Judged {
    let mut bytes: Vec<u8> = Vec::new();
    let mut is_too_long = false;
    for &(addr, len) in &chain.buffers {
        let so_far = u32::try_from(bytes.len()).expect("short");
        if so_far + len > header_bytes + FRAME_MAX {
            is_too_long = true;
            break;
        }
        bytes.extend_from_slice(memory.known(addr, len));
    }
    let header = header_bytes as usize;
    let outcome = if is_too_long {
        Outcome::Drop(DropReason::Oversize)
    } else if bytes.len() < header + FRAME_MIN as usize {
        Outcome::Drop(DropReason::Runt)
    } else if bytes[0] & 1 != 0 || bytes[1] != 0 {
        // NEEDS_CSUM, or a gso_type: not negotiated (section 5.1.6.2).
        Outcome::Drop(DropReason::BadOffload)
    } else {
        Outcome::Frame(bytes.split_off(header))
    };
    Judged {
        outcome,
        pieces_max: chain.buffers.len() * (1 + CUTS_MAX),
    }
}

/// What becomes of frames for an RX ring.
#[derive(Debug, Default)]
pub(super) struct Fill {
    /// What is written to each chain that is returned.
    pub(super) chains: Vec<Vec<u8>>,
    pub(super) drops: Vec<DropReason>,
    /// Bytes of the frames that found room.
    pub(super) frame_bytes: u64,
    /// One of them has more than one chain.
    pub(super) merged: bool,
    /// Buffers that were looked at.
    pub(super) walked: usize,
}

/// Frame after frame, chain after chain.
pub(super) fn fill(model: &Model, frames: &[&[u8]], header_bytes: u32, mergeable: bool) -> Fill {
    let header_bytes = header_bytes as usize;
    let mut fill = Fill::default();
    for frame in frames {
        let whole = [&vec![0; header_bytes], *frame].concat();
        match fill_one(model, &mut fill, &whole, header_bytes, mergeable) {
            Ok(mut parts) => {
                // num_buffers, where there is one (section 5.1.6.4.1).
                if header_bytes == 12 {
                    let count = u16::try_from(parts.len()).expect("few");
                    let mut places = parts.iter_mut().flatten().skip(10);
                    for byte in count.to_le_bytes() {
                        *places.next().expect("12 bytes") = byte;
                    }
                }
                fill.merged |= parts.len() > 1;
                fill.frame_bytes += frame.len() as u64;
                fill.chains.append(&mut parts);
            }
            Err((reason, returned)) => {
                fill.drops.push(reason);
                let chains = fill.chains.len() + returned;
                fill.chains.resize(chains, Vec::new());
            }
        }
    }
    fill
}

/// What one frame writes to the next chains; or why it is dropped, and how many
/// chains go back for it.
fn fill_one(
    model: &Model,
    fill: &mut Fill,
    whole: &[u8],
    header_bytes: usize,
    mergeable: bool,
) -> Result<Vec<Vec<u8>>, (DropReason, usize)> {
    let mut rest = whole;
    let mut parts = Vec::new();
    while !rest.is_empty() {
        let next = fill.chains.len() + parts.len();
        let Some(chain) = model.out.get(next) else {
            return Err((DropReason::RxRingFull, 0));
        };
        fill.walked += chain.buffers.len();
        let now = rest.len().min(chain.bytes() as usize);
        let is_short = now < rest.len() && !mergeable;
        if now == 0 || (is_short && now < header_bytes) {
            return Err((DropReason::BadRxChain, parts.len() + 1));
        }
        if is_short {
            return Err((DropReason::RxBufferTooSmall, 0));
        }
        let (part, later) = rest.split_at(now);
        parts.push(part.to_vec());
        rest = later;
    }
    Ok(parts)
}
