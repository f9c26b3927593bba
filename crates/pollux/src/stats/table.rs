//! A snapshot as a page for people.

use std::fmt::Write as _;

use pollux_packet::DropReason;
use pollux_vhost::SessionState;

use super::snapshot::{PortStats, Snapshot, WorkerStats};

/// Whether a page has colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    /// ANSI sequences.
    Colour,
}

const BOLD: &str = "\x1b[1m";
const RED: &str = "\x1b[31m";
const GREEN: &str = "\x1b[32m";
const YELLOW: &str = "\x1b[33m";
const RESET: &str = "\x1b[0m";

/// Where the text of a column stands.
#[derive(Clone, Copy)]
enum Align {
    Left,
    Right,
}

use Align::{Left, Right};

/// A place in a table: text, and the ANSI sequence of its colour.
type Cell = (String, &'static str);

/// Workers, ports, drops, and what the ports wait for, each a block of lines.
pub(crate) fn render(snapshot: &Snapshot, style: Style) -> String {
    let mut page = format!(
        "pollux up {}, rates of the last {} s; rx: from the guest, tx: to the guest\n\n",
        duration(snapshot.uptime_seconds),
        fixed(Some(snapshot.interval_seconds), 1),
    );
    let mut block = |rows: &[Vec<Cell>], columns: &[(&str, Align)]| {
        write_table(&mut page, columns, rows, style);
    };
    let workers: Vec<_> = snapshot.workers.iter().map(worker_row).collect();
    block(&workers, &WORKER_COLUMNS);
    let ports: Vec<_> = snapshot.ports.iter().map(port_row).collect();
    block(&ports, &PORT_COLUMNS);
    let drops: Vec<_> = snapshot.ports.iter().flat_map(drop_rows).collect();
    if !drops.is_empty() {
        block(&drops, &DROP_COLUMNS);
    }
    for port in &snapshot.ports {
        let name = &port.name;
        if let Some(missing) = &port.missing {
            let _ = writeln!(page, "{name} waits: {missing}");
        }
        if let Some(error) = &port.last_error {
            let _ = writeln!(page, "{name} last error: {error}");
        }
    }
    page
}

const WORKER_COLUMNS: [(&str, Align); 7] = [
    ("WORKER", Left),
    ("CORE", Right),
    ("BUSY %", Right),
    ("IDLE %", Right),
    ("MPPS", Right),
    ("CYCLES/PACKET", Right),
    ("PACKETS/BATCH", Right),
];

fn worker_row(worker: &WorkerStats) -> Vec<Cell> {
    let core = worker.core.map_or("-".to_owned(), |core| core.to_string());
    [
        worker.name.clone(),
        core,
        fixed(Some(worker.busy * 100.0), 1),
        fixed(Some(worker.idle * 100.0), 1),
        fixed(Some(worker.mpps), 3),
        fixed(worker.cycles_per_packet, 1),
        fixed(worker.packets_per_batch, 1),
    ]
    .map(|text| (text, ""))
    .into()
}

const PORT_COLUMNS: [(&str, Align); 9] = [
    ("PORT", Left),
    ("STATE", Left),
    ("RX PACKETS/S", Right),
    ("RX GBIT/S", Right),
    ("TX PACKETS/S", Right),
    ("TX GBIT/S", Right),
    ("RX PACKETS", Right),
    ("TX PACKETS", Right),
    ("DROPS", Right),
];

fn port_row(port: &PortStats) -> Vec<Cell> {
    let (state, colour) = match port.state {
        Some(state) => (state.name(), state_colour(state)),
        None => ("-", ""),
    };
    let plain = |text: String| (text, "");
    vec![
        plain(port.name.clone()),
        (state.to_owned(), colour),
        plain(grouped(&fixed(Some(port.rx.packets_per_second), 0))),
        plain(fixed(Some(port.rx.bits_per_second / 1e9), 3)),
        plain(grouped(&fixed(Some(port.tx.packets_per_second), 0))),
        plain(fixed(Some(port.tx.bits_per_second / 1e9), 3)),
        plain(grouped(&port.rx.packets.to_string())),
        plain(grouped(&port.tx.packets.to_string())),
        plain(grouped(&port.drops.values().sum::<u64>().to_string())),
    ]
}

fn state_colour(state: SessionState) -> &'static str {
    match state {
        SessionState::Running => GREEN,
        SessionState::Broken => RED,
        _ => YELLOW,
    }
}

