//! A layer around the client: it waits for its turn, counts, and logs each request in the form of client-go.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Method, Request, Response, Uri};
use tokio::time::{Instant, Sleep, sleep_until};
use tower::{Layer, Service};
use tracing::{Level, info};
use tulle_core::metrics::{Counter, Family, Gauge, Histogram, Labels, Registry};

use crate::kubernetes::Rate;

#[derive(Clone)]
pub(super) struct RequestsLayer {
    /// Scheme, host and port, as log lines show them.
    server: Arc<str>,
    rate: Rate,
    metrics: Metrics,
}

pub(super) struct Requests<S> {
    inner: S,
    server: Arc<str>,
    turns: Turns,
    metrics: Metrics,
}

impl RequestsLayer {
    pub(super) fn new(server: &Uri, rate: Rate, registry: &Registry) -> Self {
        Self {
            server: with_port(server).into(),
            rate,
            metrics: Metrics::new(registry, rate),
        }
    }
}

impl<S> Layer<S> for RequestsLayer {
    type Service = Requests<S>;

    fn layer(&self, inner: S) -> Requests<S> {
        Requests {
            inner,
            server: self.server.clone(),
            turns: Turns::new(self.rate),
            metrics: self.metrics.clone(),
        }
    }
}

impl<S, Q, B> Service<Request<Q>> for Requests<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        ready!(self.turns.poll(cx));
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, req: Request<Q>) -> Self::Future {
        self.turns.take();
        let shown = tracing::enabled!(Level::DEBUG).then(|| {
            // The client writes a question mark even where nothing follows.
            let uri = req.uri().to_string().replace("?&", "?");
            format!("{} {}{}", req.method(), self.server, uri.trim_end_matches('?'))
        });
        let method = req.method().clone();
        let client = self.metrics.client(req.uri().path()).clone();
        let sent_at = Instant::now();
        let in_flight = InFlight::new(&client.in_flight);
        let rsp = self.inner.call(req);
        Box::pin(async move {
            let rsp = rsp.await;
            drop(in_flight);
            let took = sent_at.elapsed();
            client.observe(&method, rsp.as_ref().ok().map(Response::status), took);
            if let Some(shown) = shown {
                // An error has no status, and its line a gap, as client-go writes it.
                let status = rsp.as_ref().map(|rsp| rsp.status().to_string()).unwrap_or_default();
                info!("{shown} {status} in {} milliseconds", took.as_millis());
            }
            rsp
        })
    }
}

/// A bucket of turns that fills with time.
struct Turns {
    rate: Rate,
    left: f64,
    counted_at: Instant,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl Turns {
    fn new(rate: Rate) -> Self {
        Self {
            rate,
            left: f64::from(rate.burst),
            counted_at: Instant::now(),
            waiting: None,
        }
    }

    /// Ready once there is a turn, which stays until it is taken.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(waiting) = &mut self.waiting {
                ready!(waiting.as_mut().poll(cx));
                self.waiting = None;
            }
            let now = Instant::now();
            let earned = now.duration_since(self.counted_at).as_secs_f64() * self.rate.qps;
            self.left = (self.left + earned).min(f64::from(self.rate.burst).max(1.0));
            self.counted_at = now;
            if self.left >= 1.0 {
                return Poll::Ready(());
            }
            let missing = Duration::from_secs_f64((1.0 - self.left) / self.rate.qps).max(MIN_WAIT);
            self.waiting = Some(Box::pin(sleep_until(now + missing)));
        }
    }

    fn take(&mut self) {
        self.left -= 1.0;
    }
}

/// Counts a request while it has no answer.
struct InFlight(Arc<Gauge>);

