//! A client layer that applies the rate limit, records metrics and logs each request in client-go's format.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::{Method, Request, Response, Uri};
use tokio::time::{Instant, Sleep, sleep_until};
use tower::{Layer, Service};
use tracing::{Level, info};
use tulle_core::metrics::{Counter, Family, Gauge, Histogram, Labels, Registry};

/// Rate limit of requests to the API server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestRate {
    /// Requests per second, on average. Default 100.
    pub qps: f64,
    /// Requests in a burst. Default 200.
    pub burst: u32,
}

#[derive(Clone)]
pub(super) struct RequestLayer {
    /// Scheme, host and port for log lines.
    server: Arc<str>,
    rate: RequestRate,
    metrics: Metrics,
}

pub(super) struct RequestService<S> {
    inner: S,
    server: Arc<str>,
    bucket: TokenBucket,
    metrics: Metrics,
}

impl RequestLayer {
    /// `cluster` is the name of another cluster, for metric labels; `None` for the cluster of this control plane.
    pub(super) fn new(server: &Uri, rate: RequestRate, registry: &Registry, cluster: Option<&str>) -> Self {
        Self {
            server: server_with_port(server).into(),
            rate,
            metrics: Metrics::new(registry, rate, cluster),
        }
    }
}

impl<S> Layer<S> for RequestLayer {
    type Service = RequestService<S>;

    fn layer(&self, inner: S) -> RequestService<S> {
        RequestService {
            inner,
            server: self.server.clone(),
            bucket: TokenBucket::new(self.rate),
            metrics: self.metrics.clone(),
        }
    }
}

impl<S, Q, B> Service<Request<Q>> for RequestService<S>
where
    S: Service<Request<Q>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<B>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        ready!(self.bucket.poll_token(cx));
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, req: Request<Q>) -> Self::Future {
        self.bucket.take_token();
        // As in client-go with -v=6, requests are logged at the level info, but only if the log level is debug.
        let log_line = tracing::enabled!(Level::DEBUG).then(|| {
            // kube writes a question mark even if no parameters follow.
            let uri = req.uri().to_string().replace("?&", "?");
            format!("{} {}{}", req.method(), self.server, uri.trim_end_matches('?'))
        });
        let method = req.method().clone();
        let client = self.metrics.client_metrics(req.uri().path()).clone();
        let sent_at = Instant::now();
        let in_flight = InFlightGuard::new(&client.in_flight);
        let rsp = self.inner.call(req);
        Box::pin(async move {
            let rsp = rsp.await;
            drop(in_flight);
            let took = sent_at.elapsed();
            client.observe(&method, rsp.as_ref().ok().map(Response::status), took);
            if let Some(log_line) = log_line {
                // As in client-go, the status is empty after an error.
                let status = rsp.as_ref().map(|rsp| rsp.status().to_string()).unwrap_or_default();
                info!("{log_line} {status} in {} milliseconds", took.as_millis());
            }
            rsp
        })
    }
}

struct TokenBucket {
    rate: RequestRate,
    tokens: f64,
    refilled_at: Instant,
    refill_timer: Option<Pin<Box<Sleep>>>,
}

impl TokenBucket {
    fn new(rate: RequestRate) -> Self {
        Self {
            rate,
            tokens: f64::from(rate.burst),
            refilled_at: Instant::now(),
            refill_timer: None,
        }
    }

    /// Waits until a token is available. The token stays available until `take_token`.
    fn poll_token(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(waiting) = &mut self.refill_timer {
                ready!(waiting.as_mut().poll(cx));
                self.refill_timer = None;
            }
            let now = Instant::now();
            let refilled = now.duration_since(self.refilled_at).as_secs_f64() * self.rate.qps;
            self.tokens = (self.tokens + refilled).min(f64::from(self.rate.burst).max(1.0));
            self.refilled_at = now;
            if self.tokens >= 1.0 {
                return Poll::Ready(());
            }
            let wait = Duration::from_secs_f64((1.0 - self.tokens) / self.rate.qps).max(MIN_TOKEN_WAIT);
            self.refill_timer = Some(Box::pin(sleep_until(now + wait)));
        }
    }

    fn take_token(&mut self) {
        self.tokens -= 1.0;
    }
}

/// Counts a request in flight until it is dropped.
struct InFlightGuard(Arc<Gauge>);

impl InFlightGuard {
    fn new(gauge: &Arc<Gauge>) -> Self {
        gauge.add(1);
        Self(gauge.clone())
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.add(-1);
    }
}

