//! One vhost-user connection as a state machine without I/O.
//!
//! [`Session::handle`] takes a message, changes the port's queues through
//! [`Rings`], and returns the reply. Changes happen before the reply exists: by
//! the time a frontend reads it, no worker uses the old state.
//!
//! Messages may come in any order: each is remembered, and a ring starts with
//! the one that completes it. Ring states are those of the specification ("Ring
//! states"):
//!
//! * stopped: until SET_VRING_KICK, and from GET_VRING_BASE on;
//! * started and disabled: what the guest sends is discarded, it gets nothing;
//! * started and enabled: at work. Without VHOST_USER_F_PROTOCOL_FEATURES a
//!   started ring is enabled unless SET_VRING_ENABLE says otherwise.

mod decode;
mod error;
mod memory;
#[cfg(test)]
mod tests;
mod vring;

use std::sync::Arc;

use pollux_sys::EventFd;
use pollux_virtio::device::RingConfig;
use pollux_virtio::{GuestMemory, RING_SIZE_MAX, RingAreas, RingError};
use vhost::vhost_user::message::{
    FrontendReq, VhostUserMemory, VhostUserMemoryRegion, VhostUserProtocolFeatures,
    VhostUserSingleMemoryRegion, VhostUserVringAddr, VhostUserVringState,
};
use vm_memory::ByteValued;

use self::decode::{
    clone_of, decode, no_fds, notifier, number, one_fd, ring_and_number, ring_index,
};
pub(crate) use self::error::RequestError;
use self::memory::{BASELINE_REGIONS, MemoryMap, SLOTS_MAX};
pub(crate) use self::vring::GUEST_RX;
use self::vring::{RINGS, UserAddrs, Vring};
use crate::features;
use crate::framing::{self, Message};
use crate::status::{MemoryStatus, RingLayout, RingStatus};

/// The queues of the port that a session serves. Each call returns when no
/// worker uses the state before it.
pub(crate) trait Rings {
    /// Gives a ring to the workers, and returns the position at which it goes
    /// on. Disabled: what the guest sends is discarded.
    fn start(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        config: RingConfig,
        enabled: bool,
    ) -> Result<u16, RequestError>;

    /// Takes a ring away from the workers; everything that was received has been
    /// returned. The position in its available ring; `None` if it is not there.
    fn stop(&mut self, ring: usize) -> Option<u16>;

    /// Enables or disables a running ring.
    fn set_enabled(&mut self, ring: usize, enabled: bool) -> Result<(), RequestError>;

    /// Changes whom a running ring calls.
    fn set_call(&mut self, ring: usize, call: Option<EventFd>);

    /// Moves a running ring to new memory at the same position. On an error it
    /// goes on where it was.
    fn relocate(
        &mut self,
        ring: usize,
        memory: &Arc<GuestMemory>,
        areas: RingAreas,
    ) -> Result<(), RingError>;

    /// Why a running ring is broken, if it is.
    fn fault(&self, ring: usize) -> Option<String>;
}

/// What became of a message.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Bytes to send back.
    pub(crate) reply: Option<Vec<u8>>,
    /// Name of the request.
    pub(crate) request: String,
    /// Why it was refused, if it was.
    pub(crate) error: Option<RequestError>,
    /// What an operator should know though it was carried out.
    pub(crate) notes: Vec<String>,
}

/// The body of a reply of its own, or nothing where only an acknowledgement is
/// called for.
type Answer = Result<Option<Vec<u8>>, RequestError>;

/// State of a connection: a plain value, apart from the rings that run.
#[derive(Debug)]
pub(crate) struct Session {
    features: Option<u64>,
    protocol_features: u64,
    memory: MemoryMap,
    vrings: [Vring; RINGS],
    /// Of the message at hand.
    notes: Vec<String>,
    /// See [`take_signals`](Self::take_signals).
    signals: Vec<EventFd>,
}

impl Session {
    pub(crate) fn new(any_memory: bool) -> Self {
        Self {
            features: None,
            protocol_features: 0,
            memory: MemoryMap::new(any_memory),
            vrings: Default::default(),
            notes: Vec::new(),
            signals: Vec::new(),
        }
    }

