//! The frontend half: what a VMM or DPDK's virtio-user says for its guest.
//!
//! A thin layer on the frontend of rust-vmm's `vhost` crate, which does the
//! framing; it adds the order of the steps, names for what fails, and an end to
//! every wait. (That crate tries for ever when a socket's own time-out expires,
//! so the layer shuts the connection down instead.)
//!
//! ```no_run
//! use std::time::Duration;
//! use pollux_vhost::frontend::Frontend;
//! use pollux_virtio::driver::{Guest, GuestSpec};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut guest = Guest::new(GuestSpec::default())?;
//! let mut frontend = Frontend::connect("/run/pollux/vm1.sock".as_ref(), Duration::from_secs(2))?;
//! frontend.attach(&guest)?;
//! guest.rx.refill();
//! if guest.rx.publish() {
//!     frontend.kick(Frontend::RX);
//! }
//! # Ok(())
//! # }
//! ```

mod connect;
mod error;

use std::fmt;
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use pollux_virtio::driver::{Guest, NetConfig};
use pollux_virtio::{Features, RingAreas};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::{VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

pub use self::error::FrontendError;
use crate::features;

/// Number of vrings of one queue pair.
const VRINGS: usize = 2;

/// How a frontend behaves where the specification leaves a choice.
#[derive(Clone, Copy, Debug)]
pub struct FrontendOptions {
    /// Protocol features to ask for; those that are offered are acknowledged.
    pub protocol: VhostUserProtocolFeatures,
    /// Share memory region by region (ADD_MEM_REG) if the backend offers
    /// CONFIGURE_MEM_SLOTS, instead of as a table.
    pub slots: bool,
    /// Give the backend an eventfd for each vring to call the guest.
    pub calls: bool,
    /// How long each step (a few requests) may take.
    pub timeout: Duration,
}

impl Default for FrontendOptions {
    /// Every protocol feature that is known here, a memory table, no calls
    /// (the guest polls), 5 s.
    fn default() -> Self {
        Self {
            protocol: VhostUserProtocolFeatures::REPLY_ACK
                | VhostUserProtocolFeatures::MQ
                | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS,
            slots: false,
            calls: false,
            timeout: Duration::from_secs(5),
        }
    }
}

/// What both sides have agreed upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Feature bits, VHOST_USER_F_PROTOCOL_FEATURES included.
    pub features: u64,
    /// Protocol features.
    pub protocol: VhostUserProtocolFeatures,
}

impl Agreed {
    const NOTHING: Self = Self {
        features: 0,
        protocol: VhostUserProtocolFeatures::empty(),
    };

    /// What the bits mean for a ring.
    #[must_use]
    pub fn ring_features(&self) -> Features {
        features::of_ring(self.features)
    }

    fn has_protocol_features(&self) -> bool {
        self.features & features::PROTOCOL_FEATURES != 0
    }
}

/// Positions in the available rings where a backend stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingBases {
    /// Of the guest's RX ring (vring 0).
    pub rx: u16,
    /// Of the guest's TX ring (vring 1).
    pub tx: u16,
}

/// One connection of a guest to a backend; dropping it ends the connection.
///
/// An error of [`Timeout`](FrontendError::Timeout) closes the connection; after
/// another error it can still be used if the backend only refused something.
pub struct Frontend {
    inner: vhost::vhost_user::Frontend,
    /// The same socket, to end a wait.
    socket: UnixStream,
    options: FrontendOptions,
    agreed: Agreed,
    kicks: [EventFd; VRINGS],
    calls: [EventFd; VRINGS],
}

impl Frontend {
    /// Vring that the guest receives from (virtio 1.2, section 5.1.2).
    pub const RX: usize = 0;
    /// Vring that the guest sends through.
    pub const TX: usize = 1;

    /// Connects to a backend that listens at `path`, or will within `timeout`.
    ///
    /// # Errors
    /// [`FrontendError::Connect`], [`FrontendError::Setup`].
    pub fn connect(path: &Path, timeout: Duration) -> Result<Self, FrontendError> {
        let stream = connect::connect_to(path, timeout).map_err(|source| {
            let path = path.to_owned();
            FrontendError::Connect { path, source }
        })?;
        Self::new(stream, FrontendOptions::default())
    }

