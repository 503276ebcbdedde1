//! `tulle tap`: shows requests in real time, one line per event.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use bytes::BytesMut;
use clap::ValueEnum;
use http_body_util::BodyExt as _;
use tulle_control::telemetry::events::{StreamId, TapEndpoint, TapEvent, TapLine};
use tulle_core::names::telemetry::TAPS;

use super::golden::kind_and_name;
use super::{ApiResponse, TelemetryQuery, WorkloadArgs, parse_selection};
use crate::{kubernetes, runtime};

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(super) filter: TapFilter,
    /// Show headers and trailers too; the values of headers with credentials are omitted
    #[arg(long)]
    headers: bool,
    /// Exit after N requests
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Lines)]
    output: Output,
}

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct TapFilter {
    #[command(flatten)]
    workloads: WorkloadArgs,
    /// Show only requests to this workload, such as deploy/web
    #[arg(long, value_name = "TYPE/NAME")]
    to: Option<String>,
    /// Show only requests to this namespace
    #[arg(long, value_name = "NAMESPACE")]
    to_namespace: Option<String>,
    /// Show only requests with this method
    #[arg(long, value_name = "METHOD")]
    method: Option<String>,
    /// Show only requests whose path begins with this prefix
    #[arg(long, value_name = "PREFIX")]
    path: Option<String>,
    /// Show only requests to this authority (host)
    #[arg(long, value_name = "HOST")]
    authority: Option<String>,
    /// Show one of every N requests
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    one_in: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// One line per event
    Lines,
    /// One line per event, with all details of both ends
    Wide,
    /// One line of JSON per event, with headers
    Json,
}

pub(crate) fn main(args: &Args, flags: &kubernetes::Flags) -> anyhow::Result<ExitCode> {
    runtime()?.block_on(async {
        let mut tap = args
            .filter
            .start(flags, args.headers || args.output == Output::Json)
            .await?;
        let mut remaining = args.count;
        while remaining != Some(0)
            && let Some(event) = tap.next().await?
        {
            let text = match args.output {
                Output::Lines => event_line(&event) + &header_lines(&event),
                Output::Wide => event_line(&event) + &details(&event) + &header_lines(&event),
                Output::Json => serde_json::to_string(&event).context("writing JSON")?,
            };
            crate::print(&format!("{text}\n"))?;
            if event.response_end_event.is_some() {
                remaining = remaining.map(|count| count - 1);
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// A running tap.
pub(super) struct TapStream {
    response: ApiResponse,
    /// Bytes received after the last complete line.
    buffer: BytesMut,
}

impl TapFilter {
    /// Starts the tap.
    ///
    /// # Errors
    /// Fails if the control plane rejects the tap or does not respond.
    pub(super) async fn start(&self, flags: &kubernetes::Flags, headers: bool) -> anyhow::Result<TapStream> {
        let query = self.workloads.query(flags).await?;
        let response = query.open_stream(TAPS, &self.parameters(&query, headers)?).await?;
        Ok(TapStream {
            response,
            buffer: BytesMut::new(),
        })
    }

    fn parameters(&self, query: &TelemetryQuery, headers: bool) -> anyhow::Result<Vec<(&'static str, String)>> {
        let mut parameters = vec![("watch", "true".to_owned()), ("oneIn", self.one_in.to_string())];
        if headers {
            parameters.push(("headers", "true".to_owned()));
        }
        let mut to_namespace = self.to_namespace.clone();
        if let Some(to) = &self.to {
            let (kind, name) = parse_selection(std::slice::from_ref(to))?;
            let name =
                name.with_context(|| format!("--to {to} is not a workload; expected a workload such as deploy/web"))?;
            if kind == "namespace" {
                to_namespace = Some(name);
            } else {
                parameters.extend([("toKind", kind), ("toName", name)]);
                to_namespace = to_namespace.or_else(|| query.namespace.clone());
            }
        }
        let optional = [
            ("toNamespace", &to_namespace),
            ("method", &self.method),
            ("path", &self.path),
            ("authority", &self.authority),
        ];
        let given = optional
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.clone()?)));
        parameters.extend(given);
        Ok(parameters)
    }
}

impl TapStream {
    /// Waits for the next event; `None` after the control plane ended the stream. Cancel-safe.
    pub(super) async fn next(&mut self) -> anyhow::Result<Option<TapEvent>> {
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(end + 1);
                match serde_json::from_slice(&line)
                    .context("a line has a format that this version of tulle does not support")?
                {
                    TapLine::Event(event) => return Ok(Some(*event)),
                    TapLine::Unreachable { unreachable } => {
                        eprintln!(
                            "tulle: {} is not watched: {}",
                            kind_and_name(&unreachable.workload),
                            unreachable.reason
                        );
                    }
                }
                continue;
            }
            match self.response.body_mut().frame().await {
                None => return Ok(None),
                Some(frame) => {
                    let frame = frame.map_err(|err| anyhow!(err)).context("reading the tap")?;
                    self.buffer.extend_from_slice(&frame.into_data().unwrap_or_default());
                }
            }
        }
    }
}

