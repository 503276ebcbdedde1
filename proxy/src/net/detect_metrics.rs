//! `*_tcp_detect_http_*`: the results of protocol detection and how long it took.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use tulle_core::metrics::{Counter, Family, Histogram, Labels, Registry};

use crate::net::{detect::DetectedProtocol, first_bytes::FirstBytes};

/// Bucket upper bounds, in seconds.
const SECONDS_BUCKETS: &[f64] = &[0.001, 0.1];

#[derive(Clone)]
pub(crate) struct Families {
    durations: Family<Histogram>,
    results: Family<Counter>,
}

/// The series of connections with the same labels.
pub(crate) struct Series {
    families: Families,
    labels: Labels,
    durations: Arc<Histogram>,
    results: [OnceLock<Arc<Counter>>; DetectionResult::ALL.len()],
}

/// A value of the label `result`.
#[derive(Clone, Copy)]
enum DetectionResult {
    Http1,
    Http2,
    NotHttp,
    /// The client sent no byte within the time limit, or before the server closed the connection.
    ReadTimeout,
    Error,
}

impl Families {
    pub(crate) fn new(registry: &Registry, direction: &str) -> Self {
        let name = |name: &str| format!("{direction}_tcp_detect_http_{name}");
        Self {
            durations: registry.histogram(
                &name("duration_seconds"),
                "Seconds that protocol detection took",
                SECONDS_BUCKETS,
            ),
            results: registry.counter(&name("results_total"), "Connections by detected protocol"),
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
    /// Counts a detection result; `None` means that reading failed.
    pub(crate) fn record(&self, first: Option<&FirstBytes>, took: Duration) {
        let result = DetectionResult::new(first);
        self.durations.observe(took.as_secs_f64());
        let counter = self.results[result as usize].get_or_init(|| {
            let labels = Labels::new().with("result", result.as_str());
            self.families.results.get(&labels.extend(&self.labels))
        });
        counter.inc();
    }
}

impl DetectionResult {
    /// In the order of the variants.
    const ALL: [Self; 5] = [Self::Http1, Self::Http2, Self::NotHttp, Self::ReadTimeout, Self::Error];

    fn new(first: Option<&FirstBytes>) -> Self {
        match first {
            Some(FirstBytes::ClientOrNeither {
                client_bytes, protocol, ..
            }) => match protocol {
                DetectedProtocol::Http1 => Self::Http1,
                DetectedProtocol::Http2 => Self::Http2,
                _ if client_bytes.is_empty() => Self::ReadTimeout,
                _ => Self::NotHttp,
            },
            Some(FirstBytes::Server { .. } | FirstBytes::Closed) => Self::NotHttp,
            None => Self::Error,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Http1 => "http/1",
            Self::Http2 => "http/2",
            Self::NotHttp => "not_http",
            Self::ReadTimeout => "read_timeout",
            Self::Error => "error",
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn detection_results_are_counted() {
        let registry = Registry::new();
        let series = Families::new(&registry, "inbound").series(Labels::new().with("srv_name", "web"));
        let client = |seen: &'static str, protocol| {
            Some(FirstBytes::ClientOrNeither {
                client_bytes: Bytes::from_static(seen.as_bytes()),
                protocol,
                server: None,
            })
        };
        for first in [
            client("GET /", DetectedProtocol::Http1),
            client("PRI *", DetectedProtocol::Http2),
            client("hello", DetectedProtocol::NotHttp),
            Some(FirstBytes::Closed),
            client("", DetectedProtocol::NotHttp),
            None,
        ] {
            series.record(first.as_ref(), Duration::from_millis(5));
        }
        let page = registry.render();
        for (result, n) in DetectionResult::ALL.into_iter().zip([1, 1, 2, 1, 1]) {
            let result = result.as_str();
            let line = format!("inbound_tcp_detect_http_results_total{{result=\"{result}\",srv_name=\"web\"}} {n}\n");
            assert!(page.contains(&line), "{line}{page}");
        }
        assert!(
            page.contains("duration_seconds_bucket{srv_name=\"web\",le=\"0.1\"} 6\n"),
            "{page}"
        );
    }
}