    /// Carries a message out.
    ///
    /// A request with a reply of its own gets exactly that; any other gets an
    /// acknowledgement, 0 or 1 for an error, if the frontend asks for one
    /// (`need_reply`). A refused request changes nothing.
    pub(crate) fn handle(&mut self, message: Message, rings: &mut impl Rings) -> Outcome {
        let request = FrontendReq::try_from(message.request);
        let name = match &request {
            Ok(request) => format!("{request:?}"),
            Err(_) => format!("request {}", message.request),
        };
        let (code, needs_reply) = (message.request, message.needs_reply());
        let (body, error) = match request.map_err(|_| RequestError::Unknown) {
            Ok(request) => match self.dispatch(request, message, rings) {
                Ok(body) => (body, None),
                Err(error) => (None, Some(error)),
            },
            Err(error) => (None, Some(error)),
        };
        let acknowledge = || {
            let status = u64::from(error.is_some());
            needs_reply.then(|| framing::reply(code, &status.to_ne_bytes()))
        };
        Outcome {
            reply: match &body {
                Some(body) => Some(framing::reply(code, body)),
                None => acknowledge(),
            },
            request: name,
            error,
            notes: std::mem::take(&mut self.notes),
        }
    }

    fn dispatch(
        &mut self,
        request: FrontendReq,
        message: Message,
        rings: &mut impl Rings,
    ) -> Answer {
        use FrontendReq as Req;
        let own = |value: u64| Ok(Some(value.to_ne_bytes().to_vec()));
        match request {
            Req::GET_FEATURES => own(features::OFFERED),
            Req::GET_PROTOCOL_FEATURES => own(features::PROTOCOL_OFFERED.bits()),
            // Queue pairs, not rings: what QEMU and DPDK take it for.
            Req::GET_QUEUE_NUM => own(1),
            Req::GET_MAX_MEM_SLOTS => own(SLOTS_MAX as u64),
            Req::GET_VRING_BASE => self.get_vring_base(&message, rings),
            _ => {
                match request {
                    Req::SET_OWNER => no_fds(&message),
                    Req::RESET_OWNER => self.reset_owner(&message, rings),
                    Req::SET_FEATURES => self.set_features(&message, rings),
                    Req::SET_PROTOCOL_FEATURES => self.set_protocol_features(&message),
                    Req::SET_MEM_TABLE => self.set_mem_table(&message, rings),
                    Req::ADD_MEM_REG => self.add_mem_reg(&message, rings),
                    Req::REM_MEM_REG => self.rem_mem_reg(&message, rings),
                    Req::SET_VRING_NUM => self.set_vring_num(&message, rings),
                    Req::SET_VRING_ADDR => self.set_vring_addr(&message, rings),
                    Req::SET_VRING_BASE => self.set_vring_base(&message),
                    Req::SET_VRING_ENABLE => self.set_vring_enable(&message, rings),
                    Req::SET_VRING_KICK => self.set_vring_kick(message, rings),
                    Req::SET_VRING_CALL => self.set_vring_call(message, rings),
                    Req::SET_VRING_ERR => self.set_vring_err(message),
                    _ => Err(RequestError::NotOffered),
                }?;
                Ok(None)
            }
        }
    }

    /// The connection has ended: no ring runs afterwards.
    pub(crate) fn end(&mut self, rings: &mut impl Rings) {
        for index in 0..RINGS {
            self.stop_ring(index, rings);
        }
    }

    // Features.

    fn set_features(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        no_fds(message)?;
        let features = number(message)?;
        let unknown = features & !features::OFFERED;
        if unknown != 0 {
            return Err(RequestError::Features(unknown));
        }
        // They decide how a ring is read. But the frontend's own bits may change
        // (LOG_ALL when a migration starts).
        let of_driver = |features| features & !(features::LOG_ALL | features::PROTOCOL_FEATURES);
        let is_same = self.features.map(of_driver) == Some(of_driver(features));
        if !is_same && self.vrings.iter().any(|vring| vring.running) {
            return Err(RequestError::FeaturesWhileRunning);
        }
        let before = [0, 1].map(|index| self.is_enabled(index));
        self.features = Some(features);
        for (index, before) in before.into_iter().enumerate() {
            // What holds without SET_VRING_ENABLE may have changed.
            let enabled = self.is_enabled(index);
            if self.vrings[index].running && enabled != before {
                rings.set_enabled(index, enabled)?;
            }
        }
        self.start_what_is_complete(rings);
        Ok(())
    }

    fn set_protocol_features(&mut self, message: &Message) -> Result<(), RequestError> {
        no_fds(message)?;
        let features = number(message)?;
        let unknown = features & !features::PROTOCOL_OFFERED.bits();
        if unknown != 0 {
            return Err(RequestError::Features(unknown));
        }
        self.protocol_features = features;
        Ok(())
    }

