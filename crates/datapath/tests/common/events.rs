//! What the housekeeping thread reports: warnings and errors by their fields.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, span};

type Fields = BTreeMap<&'static str, String>;
static EVENTS: Mutex<Vec<Fields>> = Mutex::new(Vec::new());

fn events() -> MutexGuard<'static, Vec<Fields>> {
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Recorder;

#[derive(Default)]
struct Collect(Fields);

impl Visit for Collect {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut fields = Collect::default();
        event.record(&mut fields);
        events().push(fields.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Starts to record, once for this process, and forgets.
pub(crate) fn begin() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        tracing::subscriber::set_global_default(Recorder).expect("nobody else records");
    });
    events().clear();
}

/// Faults that were reported for a queue ("rx" or "tx") of a port.
pub(crate) fn faults(port: &str, queue: &str) -> Vec<String> {
    let is = |fields: &Fields, name, value| fields.get(name).is_some_and(|field| field == value);
    let of_queue = |fields: &&Fields| is(fields, "port", port) && is(fields, "queue", queue);
    let events = events();
    let events = events.iter().filter(of_queue);
    events.map(|fields| fields["fault"].clone()).collect()
}

/// What was reported about a worker.
pub(crate) fn of_worker(worker: &str) -> Vec<String> {
    let is_of = |fields: &&Fields| fields.get("worker").is_some_and(|field| field == worker);
    let events = events();
    let events = events.iter().filter(is_of);
    events.map(|fields| fields["message"].clone()).collect()
}
