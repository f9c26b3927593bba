//! What can go wrong on a guest's side of a socket.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Why a frontend could not go on. Each text names the step that failed.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// Nobody answers at the path.
    #[error("cannot connect to the vhost-user socket {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why, at the last try.
        source: io::Error,
    },
    /// No backend connected to the listening socket.
    #[error("no vhost-user backend was accepted: {0}")]
    Accept(#[source] io::Error),
    /// The kernel gave no descriptor or no thread.
    #[error("a frontend could not be set up: {0}")]
    Setup(#[source] io::Error),
    /// The backend refused a request, or what it answered makes no sense.
    #[error("{request} failed: {source}")]
    Request {
        /// Name of the request in the specification.
        request: &'static str,
        /// What the protocol layer says.
        source: vhost::Error,
    },
    /// The backend did not answer in time. The connection was closed.
    #[error("{request} failed: the backend did not answer within {timeout:?}")]
    Timeout {
        /// Name of the request in the specification.
        request: &'static str,
        /// What it was given, together with the requests of the same step.
        timeout: Duration,
    },
    /// The guest's rings need features that the backend does not offer.
    #[error("the backend does not offer {}, which the guest's rings need", missing.join(", "))]
    NotOffered {
        /// Names of the features.
        missing: Vec<&'static str>,
    },
    /// The frontend has to negotiate before it can do this.
    #[error("{request} failed: VHOST_USER_F_PROTOCOL_FEATURES was not negotiated")]
    NotNegotiated {
        /// Name of the request in the specification.
        request: &'static str,
    },
}