    /// Waits at most `timeout` for a backend that connects to `listener`.
    ///
    /// # Errors
    /// [`FrontendError::Accept`], [`FrontendError::Setup`].
    pub fn accept(listener: &UnixListener, timeout: Duration) -> Result<Self, FrontendError> {
        let stream = connect::accept_from(listener, timeout).map_err(FrontendError::Accept)?;
        Self::new(stream, FrontendOptions::default())
    }

    /// A frontend on a connected socket.
    ///
    /// # Errors
    /// [`FrontendError::Setup`].
    pub fn new(stream: UnixStream, options: FrontendOptions) -> Result<Self, FrontendError> {
        let eventfds = || -> std::io::Result<[EventFd; VRINGS]> {
            let flags = EFD_CLOEXEC | EFD_NONBLOCK;
            Ok([EventFd::new(flags)?, EventFd::new(flags)?])
        };
        Ok(Self {
            socket: stream.try_clone().map_err(FrontendError::Setup)?,
            kicks: eventfds().map_err(FrontendError::Setup)?,
            calls: eventfds().map_err(FrontendError::Setup)?,
            inner: vhost::vhost_user::Frontend::from_stream(stream, VRINGS as u64),
            options,
            agreed: Agreed::NOTHING,
        })
    }

    /// Changes how the frontend behaves from the next step on.
    pub fn set_options(&mut self, options: FrontendOptions) {
        self.options = options;
    }

    /// What was negotiated; nothing before [`negotiate`](Self::negotiate).
    #[must_use]
    pub fn agreed(&self) -> Agreed {
        self.agreed
    }

    /// Negotiates what `guest` needs, shares its memory and starts both rings.
    ///
    /// # Errors
    /// Names the step that failed.
    pub fn attach(&mut self, guest: &Guest) -> Result<Agreed, FrontendError> {
        let needed = feature_bits(guest.features());
        let agreed =
            self.negotiate(needed | features::INDIRECT_DESC | features::PROTOCOL_FEATURES)?;
        let missing = needed & !agreed.features;
        if missing != 0 {
            let missing = features::names(missing);
            return Err(FrontendError::NotOffered { missing });
        }
        self.share(guest)?;
        self.start(guest)?;
        Ok(agreed)
    }

    /// Takes the session over and acknowledges those of `wanted` that the
    /// backend offers, and likewise protocol features.
    ///
    /// GET_QUEUE_NUM is not sent: its answer counts queue pairs for a network
    /// device, and the crate below would take it for vrings.
    ///
    /// # Errors
    /// Names the request that failed.
    pub fn negotiate(&mut self, wanted: u64) -> Result<Agreed, FrontendError> {
        let protocol = self.options.protocol;
        self.agreed = self.within_timeout(|inner| {
            let offered = inner.get_features().map_err(at("GET_FEATURES"))?;
            inner.set_owner().map_err(at("SET_OWNER"))?;
            let features = offered & wanted;
            let mut agreed = Agreed {
                features,
                ..Agreed::NOTHING
            };
            if agreed.has_protocol_features() {
                let offered = inner
                    .get_protocol_features()
                    .map_err(at("GET_PROTOCOL_FEATURES"))?;
                agreed.protocol = offered & protocol;
                inner
                    .set_protocol_features(agreed.protocol)
                    .map_err(at("SET_PROTOCOL_FEATURES"))?;
                if agreed
                    .protocol
                    .contains(VhostUserProtocolFeatures::REPLY_ACK)
                {
                    // From now on every request is acknowledged.
                    inner.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
                }
            }
            inner.set_features(features).map_err(at("SET_FEATURES"))?;
            Ok(agreed)
        })?;
        Ok(self.agreed)
    }

    /// Shares the guest's memory.
    ///
    /// # Errors
    /// Names the request that failed.
    pub fn share(&mut self, guest: &Guest) -> Result<(), FrontendError> {
        let regions: Vec<VhostUserMemoryRegionInfo> = guest
            .places()
            .map(|place| VhostUserMemoryRegionInfo {
                guest_phys_addr: place.guest_addr,
                memory_size: place.size,
                userspace_addr: place.user_addr,
                mmap_offset: place.file_offset,
                mmap_handle: guest.file.as_raw_fd(),
            })
            .collect();
        let has_slots = self
            .agreed
            .protocol
            .contains(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);
        let by_slots = self.options.slots && has_slots;
        self.within_timeout(|inner| {
            if by_slots {
                for region in &regions {
                    inner.add_mem_region(region).map_err(at("ADD_MEM_REG"))?;
                }
            } else {
                inner.set_mem_table(&regions).map_err(at("SET_MEM_TABLE"))?;
            }
            Ok(())
        })
    }