    fn reset_owner(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        no_fds(message)?;
        for index in 0..RINGS {
            self.stop_ring(index, rings);
            self.vrings[index].enable = None;
        }
        Ok(())
    }

    // Memory.

    fn set_mem_table(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        let header_bytes = size_of::<VhostUserMemory>();
        let wanted = |regions| header_bytes + regions * size_of::<VhostUserMemoryRegion>();
        let bytes = &message.body[..];
        let (header, table) =
            bytes
                .split_at_checked(header_bytes)
                .ok_or(RequestError::BodyLength {
                    got: bytes.len(),
                    wanted: header_bytes,
                })?;
        let header: VhostUserMemory = decode(header)?;
        let count = header.num_regions;
        if count == 0 || count > BASELINE_REGIONS {
            return Err(RequestError::RegionCount(count));
        }
        let count = count as usize;
        // User Mode Linux sends room for two regions, however many it has.
        if bytes.len() < wanted(count) {
            return Err(RequestError::BodyLength {
                got: bytes.len(),
                wanted: wanted(count),
            });
        }
        if message.fds.len() != count {
            return Err(RequestError::FdCount {
                got: message.fds.len(),
                wanted: "one for each region",
            });
        }
        let table: Result<Vec<VhostUserMemoryRegion>, _> = table
            .chunks_exact(size_of::<VhostUserMemoryRegion>())
            .take(count)
            .map(decode)
            .collect();
        let table = table?;
        self.change_memory(rings, |memory| memory.replace(&table, &message.fds))
    }

    fn add_mem_reg(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        self.needs_slots()?;
        let region: VhostUserSingleMemoryRegion = decode(&message.body)?;
        let fd = one_fd(message)?;
        self.change_memory(rings, |memory| memory.add(&region, fd))
    }

    fn rem_mem_reg(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        self.needs_slots()?;
        let region: VhostUserSingleMemoryRegion = decode(&message.body)?;
        // Some frontends send the region's descriptor along.
        if message.fds.len() > 1 {
            return Err(RequestError::FdCount {
                got: message.fds.len(),
                wanted: "none or one",
            });
        }
        self.change_memory(rings, |memory| memory.remove(&region))
    }

    fn needs_slots(&self) -> Result<(), RequestError> {
        let slots = VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        if self.protocol_features & slots.bits() == 0 {
            return Err(RequestError::NotNegotiated("CONFIGURE_MEM_SLOTS"));
        }
        Ok(())
    }

    /// Changes the memory; moves running rings to it, stops those that have no
    /// place in it, and starts those that were waiting for it.
    fn change_memory(
        &mut self,
        rings: &mut impl Rings,
        change: impl FnOnce(&mut MemoryMap) -> Result<(), RequestError>,
    ) -> Result<(), RequestError> {
        // Unmapped at the end, not inside of a ring's cell.
        let _old = self.memory.get().cloned();
        change(&mut self.memory)?;
        for index in 0..RINGS {
            let vring = &self.vrings[index];
            if !vring.running {
                continue;
            }
            let moved = match (self.memory.get(), vring.size, vring.addrs) {
                (Some(memory), Some(size), Some(addrs)) => addrs
                    .translate(memory, size)
                    .and_then(|areas| Ok(rings.relocate(index, memory, areas)?)),
                _ => Err(RequestError::RingOutside {
                    area: "ring",
                    user_addr: vring.addrs.map_or(0, |addrs| addrs.desc),
                }),
            };
            if let Err(error) = moved {
                self.stop_in_place(index, rings);
                self.vrings[index].fault = Some(format!("the memory table changed: {error}"));
                self.signal_err(index);
            }
        }
        self.start_what_is_complete(rings);
        Ok(())
    }

    // Rings.

    fn set_vring_num(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        let (index, number) = ring_and_number(message)?;
        // Whether the features are known yet, is up to the frontend: if not, the
        // ring will say what is wrong with its size when it starts.
        let may_be_odd = self.features.is_none() || self.is_packed();
        let size = u16::try_from(number)
            .ok()
            .filter(|size| (1..=RING_SIZE_MAX).contains(size))
            .filter(|size| may_be_odd || size.is_power_of_two())
            .ok_or(RequestError::RingSize(number))?;
        let vring = &mut self.vrings[index];
        if vring.running && vring.size != Some(size) {
            return Err(RequestError::RingRunning(index));
        }
        vring.size = Some(size);
        self.start_if_complete(index, rings)
    }