/// Formats an event as Linkerd's `tap` does, with the cause if a proxy generated the response.
fn event_line(event: &TapEvent) -> String {
    let (proxy, tls) = match event.proxy_direction.as_str() {
        "INBOUND" => ("in ", event.source.metadata.get("tls")),
        _ => ("out", event.destination.metadata.get("tls")),
    };
    let tls = tls.map_or("", String::as_str);
    let prefix = |kind: &str, id: StreamId| {
        let (src, dst) = (addr(&event.source), addr(&event.destination));
        format!(
            "{kind} id={}:{} proxy={proxy} src={src} dst={dst} tls={tls}",
            id.base, id.stream
        )
    };
    if let Some(init) = &event.request_init_event {
        let (method, authority, path) = (&init.method, &init.authority, &init.path);
        return format!(
            "{} :method={method} :authority={authority} :path={path}",
            prefix("req", init.id)
        );
    }
    if let Some(init) = &event.response_init_event {
        let latency = init.since_request_init.micros();
        let mut text = format!(
            "{} :status={} latency={latency}µs",
            prefix("rsp", init.id),
            init.http_status
        );
        if let Some(cause) = &init.cause {
            let _ = write!(text, " cause={cause:?}");
        }
        return text;
    }
    let Some(end) = &event.response_end_event else {
        return String::new();
    };
    let mut text = prefix("end", end.id);
    if let Some(code) = end.grpc_status_code {
        let _ = write!(
            text,
            " grpc-status={:?}",
            tonic::Code::from(i32::try_from(code).unwrap_or(-1))
        );
    }
    if let Some(code) = end.reset_error_code {
        let _ = write!(text, " reset-error={code}");
    }
    let duration = end.since_response_init.micros();
    let _ = write!(text, " duration={duration}µs response-length={}B", end.response_bytes);
    if let Some(cause) = &end.cause {
        let _ = write!(text, " cause={cause:?}");
    }
    text
}

/// Formats the details of both ends and of the route.
fn details(event: &TapEvent) -> String {
    let mut text = format!(" workload={}", kind_and_name(&event.workload));
    for (side, labels) in [
        ("src", &event.source.metadata),
        ("dst", &event.destination.metadata),
        ("rt", &event.route_meta),
    ] {
        for (name, value) in labels.iter().filter(|(name, _)| *name != "tls") {
            let _ = write!(text, " {side}_{name}={value}");
        }
    }
    text
}

/// Formats one line per header or trailer, and escapes control characters.
fn header_lines(event: &TapEvent) -> String {
    let request = event.request_init_event.iter().flat_map(|init| &init.headers);
    let response = event.response_init_event.iter().flat_map(|init| &init.headers);
    let trailers = event.response_end_event.iter().flat_map(|end| &end.trailers);
    let mut text = String::new();
    for header in request.chain(response).chain(trailers) {
        let _ = write!(text, "\n    {}: ", header.name);
        for char in header.value_str.chars() {
            match char.is_control() {
                true => text.extend(char.escape_debug()),
                false => text.push(char),
            }
        }
    }
    text
}

fn addr(endpoint: &TapEndpoint) -> String {
    match endpoint.ip.contains(':') {
        true => format!("[{}]:{}", endpoint.ip, endpoint.port),
        false => format!("{}:{}", endpoint.ip, endpoint.port),
    }
}

pub(crate) const EXAMPLES: &str = "\
  tulle tap deploy/web -n shop
  tulle tap deploy/web -n shop --to deploy/db --method POST
  tulle tap ns/shop --path /api/ -o wide
  tulle tap deploy/web -n shop --headers --count 1
  tulle tap deploy/web -n shop -o json | jq .responseInitEvent.httpStatus
  tulle tap deploy/web -n shop | grep --line-buffered cause=       # and see `tulle explain`
  tulle tap --control 127.0.0.1:8089                                # without Kubernetes