    /// Takes all of the guest's memory away again, region by region.
    ///
    /// # Errors
    /// If CONFIGURE_MEM_SLOTS was not negotiated, or the backend refuses.
    pub fn unshare(&mut self, guest: &Guest) -> Result<(), FrontendError> {
        self.within_timeout(|inner| {
            for place in guest.places() {
                let region = VhostUserMemoryRegionInfo {
                    guest_phys_addr: place.guest_addr,
                    memory_size: place.size,
                    userspace_addr: place.user_addr,
                    mmap_offset: place.file_offset,
                    mmap_handle: -1,
                };
                inner
                    .remove_mem_region(&region)
                    .map_err(at("REM_MEM_REG"))?;
            }
            Ok(())
        })
    }

    /// Starts both rings where the driver halves of `guest` began.
    ///
    /// # Errors
    /// Names the request that failed.
    pub fn start(&mut self, guest: &Guest) -> Result<(), FrontendError> {
        let bases = RingBases {
            rx: guest.rx_config().base,
            tx: guest.tx_config().base,
        };
        self.start_at(guest, bases)
    }

    /// Starts both rings at the positions where a backend
    /// [stopped](Self::stop) them.
    ///
    /// # Errors
    /// Names the request that failed.
    pub fn start_at(&mut self, guest: &Guest, bases: RingBases) -> Result<(), FrontendError> {
        let kicks = self.clones_of(&self.kicks)?;
        let calls = match self.options.calls {
            true => Some(self.clones_of(&self.calls)?),
            false => None,
        };
        let rings = [(guest.rx_config(), bases.rx), (guest.tx_config(), bases.tx)];
        let has_enable = self.agreed.has_protocol_features();
        self.within_timeout(|inner| {
            for (index, (config, base)) in rings.into_iter().enumerate() {
                let NetConfig { areas, .. } = config;
                inner
                    .set_vring_num(index, areas.size)
                    .map_err(at("SET_VRING_NUM"))?;
                inner
                    .set_vring_base(index, base)
                    .map_err(at("SET_VRING_BASE"))?;
                inner
                    .set_vring_addr(index, &addresses(areas))
                    .map_err(at("SET_VRING_ADDR"))?;
                if let Some(calls) = &calls {
                    inner
                        .set_vring_call(index, &calls[index])
                        .map_err(at("SET_VRING_CALL"))?;
                }
                inner
                    .set_vring_kick(index, &kicks[index])
                    .map_err(at("SET_VRING_KICK"))?;
            }
            if has_enable {
                enable(inner, true)?;
            }
            Ok(())
        })
    }

    /// Enables or disables both rings.
    ///
    /// # Errors
    /// If VHOST_USER_F_PROTOCOL_FEATURES was not negotiated, or the backend
    /// refuses.
    pub fn set_enabled(&mut self, enabled: bool) -> Result<(), FrontendError> {
        if !self.agreed.has_protocol_features() {
            let request = "SET_VRING_ENABLE";
            return Err(FrontendError::NotNegotiated { request });
        }
        self.within_timeout(|inner| enable(inner, enabled))
    }

    /// Stops both rings and returns where. The backend does not touch them any
    /// more.
    ///
    /// # Errors
    /// Names the request that failed.
    pub fn stop(&mut self) -> Result<RingBases, FrontendError> {
        let is_packed = self.agreed.ring_features().packed;
        self.within_timeout(|inner| {
            let stop = |index| -> Result<u16, FrontendError> {
                let base = inner.get_vring_base(index).map_err(at("GET_VRING_BASE"))?;
                let no_position = vhost::vhost_user::Error::InvalidMessage;
                let [low, high] = [base & 0xffff, base >> 16];
                // Of a packed ring, available and used position.
                let base = if is_packed && low == high { low } else { base };
                u16::try_from(base)
                    .map_err(|_| at("GET_VRING_BASE")(vhost::Error::VhostUserProtocol(no_position)))
            };
            Ok(RingBases {
                rx: stop(Self::RX)?,
                tx: stop(Self::TX)?,
            })
        })
    }

