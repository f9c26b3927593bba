//! A connection without a socket, for fuzz targets: what they need of the
//! framing and the session, and nothing that the switch uses.
//!
//! The rings are real ones, held here in the place of a port, so that a session
//! that leaves a ring in memory which is gone is found by the next
//! [`Connection::poll`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use pollux_packet::{BatchStore, BurstLimit, FrameSet, Offload, Span};
use pollux_sys::EventFd;
use pollux_virtio::device::{RingConfig, RxRing, TxRing};
use pollux_virtio::{GuestMemory, RingAreas, RingError};

use crate::framing::Framer;
use crate::session::{GUEST_RX, RequestError, Rings, Session};

/// The rings of a session, each with whether it is enabled.
#[derive(Debug, Default)]
struct HeldRings {
    tx: Option<(TxRing, bool)>,
    rx: Option<(RxRing, bool)>,
}

impl Rings for HeldRings {
    fn start(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        config: RingConfig,
        enabled: bool,
    ) -> Result<u16, RequestError> {
        let memory = Arc::clone(memory);
        if ring == GUEST_RX {
            assert!(self.rx.is_none(), "the RX ring is started twice");
            let ring = RxRing::new(memory, config)?;
            let base = ring.base();
            self.rx = Some((ring, enabled));
            Ok(base)
        } else {
            assert!(self.tx.is_none(), "the TX ring is started twice");
            let ring = TxRing::new(memory, config)?;
            let base = ring.base();
            self.tx = Some((ring, enabled));
            Ok(base)
        }
    }

    fn stop(&mut self, ring: usize) -> Option<u16> {
        if ring == GUEST_RX {
            self.rx.take().map(|(ring, _)| ring.base())
        } else {
            self.tx.take().map(|(ring, _)| ring.base())
        }
    }

    fn set_enabled(&mut self, ring: usize, enabled: bool) -> Result<(), RequestError> {
        let flag = if ring == GUEST_RX {
            self.rx.as_mut().map(|(_, flag)| flag)
        } else {
            self.tx.as_mut().map(|(_, flag)| flag)
        };
        *flag.expect("a ring is enabled only while it runs") = enabled;
        Ok(())
    }

    fn set_call(&mut self, ring: usize, call: Option<EventFd>) {
        let old = if ring == GUEST_RX {
            self.rx.as_mut().map(|(ring, _)| ring.set_call(call))
        } else {
            self.tx.as_mut().map(|(ring, _)| ring.set_call(call))
        };
        assert!(old.is_some(), "a ring gets a call only while it runs");
    }

    fn relocate(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        areas: RingAreas,
    ) -> Result<(), RingError> {
        let memory = Arc::clone(memory);
        let moved = if ring == GUEST_RX {
            self.rx
                .as_mut()
                .map(|(ring, _)| ring.relocate(memory, areas))
        } else {
            self.tx
                .as_mut()
                .map(|(ring, _)| ring.relocate(memory, areas))
        };
        moved.expect("a ring moves only while it runs")
    }

    fn fault(&self, ring: usize) -> Option<String> {
        let fault = if ring == GUEST_RX {
            self.rx.as_ref().and_then(|(ring, _)| ring.fault())
        } else {
            self.tx.as_ref().and_then(|(ring, _)| ring.fault())
        };
        fault.map(|fault| fault.to_string())
    }
}

/// What became of a message.
#[derive(Debug)]
pub struct Handled {
    /// Number of the request.
    pub request: u32,
    /// The frontend asked for an acknowledgement.
    pub needs_reply: bool,
    /// Bytes that go back.
    pub reply: Option<Vec<u8>>,
    /// Why the request was refused, if it was: the text for operators.
    pub refused: Option<String>,
    /// The same as a word: the variant of the error.
    pub refusal: Option<String>,
}

/// A frontend's connection.
#[derive(Debug)]
pub struct Connection {
    framer: Framer,
    session: Session,
    rings: HeldRings,
}

impl Connection {
    /// A new one. `any_memory`: guest memory may lie in a file of any kind.
    #[must_use]
    pub fn new(any_memory: bool) -> Self {
        Self {
            framer: Framer::default(),
            session: Session::new(any_memory),
            rings: HeldRings::default(),
        }
    }

    /// How many bytes [`push`](Self::push) takes at most.
    #[must_use]
    pub fn wanted(&self) -> usize {
        self.framer.wanted()
    }

    /// Bytes and descriptors arrive; a whole message is carried out.
    ///
    /// # Errors
    /// Why the stream cannot be understood: the connection has to end.
    pub fn push(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Option<Handled>, String> {
        let message = self.framer.push(bytes, fds);
        let Some(message) = message.map_err(|error| format!("{error:?}"))? else {
            return Ok(None);
        };
        let (request, needs_reply) = (message.request, message.needs_reply());
        let outcome = self.session.handle(message, &mut self.rings);
        Ok(Some(Handled {
            request,
            needs_reply,
            reply: outcome.reply,
            refused: outcome.error.as_ref().map(ToString::to_string),
            refusal: outcome.error.as_ref().map(|error| format!("{error:?}")),
        }))
    }

    /// A worker's turn: receives one burst and transmits one frame. Returns how
    /// many chains were returned and how many frames were transmitted.
    pub fn poll(&mut self) -> (u32, u32) {
        let mut chains = 0;
        if let Some((ring, enabled)) = &mut self.rings.tx {
            ring.set_discard(!*enabled);
            let burst = ring.receive(BurstLimit::MAX);
            let frames = burst.batch.len();
            assert!(*enabled || frames == 0, "a disabled ring gives frames");
            chains = burst.finish(frames).chains();
        }
        let mut frames = 0;
        if let Some((ring, true)) = &mut self.rings.rx {
            let bytes = [0x5a; 60];
            let mut store = BatchStore::new(1);
            let mut batch = store.begin();
            let pushed = batch.push(Offload::default(), Span::from_slice(&bytes));
            pushed.expect("the store has room for one");
            frames = ring.transmit(&batch, FrameSet::first(1)).frames;
        }
        (chains, frames)
    }

    /// What the event loop does between messages: looks for broken rings,
    /// signals, and asks for what operators see. True if a ring was found
    /// broken.
    pub fn look_after(&mut self) -> bool {
        let is_news = self.session.notice_faults(&self.rings);
        drop(self.session.take_signals());
        let _ = self.session.missing();
        assert!(!is_news || self.session.is_broken());
        let status = self.session.ring_status();
        let running = [self.rings.rx.is_some(), self.rings.tx.is_some()];
        for (status, running) in status.iter().zip(running) {
            assert_eq!(status.running, running, "{}", status.name);
        }
        let _ = (
            self.session.memory_status(),
            self.session.feature_names(),
            self.session.protocol_feature_names(),
        );
        is_news
    }

    /// The connection ends: no ring may run afterwards.
    pub fn end(&mut self) {
        self.session.end(&mut self.rings);
        assert!(self.rings.tx.is_none() && self.rings.rx.is_none());
    }
}