/// Returns the URL of a server for log lines, with the default port if it has neither port nor path.
fn server_with_port(server: &Uri) -> String {
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

/// Metrics for the API groups of linkerd.io, and for all other groups.
#[derive(Clone)]
struct Metrics {
    kubernetes_api: ClientMetrics,
    linkerd_api: ClientMetrics,
}

#[derive(Clone)]
struct ClientMetrics {
    labels: Labels,
    requests: Family<Counter>,
    errors: Arc<Counter>,
    latency: Arc<Histogram>,
    in_flight: Arc<Gauge>,
}

impl Metrics {
    fn new(registry: &Registry, rate: RequestRate, cluster: Option<&str>) -> Self {
        let labels = |name: &str| {
            let labels = Labels::new().with("client", name);
            match cluster {
                Some(cluster) => labels.with("cluster", cluster),
                None => labels,
            }
        };
        Self {
            kubernetes_api: ClientMetrics::new(registry, rate, labels("k8s")),
            linkerd_api: ClientMetrics::new(registry, rate, labels("l5dCrd")),
        }
    }

    /// The metrics for the API group in the path of a request.
    fn client_metrics(&self, path: &str) -> &ClientMetrics {
        let group = path.strip_prefix("/apis/").and_then(|rest| rest.split('/').next());
        match group.is_some_and(|group| group.ends_with("linkerd.io")) {
            true => &self.linkerd_api,
            false => &self.kubernetes_api,
        }
    }
}

impl ClientMetrics {
    fn new(registry: &Registry, rate: RequestRate, labels: Labels) -> Self {
        let gauge = |metric: &str, help: &str, value: i64| {
            registry.gauge(metric, help).get(&labels).set(value);
        };
        #[expect(clippy::cast_possible_truncation, reason = "a rate is far below 2^63")]
        gauge(
            "http_client_qps",
            "Maximum rate of requests to the API server, per second.",
            rate.qps as i64,
        );
        gauge(
            "http_client_burst",
            "Maximum burst of requests to the API server.",
            rate.burst.into(),
        );
        let requests = registry.counter(
            "http_client_requests_total",
            "Requests to the API server, by method and status.",
        );
        let errors = registry.counter(
            "http_client_errors_total",
            "Requests to the API server without a response.",
        );
        let latency = registry.histogram(
            "http_client_request_latency_seconds",
            "Time until the response head of the API server.",
            LATENCY_BUCKETS,
        );
        let in_flight = registry.gauge(
            "http_client_in_flight_requests",
            "Requests to the API server in flight.",
        );
        Self {
            requests,
            errors: errors.get(&labels),
            latency: latency.get(&labels),
            in_flight: in_flight.get(&labels),
            labels,
        }
    }

    fn observe(&self, method: &Method, status: Option<http::StatusCode>, took: Duration) {
        self.latency.observe(took.as_secs_f64());
        let Some(status) = status else { return self.errors.inc() };
        let method = method.as_str().to_ascii_lowercase();
        let labels = self.labels.clone().with("code", status.as_u16()).with("method", method);
        self.requests.get(&labels).inc();
    }
}

/// Minimum time between two checks for a token: the resolution of timers. Without it rounding errors could cause a busy loop.
const MIN_TOKEN_WAIT: Duration = Duration::from_millis(1);

/// The buckets of client-go's Prometheus wrapper.
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

    /// Creates a client whose server responds with 410 to `/gone`, otherwise with 200.
    fn client(rate: RequestRate, registry: &Registry) -> impl Service<Request<()>, Error = Infallible> + use<> {
        let server = "https://10.247.0.1/".parse().unwrap();
        RequestLayer::new(&server, rate, registry, None).layer(service_fn(answer))
    }

    async fn get(client: &mut impl Service<Request<()>, Error = Infallible>, path: &str) {
        let req = Request::get(path).body(()).unwrap();
        client.ready().await.unwrap().call(req).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_the_burst_wait_for_a_token() {
        let mut client = client(RequestRate { qps: 10.0, burst: 3 }, &Registry::new());
        let start = Instant::now();
        for _ in 0..3 {
            get(&mut client, "/").await;
        }
        assert!(start.elapsed() < Duration::from_millis(5), "{:?}", start.elapsed());
        for _ in 0..10 {
            get(&mut client, "/").await;
        }
        let took = start.elapsed();
        assert!((990..1100).contains(&took.as_millis()), "{took:?}");
    }

    #[tokio::test]
    async fn requests_are_counted_by_client_method_and_status() {
        let registry = Registry::new();
        let mut client = client(RequestRate { qps: 10.0, burst: 3 }, &registry);
        get(&mut client, "/api/v1/pods?limit=500").await;
        get(&mut client, "/gone").await;
        get(&mut client, "/apis/policy.linkerd.io/v1beta3/servers").await;
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