    /// Tells the backend that there is something new in a vring. A backend that
    /// polls does not ask for it: see
    /// [`TxRing::publish`](pollux_virtio::driver::TxRing::publish).
    ///
    /// # Panics
    /// If there is no vring of that number.
    pub fn kick(&self, vring: usize) {
        // Full is as good as written: the backend has not yet seen the last one.
        let _ = self.kicks[vring].write(1);
    }

    /// Takes the calls for a vring that came since the last time: how many.
    /// Always 0 without [`FrontendOptions::calls`].
    ///
    /// # Panics
    /// If there is no vring of that number.
    #[must_use]
    pub fn take_calls(&self, vring: usize) -> u64 {
        self.calls[vring].read().unwrap_or(0)
    }

    fn clones_of(&self, fds: &[EventFd; VRINGS]) -> Result<[EventFd; VRINGS], FrontendError> {
        let clone = |fd: &EventFd| fd.try_clone().map_err(FrontendError::Setup);
        Ok([clone(&fds[Self::RX])?, clone(&fds[Self::TX])?])
    }

    /// Does `step`, which waits for the backend, and shuts the connection down if
    /// that takes too long.
    fn within_timeout<T>(
        &mut self,
        step: impl FnOnce(&mut vhost::vhost_user::Frontend) -> Result<T, FrontendError>,
    ) -> Result<T, FrontendError> {
        let (socket, timeout) = (&self.socket, self.options.timeout);
        let inner = &mut self.inner;
        let (done, is_done) = channel::<()>();
        thread::scope(|scope| {
            let watch = move || {
                // Nothing is ever sent: the other end is dropped, in time or not.
                let waited = is_done.recv_timeout(timeout);
                let is_late = waited == Err(RecvTimeoutError::Timeout);
                if is_late {
                    // Wakes a read with "no more" and a write with an error.
                    let _ = socket.shutdown(std::net::Shutdown::Both);
                }
                is_late
            };
            let watch = thread::Builder::new()
                .name("pollux-frontend".to_owned())
                .spawn_scoped(scope, watch)
                .map_err(FrontendError::Setup)?;
            let result = step(inner);
            drop(done);
            let is_late = watch.join().unwrap_or(false);
            match result {
                Err(FrontendError::Request { request, .. }) if is_late => {
                    Err(FrontendError::Timeout { request, timeout })
                }
                // The last answer and the end of the time came together.
                Ok(_) if is_late => {
                    let request = "the last request of a step";
                    Err(FrontendError::Timeout { request, timeout })
                }
                result => result,
            }
        })
    }
}

impl fmt::Debug for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frontend")
            .field("options", &self.options)
            .field("agreed", &self.agreed)
            .finish_non_exhaustive()
    }
}

/// Feature bits that rings laid out for `features` need.
#[must_use]
pub fn feature_bits(features: Features) -> u64 {
    let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    bit(features.version_1, features::VERSION_1)
        | bit(features.mergeable, features::MRG_RXBUF)
        | bit(features.event_idx, features::EVENT_IDX)
        | bit(features.in_order, features::IN_ORDER)
        | bit(features.packed, features::RING_PACKED)
}

/// Names the request that an error is about.
fn at(request: &'static str) -> impl Fn(vhost::Error) -> FrontendError {
    move |source| FrontendError::Request { request, source }
}

fn enable(inner: &mut vhost::vhost_user::Frontend, enabled: bool) -> Result<(), FrontendError> {
    for index in 0..VRINGS {
        inner
            .set_vring_enable(index, enabled)
            .map_err(at("SET_VRING_ENABLE"))?;
    }
    Ok(())
}

/// The areas of a ring as the backend is told: addresses of the frontend.
fn addresses(areas: RingAreas) -> VringConfigData {
    VringConfigData {
        queue_max_size: areas.size,
        queue_size: areas.size,
        flags: 0,
        desc_table_addr: Guest::user_addr(areas.desc_addr),
        used_ring_addr: Guest::user_addr(areas.used_addr),
        avail_ring_addr: Guest::user_addr(areas.avail_addr),
        log_addr: None,
    }
}
