//! What an operator can know of a port's session.

use std::path::PathBuf;
use std::sync::Arc;

use pollux_virtio::device::RingCounters;
use serde::Serialize;

use crate::backend::SocketMode;

/// Where a port's session is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionState {
    /// Server mode: waiting for a frontend to connect.
    #[default]
    Listening,
    /// Client mode: nobody listens yet; tried again and again.
    Connecting,
    /// A frontend is connected, and at least one ring does not run yet.
    Negotiating,
    /// Both rings run.
    Running,
    /// A ring was broken by the guest; it stays so until the frontend sets it up
    /// anew.
    Broken,
}

impl SessionState {
    /// The name as it is shown and serialised.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Connecting => "connecting",
            Self::Negotiating => "negotiating",
            Self::Running => "running",
            Self::Broken => "broken",
        }
    }
}

/// State of a port's session.
#[derive(Clone, Debug, Serialize)]
pub struct PortStatus {
    /// The socket.
    pub socket: PathBuf,
    /// Who listens.
    pub mode: SocketMode,
    /// Where the session is.
    pub state: SessionState,
    /// What has to happen next for the port to run, and who has to do it; `None`
    /// if it runs.
    pub missing: Option<String>,
    /// Connections since the port was added.
    pub connections: u64,
    /// Connections that were refused because there was one already.
    pub refused: u64,
    /// The last request of the frontend.
    pub last_request: Option<String>,
    /// The last error, with its reason. It stays after the connection ended.
    pub last_error: Option<String>,
    /// Feature bits that are offered, by name.
    pub features_offered: Vec<&'static str>,
    /// Feature bits that the frontend has acknowledged, by name.
    pub features: Vec<&'static str>,
    /// Protocol feature bits that the frontend has acknowledged, by name.
    pub protocol_features: Vec<&'static str>,
    /// Guest memory.
    pub memory: Vec<MemoryStatus>,
    /// Rings, by vring index: 0 is the guest's RX ring, 1 its TX ring.
    pub rings: Vec<RingStatus>,
}

/// A region of guest memory.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct MemoryStatus {
    /// First guest address.
    pub guest_addr: u64,
    /// Length.
    pub bytes: u64,
}

/// How a ring is laid out (virtio 1.2, sections 2.7 and 2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RingLayout {
    /// Descriptor table, available and used ring.
    Split,
    /// One ring of descriptors.
    Packed,
}

/// A ring.
#[derive(Clone, Debug, Serialize)]
pub struct RingStatus {
    /// "guest RX" or "guest TX".
    pub name: &'static str,
    /// Descriptors; `None` before SET_VRING_NUM.
    pub size: Option<u16>,
    /// What the acknowledged features say.
    pub layout: RingLayout,
    /// True from SET_VRING_KICK to GET_VRING_BASE.
    pub started: bool,
    /// SET_VRING_ENABLE, or what holds without it.
    pub enabled: bool,
    /// True if workers use the ring.
    pub running: bool,
    /// Why it does not run though it was started.
    pub fault: Option<String>,
    /// Live counters, of the whole session.
    #[serde(skip)]
    pub counters: Arc<RingCounters>,
}