    fn set_vring_base(&mut self, message: &Message) -> Result<(), RequestError> {
        let (index, number) = ring_and_number(message)?;
        // Judged when the ring starts, if the features are not known before.
        if number > u16::MAX.into() && self.features.is_some() && !self.is_packed() {
            return Err(RequestError::RingBase(number));
        }
        let vring = &mut self.vrings[index];
        if vring.running {
            return Err(RequestError::RingRunning(index));
        }
        vring.base = Some(number);
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        no_fds(message)?;
        let addr: VhostUserVringAddr = decode(&message.body)?;
        let index = ring_index(addr.index)?;
        let addrs = UserAddrs {
            desc: addr.descriptor,
            avail: addr.available,
            used: addr.used,
        };
        let vring = &mut self.vrings[index];
        if vring.running {
            // Sent again when a migration starts, perhaps at a new user address
            // of the same memory.
            let (Some(memory), Some(size)) = (self.memory.get(), vring.size) else {
                return Err(RequestError::RingRunning(index));
            };
            rings.relocate(index, memory, addrs.translate(memory, size)?)?;
            vring.addrs = Some(addrs);
            return Ok(());
        }
        vring.addrs = Some(addrs);
        self.start_if_complete(index, rings)
    }

    fn set_vring_enable(
        &mut self,
        message: &Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        let (index, number) = ring_and_number(message)?;
        let enable = match number {
            0 => false,
            1 => true,
            _ => return Err(RequestError::Invalid),
        };
        if self.vrings[index].running && self.is_enabled(index) != enable {
            rings.set_enabled(index, enable)?;
        }
        self.vrings[index].enable = Some(enable);
        Ok(())
    }

    fn set_vring_kick(
        &mut self,
        message: Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        let (index, kick) = notifier(message)?;
        let vring = &mut self.vrings[index];
        vring.kick = kick;
        vring.started = true;
        self.start_if_complete(index, rings)
    }

    fn set_vring_call(
        &mut self,
        message: Message,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        let (index, call) = notifier(message)?;
        let vring = &mut self.vrings[index];
        if vring.running {
            rings.set_call(index, clone_of(call.as_ref())?);
            // For what was published while there was none, or to the old one.
            self.signals.extend(clone_of(call.as_ref())?);
        }
        vring.call = call;
        Ok(())
    }

    fn set_vring_err(&mut self, message: Message) -> Result<(), RequestError> {
        let (index, err) = notifier(message)?;
        self.vrings[index].err = err;
        Ok(())
    }

    /// Stops the ring and answers its position: where to go on with
    /// SET_VRING_BASE. A ring that was never started answers where it would
    /// have, and one that is not there 0, since the frontend waits for an answer
    /// and there is no other one.
    fn get_vring_base(&mut self, message: &Message, rings: &mut impl Rings) -> Answer {
        let state: VhostUserVringState = decode(&message.body)?;
        let base = match ring_index(state.index) {
            Ok(index) => {
                self.stop_ring(index, rings);
                let is_packed = self.is_packed();
                let position = self.vrings[index].position(is_packed);
                let base = u32::from(position.unwrap_or(0));
                // Next available in the lower half, next used in the upper: the
                // same, since chains go back in the order in which they were taken.
                if is_packed { base | base << 16 } else { base }
            }
            Err(_) => 0,
        };
        let answer = VhostUserVringState::new(state.index, base);
        Ok(Some(answer.as_slice().to_vec()))
    }

    fn is_packed(&self) -> bool {
        features::of_ring(self.features.unwrap_or(0)).packed
    }

    /// SET_VRING_ENABLE, or what holds without it.
    fn is_enabled(&self, index: usize) -> bool {
        let features = self.features.unwrap_or(0);
        let default = features & features::PROTOCOL_FEATURES == 0;
        self.vrings[index].enable.unwrap_or(default)
    }

    fn start_what_is_complete(&mut self, rings: &mut impl Rings) {
        for index in 0..RINGS {
            // What is wrong is kept as the ring's fault: it is not this
            // message's.
            let _ = self.start_if_complete(index, rings);
        }
    }