Requires permission to watch taps.telemetry.tulle.dev in the namespace.
Proxies allow taps by the control plane unless viz.linkerd.io/disable-tap is set;
without Kubernetes, they allow taps by the identities in LINKERD2_PROXY_TAP_SVC_NAME.";

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use tulle_control::telemetry::events::{Header, ProtoDuration, RequestInit, ResponseEnd, ResponseInit};

    use super::super::tests::telemetry_query;
    use super::*;

    /// The events of one request, in order.
    pub(in super::super) fn events(path: &str, status: u32) -> [TapEvent; 3] {
        let endpoint = |ip: &str, port, tls: &str| TapEndpoint {
            ip: ip.to_owned(),
            port,
            metadata: BTreeMap::from([("tls".to_owned(), tls.to_owned())]),
        };
        let event = TapEvent {
            source: endpoint("10.0.0.1", 4321, "true"),
            destination: endpoint("::1", 80, "no_identity"),
            proxy_direction: "INBOUND".to_owned(),
            ..TapEvent::default()
        };
        let id = StreamId { base: 2, stream: 7 };
        let span = |micros: i32| ProtoDuration {
            seconds: 0,
            nanos: micros * 1_000,
        };
        let request = TapEvent {
            request_init_event: Some(RequestInit {
                id,
                method: "GET".to_owned(),
                authority: "web".to_owned(),
                path: path.to_owned(),
                ..RequestInit::default()
            }),
            ..event.clone()
        };
        let response = TapEvent {
            response_init_event: Some(ResponseInit {
                id,
                since_request_init: span(1_500),
                http_status: status,
                cause: (status >= 500).then(|| "no-endpoints; direction=outbound".to_owned()),
                ..ResponseInit::default()
            }),
            ..event.clone()
        };
        let ended = TapEvent {
            response_end_event: Some(ResponseEnd {
                id,
                since_request_init: span(2_000),
                since_response_init: span(500),
                response_bytes: 12,
                grpc_status_code: Some(0),
                ..ResponseEnd::default()
            }),
            ..event
        };
        [request, response, ended]
    }

    #[test]
    fn lines_have_the_format_of_linkerd_with_the_cause_at_the_end() {
        let lines: Vec<_> = events("/", 503).iter().map(event_line).collect();
        let connection = "id=2:7 proxy=in  src=10.0.0.1:4321 dst=[::1]:80 tls=true";
        assert_eq!(
            lines,
            [
                format!("req {connection} :method=GET :authority=web :path=/"),
                format!("rsp {connection} :status=503 latency=1500µs cause=\"no-endpoints; direction=outbound\""),
                format!("end {connection} grpc-status=Ok duration=500µs response-length=12B"),
            ]
        );
    }

    #[test]
    fn headers_follow_their_event_without_terminal_escapes() {
        let [mut request, response, _] = events("/", 200);
        let header = |name: &str, value: &str| Header {
            name: name.to_owned(),
            value_str: value.to_owned(),
        };
        request.request_init_event.as_mut().unwrap().headers =
            vec![header("etag", "\"1\""), header("x-name", "a\u{1b}[2J\n")];
        assert_eq!(header_lines(&request), "\n    etag: \"1\"\n    x-name: a\\u{1b}[2J\\n");
        assert_eq!(header_lines(&response), "");
    }

    #[test]
    fn filters_become_parameters() {
        let filter = |to: &str, to_namespace: Option<&str>| TapFilter {
            workloads: WorkloadArgs {
                resource: Vec::new(),
                namespace: None,
                all_namespaces: false,
                control: None,
            },
            to: Some(to.to_owned()),
            to_namespace: to_namespace.map(str::to_owned),
            method: Some("GET".to_owned()),
            path: None,
            authority: None,
            one_in: 1,
        };
        let text = |filter: TapFilter| {
            let parameters = filter
                .parameters(&telemetry_query(Some("shop"), "deploy"), false)
                .unwrap();
            let text: Vec<_> = parameters
                .iter()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            text.join("&")
        };
        let begin = "watch=true&oneIn=1";
        assert_eq!(
            text(filter("deploy/db", None)),
            format!("{begin}&toKind=deployment&toName=db&toNamespace=shop&method=GET")
        );
        assert_eq!(
            text(filter("ns/other", None)),
            format!("{begin}&toNamespace=other&method=GET")
        );
        assert!(
            filter("deploy", None)
                .parameters(&telemetry_query(None, ""), false)
                .is_err()
        );
    }
}
