//! The reference scenario: two sidecars with mutual TLS between a client and a server, in namespaces of one machine.
//!
//! Peers take turns within each repeat, so that whatever else the machine does hits all of them; medians are reported.
//! Each group of rows gets fresh sidecars.
//! The client, both sidecars and the application share the machine's cores: trust the ratios, not the absolutes.

mod bounds;
mod certs;
mod drive;
mod others;
mod peer;
pub mod process;
mod report;
mod scene;
mod tools;
mod tulle;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;

use self::peer::Peer;
use self::report::Results;
use self::scene::Scene;

/// What to compare, and for how long.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// Which sidecars to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Peer::Tulle, Peer::Haproxy, Peer::None])]
    peers: Vec<Peer>,
    /// Which rows to measure.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Row::ALL)]
    rows: Vec<Row>,
    /// How often each row is measured for each peer.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    repeats: u16,
    /// How long each measurement takes, in whole seconds.
    #[arg(long, default_value = "4s", value_parser = tulle_core::duration::parse)]
    duration: Duration,
    /// Also write everything measured to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// One thing to measure.
#[derive(clap::ValueEnum, serde::Serialize, Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Row {
    /// HTTP/1 on one connection.
    #[value(name = "http-c1")]
    #[serde(rename = "http-c1")]
    Http1,
    /// HTTP/1 on 16 connections.
    #[value(name = "http-c16")]
    #[serde(rename = "http-c16")]
    Http16,
    /// HTTP/1 on 64 connections.
    #[value(name = "http-c64")]
    #[serde(rename = "http-c64")]
    Http64,
    /// gRPC unary calls, 32 at a time on 4 connections.
    Grpc,
    /// Opaque TCP: messages of 1 MiB echoed on 4 connections.
    Bulk,
    /// Memory of 800 idle HTTP/1 connections.
    Idle,
    /// Allocations per request of tulle, by a build of it that counts them.
    Allocations,
}

/// What the sidecars have to carry; they are started for one kind at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Traffic {
    Http1,
    Grpc,
    Opaque,
}

/// Measures, prints the table, writes the JSON, and fails when a bound is broken.
pub fn main(args: &Args) -> anyhow::Result<()> {
    tools::raise_descriptor_limit()?;
    let scene = Scene::build(&args.peers)?;
    let mut results = Results::new();
    for repeat in 1..=args.repeats {
        for peer in &args.peers {
            for group in groups(&args.rows) {
                let first = group[0];
                if !first.applies_to(*peer) {
                    continue;
                }
                eprintln!("repeat {repeat} of {}: {peer:?} {group:?}", args.repeats);
                let sidecars = peer
                    .start(&scene, first)
                    .with_context(|| format!("starting {peer:?} for {first:?}"))?;
                drive::warm_up(&scene, sidecars.as_ref(), first.traffic())
                    .with_context(|| format!("warming {peer:?} up"))?;
                peer.verify(&scene).with_context(|| format!("checking {peer:?}"))?;
                for row in group {
                    let sample = drive::measure(row, &scene, sidecars.as_ref(), args.duration)
                        .with_context(|| format!("measuring {row:?} of {peer:?}"))?;
                    results.add(row, *peer, sample);
                }
            }
        }
    }
    let report = results.report(bounds::COMMITTED)?;
    if let Some(path) = &args.json {
        let json = serde_json::to_vec_pretty(&report).context("encoding the report")?;
        std::fs::write(path, json).with_context(|| format!("writing {}", path.display()))?;
    }
    tools::print(&report.to_string())?;
    anyhow::ensure!(report.passed(), "a bound of budgets.toml is broken");
    Ok(())
}

/// Rows that share one start of the sidecars: the loads of HTTP/1, in the order of their size.
fn groups(rows: &[Row]) -> Vec<Vec<Row>> {
    let mut rows = rows.to_vec();
    rows.sort();
    rows.dedup();
    rows.chunk_by(|a, b| a.is_http_load() && b.is_http_load())
        .map(<[Row]>::to_vec)
        .collect()
}

impl Row {
    const ALL: [Self; 7] = [
        Self::Http1,
        Self::Http16,
        Self::Http64,
        Self::Grpc,
        Self::Bulk,
        Self::Idle,
        Self::Allocations,
    ];

    fn is_http_load(self) -> bool {
        matches!(self, Self::Http1 | Self::Http16 | Self::Http64)
    }

    /// Whether there is anything to measure.
    fn applies_to(self, peer: Peer) -> bool {
        match self {
            Self::Idle => peer != Peer::None,
            Self::Allocations => peer == Peer::Tulle,
            _ => true,
        }
    }

    fn traffic(self) -> Traffic {
        match self {
            Self::Http1 | Self::Http16 | Self::Http64 | Self::Idle | Self::Allocations => Traffic::Http1,
            Self::Grpc => Traffic::Grpc,
            Self::Bulk => Traffic::Opaque,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_http_rows_share_sidecars() {
        let rest = [Row::Grpc, Row::Bulk, Row::Idle, Row::Allocations].map(|row| vec![row]);
        let expected = [vec![vec![Row::Http1, Row::Http16, Row::Http64]], rest.to_vec()].concat();
        assert_eq!(groups(&Row::ALL), expected);
        assert_eq!(
            groups(&[Row::Idle, Row::Http64, Row::Http64]),
            [vec![Row::Http64], vec![Row::Idle]]
        );
    }
}
