//! `*_tcp_detect_http_*`: what connections of unknown protocol turned out to be, and how long that took.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::net::{detect::Verdict, first::First};

/// Upper bounds in seconds.
const DURATIONS: &[f64] = &[0.001, 0.1];

/// The families of one direction.
#[derive(Clone)]
pub(crate) struct Families {
    durations: Family<Histogram>,
    results: Family<Counter>,
}

/// The series of connections that share their labels.
pub(crate) struct Series {
    families: Families,
    labels: Labels,
    durations: Arc<Histogram>,
    results: [OnceLock<Arc<Counter>>; RESULTS.len()],
}

impl Families {
    pub(crate) fn new(registry: &Registry, direction: &str) -> Self {
        let name = |name: &str| format!("{direction}_tcp_detect_http_{name}");
        Self {
            durations: registry.histogram(
                &name("duration_seconds"),
                "Seconds from a connection's begin until it was known whether it is HTTP",
                DURATIONS,
            ),
            results: registry.counter(&name("results_total"), "Connections by what they turned out to be"),
        }
    }

    pub(crate) fn series(&self, labels: Labels) -> Series {
        Series {
            families: self.clone(),
            durations: self.durations.get(&labels),
            results: Default::default(),
            labels,
        }
    }
}

impl Series {
    /// Counts a connection that began so; with nothing, it could not be read.
    pub(crate) fn found(&self, first: Option<&First>, took: Duration) {
        let result = result(first);
        self.durations.observe(took.as_secs_f64());
        let counter = self.results[result].get_or_init(|| {
            let labels = Labels::new().with("result", RESULTS[result]);
            self.families.results.get(&labels.extend(&self.labels))
        });
        counter.inc();
    }
}

/// Index among the results.
fn result(first: Option<&First>) -> usize {
    match first {
        Some(First::Client(_, Verdict::Http1, _)) => 0,
        Some(First::Client(_, Verdict::Http2, _)) => 1,
        // Nothing came in time.
        Some(First::Client(seen, ..)) if seen.is_empty() => 3,
        Some(First::Client(..) | First::Server { .. } | First::Closed) => 2,
        None => 4,
    }
}

const RESULTS: [&str; 5] = ["http/1", "http/2", "not_http", "read_timeout", "error"];

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn what_a_connection_turned_out_to_be_is_counted() {
        let registry = Registry::new();
        let series = Families::new(&registry, "inbound").series(Labels::new().with("srv_name", "web"));
        let client =
            |seen: &'static str, verdict| Some(First::Client(Bytes::from_static(seen.as_bytes()), verdict, None));
        for first in [
            client("GET /", Verdict::Http1),
            client("PRI *", Verdict::Http2),
            client("hello", Verdict::NotHttp),
            Some(First::Closed),
            client("", Verdict::NotHttp),
            None,
        ] {
            series.found(first.as_ref(), Duration::from_millis(5));
        }
        let page = registry.render();
        for (result, n) in RESULTS.into_iter().zip([1, 1, 2, 1, 1]) {
            let line = format!("inbound_tcp_detect_http_results_total{{result=\"{result}\",srv_name=\"web\"}} {n}\n");
            assert!(page.contains(&line), "{line}{page}");
        }
        assert!(
            page.contains("duration_seconds_bucket{srv_name=\"web\",le=\"0.1\"} 6\n"),
            "{page}"
        );
    }
}