const DROP_COLUMNS: [(&str, Align); 4] = [
    ("PORT", Left),
    ("DROPPED FOR", Left),
    ("PACKETS", Right),
    ("WHICH MEANS", Left),
];

fn drop_rows(port: &PortStats) -> impl Iterator<Item = Vec<Cell>> + '_ {
    port.drops.iter().map(|(&name, count)| {
        let reason = DropReason::ALL.iter().find(|reason| reason.name() == name);
        [
            port.name.clone(),
            name.to_owned(),
            grouped(&count.to_string()),
            reason.map_or("", |reason| reason.meaning()).to_owned(),
        ]
        .map(|text| (text, ""))
        .into()
    })
}

/// Columns as wide as their widest cell, two spaces apart, then an empty line.
fn write_table(page: &mut String, columns: &[(&str, Align)], rows: &[Vec<Cell>], style: Style) {
    let head: Vec<Cell> = columns
        .iter()
        .map(|(name, _)| ((*name).to_owned(), BOLD))
        .collect();
    let lines: Vec<&Vec<Cell>> = std::iter::once(&head).chain(rows).collect();
    let width = |column: usize| {
        let cells = lines.iter().map(|line| line[column].0.chars().count());
        cells.max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    for line in lines {
        let mut written = String::new();
        for (((text, colour), width), (_, align)) in line.iter().zip(&widths).zip(columns) {
            let padding = " ".repeat(width - text.chars().count());
            let (left, right) = match align {
                Left => ("", padding.as_str()),
                Right => (padding.as_str(), ""),
            };
            let (colour, reset) = match style {
                Style::Colour if !colour.is_empty() => (*colour, RESET),
                _ => ("", ""),
            };
            let _ = write!(written, "{left}{colour}{text}{reset}{right}  ");
        }
        page.push_str(written.trim_end());
        page.push('\n');
    }
    page.push('\n');
}

fn fixed(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

/// Digits with a comma before every third from the right.
fn grouped(digits: &str) -> String {
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// `1d 02:03:04`, without days if there are none.
fn duration(seconds: f64) -> String {
    let seconds = std::time::Duration::from_secs_f64(seconds.max(0.0)).as_secs();
    let (days, hours) = (seconds / 86_400, seconds / 3600 % 24);
    let clock = format!("{hours:02}:{:02}:{:02}", seconds / 60 % 60, seconds % 60);
    if days == 0 {
        clock
    } else {
        format!("{days}d {clock}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::snapshot::tests::example;

    #[test]
    fn a_page_is_aligned() {
        assert_eq!(
            render(&example(), Style::Plain),
            "\
pollux up 00:01:02, rates of the last 2.0 s; rx: from the guest, tx: to the guest

WORKER  CORE  BUSY %  IDLE %   MPPS  CYCLES/PACKET  PACKETS/BATCH
w0         0    50.0    45.0  5.000          100.0           25.0
spare      -     0.0     0.0  0.000              -              -

PORT  STATE        RX PACKETS/S  RX GBIT/S  TX PACKETS/S  TX GBIT/S  RX PACKETS  TX PACKETS  DROPS
vm1   running         5,000,000      2.560             0      0.000  10,000,000           0      0
vm2   negotiating             0      0.000     4,999,500      2.560           0   9,999,000  1,000

PORT  DROPPED FOR   PACKETS  WHICH MEANS
vm2   rx-ring-full    1,000  the destination guest has no free receive buffers: it reads too slowly

vm2 waits: the frontend has to send SET_MEM_TABLE
vm2 last error: the frontend went away
"
        );
    }

    #[test]
    fn colours_change_no_column() {
        let plain = render(&example(), Style::Plain);
        let mut colour = render(&example(), Style::Colour);
        assert!(colour.contains("\x1b[32mrunning"));
        for sequence in [BOLD, RED, GREEN, YELLOW, RESET] {
            colour = colour.replace(sequence, "");
        }
        assert_eq!(colour, plain);
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(grouped("1"), "1");
        assert_eq!(grouped("123"), "123");
        assert_eq!(grouped("1234567"), "1,234,567");
        assert_eq!(duration(59.9), "00:00:59");
        assert_eq!(duration(93_784.0), "1d 02:03:04");
    }
}