impl InFlight {
    fn new(gauge: &Arc<Gauge>) -> Self {
        gauge.add(1);
        Self(gauge.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

/// A server as log lines name it: with its port, also where that goes without saying.
fn with_port(server: &Uri) -> String {
    let text = server.to_string();
    let text = text.trim_end_matches('/');
    let default = match server.scheme_str() {
        Some("https") => 443,
        _ => 80,
    };
    let is_bare = server.port().is_none() && matches!(server.path(), "" | "/");
    if is_bare {
        format!("{text}:{default}")
    } else {
        text.to_owned()
    }
}

/// Series of the API server's own kinds and of ours, told apart as two clients.
#[derive(Clone)]
struct Metrics {
    own: ClientMetrics,
    mesh: ClientMetrics,
}

#[derive(Clone)]
struct ClientMetrics {
    name: &'static str,
    requests: Family<Counter>,
    errors: Arc<Counter>,
    latency: Arc<Histogram>,
    in_flight: Arc<Gauge>,
}

impl Metrics {
    fn new(registry: &Registry, rate: Rate) -> Self {
        Self {
            own: ClientMetrics::new(registry, rate, "k8s"),
            mesh: ClientMetrics::new(registry, rate, "l5dCrd"),
        }
    }

    fn client(&self, path: &str) -> &ClientMetrics {
        let group = path.strip_prefix("/apis/").and_then(|rest| rest.split('/').next());
        match group.is_some_and(|group| group.ends_with("linkerd.io")) {
            true => &self.mesh,
            false => &self.own,
        }
    }
}

impl ClientMetrics {
    fn new(registry: &Registry, rate: Rate, name: &'static str) -> Self {
        let labels = Labels::new().with("client", name);
        let gauge = |metric: &str, help: &str, value: i64| {
            registry.gauge(metric, help).get(&labels).set(value);
        };
        #[expect(clippy::cast_possible_truncation, reason = "a rate is far below 2^63")]
        gauge(
            "http_client_qps",
            "Requests a second to the API server, at most.",
            rate.qps as i64,
        );
        gauge(
            "http_client_burst",
            "Requests at once to the API server, at most.",
            rate.burst.into(),
        );
        let requests = registry.counter(
            "http_client_requests_total",
            "Requests to the API server, by method and status.",
        );
        let errors = registry.counter(
            "http_client_errors_total",
            "Requests to the API server without an answer.",
        );
        let latency = registry.histogram(
            "http_client_request_latency_seconds",
            "Time until the API server answers.",
            LATENCY_BUCKETS,
        );
        let in_flight = registry.gauge(
            "http_client_in_flight_requests",
            "Requests that the API server has not answered yet.",
        );
        Self {
            name,
            requests,
            errors: errors.get(&labels),
            latency: latency.get(&labels),
            in_flight: in_flight.get(&labels),
        }
    }

    fn observe(&self, method: &Method, status: Option<http::StatusCode>, took: Duration) {
        self.latency.observe(took.as_secs_f64());
        let Some(status) = status else { return self.errors.inc() };
        let method = method.as_str().to_ascii_lowercase();
        let labels = Labels::new()
            .with("client", self.name)
            .with("code", status.as_u16())
            .with("method", method);
        self.requests.get(&labels).inc();
    }
}

/// Timers are no finer; without it a rounding error could wait in vain.
const MIN_WAIT: Duration = Duration::from_millis(1);

/// Those of client-go's Prometheus wrapper.
const LATENCY_BUCKETS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tower::{ServiceExt, service_fn};

    use super::*;

    async fn answer(req: Request<()>) -> Result<Response<()>, Infallible> {
        let status = if req.uri().path() == "/gone" { 410 } else { 200 };
        Ok(Response::builder().status(status).body(()).unwrap())
    }

    /// A client of a server that knows everything but `/gone`.
    fn requests(rate: Rate, registry: &Registry) -> impl Service<Request<()>, Error = Infallible> + use<> {
        let server = "https://10.247.0.1/".parse().unwrap();
        RequestsLayer::new(&server, rate, registry).layer(service_fn(answer))
    }

    async fn get(requests: &mut impl Service<Request<()>, Error = Infallible>, path: &str) {
        let req = Request::get(path).body(()).unwrap();
        requests.ready().await.unwrap().call(req).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_the_burst_wait_for_their_turn() {
        let mut requests = requests(Rate { qps: 10.0, burst: 3 }, &Registry::new());
        let start = Instant::now();
        for _ in 0..3 {
            get(&mut requests, "/").await;
        }
        assert!(start.elapsed() < Duration::from_millis(5), "{:?}", start.elapsed());
        for _ in 0..10 {
            get(&mut requests, "/").await;
        }
        let took = start.elapsed();
        assert!((990..1100).contains(&took.as_millis()), "{took:?}");
    }

    #[tokio::test]
    async fn requests_are_counted_by_client_method_and_status() {
        let registry = Registry::new();
        let mut requests = requests(Rate { qps: 10.0, burst: 3 }, &registry);
        get(&mut requests, "/api/v1/pods?limit=500").await;
        get(&mut requests, "/gone").await;
        get(&mut requests, "/apis/policy.linkerd.io/v1beta3/servers").await;
        let page = registry.render();
        for line in [
            r#"http_client_requests_total{client="k8s",code="200",method="get"} 1"#,
            r#"http_client_requests_total{client="k8s",code="410",method="get"} 1"#,
            r#"http_client_requests_total{client="l5dCrd",code="200",method="get"} 1"#,
            r#"http_client_request_latency_seconds_count{client="k8s"} 2"#,
            r#"http_client_in_flight_requests{client="k8s"} 0"#,
            r#"http_client_qps{client="k8s"} 10"#,
            r#"http_client_burst{client="l5dCrd"} 3"#,
        ] {
            assert!(page.contains(line), "{line} is not in\n{page}");
        }
    }
}
