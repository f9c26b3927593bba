//! The frontend half against backends that are not there or do not answer.

use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};

use pollux_vhost::frontend::{Frontend, FrontendError, FrontendOptions};

const SHORT: Duration = Duration::from_millis(100);
/// Far above `SHORT`, for a machine that is busy; far below "for ever".
const LONG: Duration = Duration::from_secs(20);

fn with_short_timeout(frontend: &mut Frontend) {
    frontend.set_options(FrontendOptions {
        timeout: SHORT,
        ..FrontendOptions::default()
    });
}

#[test]
fn nobody_listens() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm1.sock");
    let start = Instant::now();
    let error = Frontend::connect(&path, SHORT).unwrap_err();
    assert!(matches!(error, FrontendError::Connect { .. }), "{error}");
    assert!(error.to_string().contains("vm1.sock"), "{error}");
    assert!(start.elapsed() >= SHORT && start.elapsed() < LONG);
    // A path that no socket can have is not tried again.
    let error = Frontend::connect("x".repeat(200).as_ref(), LONG).unwrap_err();
    assert!(matches!(error, FrontendError::Connect { .. }), "{error}");
    assert!(start.elapsed() < LONG);
}

#[test]
fn a_backend_that_comes_later_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm1.sock");
    thread::scope(|scope| {
        let connecting = scope.spawn(|| Frontend::connect(&path, LONG));
        thread::sleep(SHORT);
        let listener = UnixListener::bind(&path).unwrap();
        let _backend = listener.accept().unwrap();
        connecting.join().unwrap().unwrap();
    });
}

#[test]
fn no_backend_connects() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(directory.path().join("vm1.sock")).unwrap();
    let error = Frontend::accept(&listener, SHORT).unwrap_err();
    assert!(matches!(error, FrontendError::Accept(_)), "{error}");
}

#[test]
fn a_silent_backend_ends_the_wait_and_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm1.sock");
    // Connections wait in its queue and are never answered.
    let _listener = UnixListener::bind(&path).unwrap();
    let mut frontend = Frontend::connect(&path, LONG).unwrap();
    with_short_timeout(&mut frontend);
    let start = Instant::now();
    let error = frontend.negotiate(u64::MAX).unwrap_err();
    assert!(
        matches!(
            error,
            FrontendError::Timeout {
                request: "GET_FEATURES",
                ..
            }
        ),
        "{error}"
    );
    assert!(start.elapsed() >= SHORT && start.elapsed() < LONG);
    // The connection is over: nothing waits any more.
    let error = frontend.stop().unwrap_err();
    assert!(matches!(error, FrontendError::Request { .. }), "{error}");
}

#[test]
fn a_backend_that_hangs_up_is_an_error_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm1.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let mut frontend = Frontend::connect(&path, LONG).unwrap();
    drop(listener.accept().unwrap());
    let start = Instant::now();
    let error = frontend.negotiate(u64::MAX).unwrap_err();
    assert!(
        matches!(
            error,
            FrontendError::Request {
                request: "GET_FEATURES",
                ..
            }
        ),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(4));
}

#[test]
fn without_negotiation_no_ring_is_enabled() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm1.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let mut frontend = Frontend::connect(&path, LONG).unwrap();
    let error = frontend.set_enabled(true).unwrap_err();
    assert!(
        matches!(error, FrontendError::NotNegotiated { .. }),
        "{error}"
    );
}