    /// Starts a ring for which every message has come.
    fn start_if_complete(
        &mut self,
        index: usize,
        rings: &mut impl Rings,
    ) -> Result<(), RequestError> {
        let enabled = self.is_enabled(index);
        let is_packed = self.is_packed();
        let vring = &mut self.vrings[index];
        if vring.running || !vring.started {
            return Ok(());
        }
        let (Some(memory), Some(features)) = (self.memory.get(), self.features) else {
            return Ok(());
        };
        let (Some(size), Some(addrs)) = (vring.size, vring.addrs) else {
            return Ok(());
        };
        let mut start = || {
            let config = RingConfig {
                areas: addrs.translate(memory, size)?,
                features: features::of_ring(features),
                base: vring.position(is_packed)?,
                call: clone_of(vring.call.as_ref())?,
                counters: Arc::clone(&vring.counters),
            };
            rings.start(index, memory, config, enabled)
        };
        let started = start();
        vring.running = started.is_ok();
        vring.fault = started.as_ref().err().map(ToString::to_string);
        let position = started?;
        // For what a backend before us published and was killed before it called.
        self.signals
            .extend(clone_of(vring.call.as_ref()).ok().flatten());
        let base = vring.base.replace(position.into()).unwrap_or(0);
        if !is_packed && base != u32::from(position) {
            self.notes.push(format!(
                "vring {index} goes on at its used.idx, {position}, and not at SET_VRING_BASE, \
                 {base}: frames that were under way may come twice"
            ));
        }
        Ok(())
    }

    /// GET_VRING_BASE: back to the state before SET_VRING_KICK.
    fn stop_ring(&mut self, index: usize, rings: &mut impl Rings) {
        self.stop_in_place(index, rings);
        let vring = &mut self.vrings[index];
        vring.started = false;
        // With the kicks that are in it: they are for whoever is next.
        vring.kick = None;
        vring.fault = None;
    }

    /// Takes a ring away from the workers, if they have it.
    fn stop_in_place(&mut self, index: usize, rings: &mut impl Rings) {
        let vring = &mut self.vrings[index];
        if std::mem::take(&mut vring.running)
            && let Some(base) = rings.stop(index)
        {
            vring.base = Some(base.into());
        }
    }

    /// Counts kicks, and looks for rings that their guest broke; tells the frontend, once, and
    /// returns true if there is one that was not known.
    pub(crate) fn notice_faults(&mut self, rings: &impl Rings) -> bool {
        let mut is_news = false;
        for index in 0..RINGS {
            let vring = &mut self.vrings[index];
            vring.count_kicks();
            if !vring.running || vring.fault.is_some() {
                continue;
            }
            vring.fault = rings.fault(index);
            if vring.fault.is_some() {
                is_news = true;
                self.signal_err(index);
            }
        }
        is_news
    }

    fn signal_err(&mut self, index: usize) {
        // One that cannot be copied (no descriptor left) stays silent.
        let err = self.vrings[index].err.as_ref();
        self.signals
            .extend(err.and_then(|err| err.try_clone().ok()));
    }

    /// Call and err descriptors to be signalled since the last call. Not by the thread
    /// that serves all sessions: their owner can make that wait.
    pub(crate) fn take_signals(&mut self) -> Vec<EventFd> {
        std::mem::take(&mut self.signals)
    }

    // What an operator sees.

    /// The first step that is missing for the port to run.
    pub(crate) fn missing(&self) -> Option<String> {
        if self.features.is_none() {
            return Some(
                "the session waits for SET_FEATURES: the frontend is connected, the driver in \
                 the guest has not started"
                    .to_owned(),
            );
        }
        if self.memory.get().is_none() {
            return Some(
                "the session waits for SET_MEM_TABLE: guest memory is not shared; start the VM \
                 with a memory backend that has share=on"
                    .to_owned(),
            );
        }
        let mut vrings = self.vrings.iter().enumerate();
        vrings.find_map(|(index, vring)| vring.missing(index, self.is_enabled(index)))
    }

    /// True if a ring is broken, or cannot start.
    pub(crate) fn is_broken(&self) -> bool {
        self.vrings.iter().any(|vring| vring.fault.is_some())
    }

    pub(crate) fn feature_names(&self) -> Vec<&'static str> {
        features::names(self.features.unwrap_or(0))
    }

    pub(crate) fn protocol_feature_names(&self) -> Vec<&'static str> {
        features::protocol_names(self.protocol_features)
    }

    pub(crate) fn memory_status(&self) -> Vec<MemoryStatus> {
        self.memory.status()
    }

    pub(crate) fn ring_status(&self) -> Vec<RingStatus> {
        let layout = if self.is_packed() {
            RingLayout::Packed
        } else {
            RingLayout::Split
        };
        let vrings = self.vrings.iter().enumerate();
        vrings
            .map(|(index, vring)| vring.status(index, self.is_enabled(index), layout))
            .collect()
    }
}
