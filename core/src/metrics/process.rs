//! Metrics of this process, read from `/proc` at every scrape.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::unistd::{SysconfVar, sysconf};

use super::labels::Labels;
use super::text;

/// Writes the `process_*` metrics that can be read.
pub(super) fn write(out: &mut String) {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |time| time.as_secs_f64());
    gauge(
        out,
        "process_clock_time_seconds",
        "Current time of this process, in seconds since 1970.",
        now,
    );
    if let Some(stat) = fs::read_to_string("/proc/self/stat")
        .ok()
        .as_deref()
        .and_then(Stat::parse)
    {
        write_stat(out, &stat, now);
    }
    if let Ok(open) = fs::read_dir("/proc/self/fd") {
        gauge(out, "process_open_fds", "Open file descriptors.", open.count() as f64);
    }
    if let Some(max) = fs::read_to_string("/proc/self/limits")
        .ok()
        .as_deref()
        .and_then(parse_max_fds)
    {
        gauge(out, "process_max_fds", "Maximum number of open file descriptors.", max);
    }
    if let Ok(text) = fs::read_to_string("/proc/self/net/dev") {
        let (received, transmitted) = parse_net_dev(&text);
        let help = "Bytes received on all interfaces of the network namespace except loopback.";
        counter(out, "process_network_receive_bytes_total", help, received);
        let help = "Bytes transmitted on all interfaces of the network namespace except loopback.";
        counter(out, "process_network_transmit_bytes_total", help, transmitted);
    }
}

fn write_stat(out: &mut String, stat: &Stat, now: f64) {
    let (Some(ticks), Some(page)) = (sysconf_value(SysconfVar::CLK_TCK), sysconf_value(SysconfVar::PAGE_SIZE)) else {
        return;
    };
    counter(
        out,
        "process_cpu_seconds_total",
        "User and system CPU time, in seconds.",
        stat.cpu_ticks / ticks,
    );
    gauge(
        out,
        "process_virtual_memory_bytes",
        "Virtual memory.",
        stat.virtual_bytes,
    );
    gauge(
        out,
        "process_resident_memory_bytes",
        "Resident memory.",
        stat.resident_pages * page,
    );
    gauge(out, "process_threads", "Threads.", stat.n_threads);
    if let Some(boot) = fs::read_to_string("/proc/stat")
        .ok()
        .as_deref()
        .and_then(parse_boot_time)
    {
        let start = boot + stat.start_ticks / ticks;
        gauge(
            out,
            "process_start_time_seconds",
            "Start time of this process, in seconds since 1970.",
            start,
        );
        counter(
            out,
            "process_uptime_seconds_total",
            "Time since the start of this process, in seconds.",
            (now - start).max(0.0),
        );
    }
}

/// The fields of `/proc/self/stat` that are used; see proc(5).
#[derive(Debug, PartialEq)]
struct Stat {
    cpu_ticks: f64,
    n_threads: f64,
    start_ticks: f64,
    virtual_bytes: f64,
    resident_pages: f64,
}

impl Stat {
    fn parse(text: &str) -> Option<Self> {
        // The program name is in parentheses and may contain parentheses. The first field after it is number 3.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<f64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            n_threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

fn parse_max_fds(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn parse_boot_time(stat: &str) -> Option<f64> {
    stat.lines()
        .find_map(|line| line.strip_prefix("btime "))?
        .trim()
        .parse()
        .ok()
}

/// Received and transmitted bytes of all interfaces except loopback.
fn parse_net_dev(text: &str) -> (f64, f64) {
    let mut totals = (0.0, 0.0);
    for (name, rest) in text.lines().filter_map(|line| line.split_once(':')) {
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |n: usize| fields.get(n).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        if name.trim() != "lo" {
            totals = (totals.0 + field(0), totals.1 + field(8));
        }
    }
    totals
}

fn sysconf_value(what: SysconfVar) -> Option<f64> {
    sysconf(what).ok().flatten().map(|value| value as f64)
}

fn gauge(out: &mut String, name: &str, help: &str, value: f64) {
    text::write_header(out, name, help, "gauge");
    text::write_sample(out, name, &Labels::new(), value);
}

fn counter(out: &mut String, name: &str, help: &str, value: f64) {
    text::write_header(out, name, help, "counter");
    text::write_sample(out, name, &Labels::new(), value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_name_with_parentheses_does_not_break_the_parsing_of_stat() {
        let text = "7 (a) b) S 1 7 7 0 -1 4194304 100 0 0 0 30 12 0 0 20 0 4 0 900 8192 25 1844";
        let stat = Stat::parse(text).unwrap();
        let expected = Stat {
            cpu_ticks: 42.0,
            n_threads: 4.0,
            start_ticks: 900.0,
            virtual_bytes: 8192.0,
            resident_pages: 25.0,
        };
        assert_eq!(stat, expected);
        assert_eq!(Stat::parse("7 (a) S 1"), None);
    }

    #[test]
    fn loopback_bytes_are_not_counted() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets|bytes\n    lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  \
                    eth0: 70 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n  eth1:7 1 0 0 0 0 0 0 3 1 0 0 0 0 0 0\n";
        assert_eq!(parse_net_dev(text), (77.0, 33.0));
    }

    #[test]
    fn this_process_has_memory_threads_and_descriptors() {
        let mut out = String::new();
        write(&mut out);
        for name in [
            "process_resident_memory_bytes",
            "process_threads",
            "process_open_fds",
            "process_clock_time_seconds",
        ] {
            let prefix = format!("{name} ");
            let value = out.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap();
            assert!(value.parse::<f64>().unwrap() > 0.0, "{name} {value}");
        }
    }
}
