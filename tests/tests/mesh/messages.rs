//! Compatibility: proxies can decode every message of the control plane, for any valid or invalid objects in the cluster.
//!
//! Objects are generated at random. The control plane ignores the ones that it refuses, and the proxy's decoder reads
//! the messages for the others.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::time::timeout;
use tonic::{Status, Streaming};
use tulle_control::cluster::{Cluster, Config, TransportMode};
use tulle_control::source::directory_source::{self, ManifestReport};
use tulle_control::tls::mesh_credentials::ClientCertificates;
use tulle_control::{destination, policy};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_proto::destination::GetDestination;
use tulle_proto::destination::destination_client::DestinationClient;
use tulle_proto::inbound::PortSpec;
use tulle_proto::inbound::inbound_server_policies_client::InboundServerPoliciesClient;
use tulle_proto::outbound::outbound_policies_client::OutboundPoliciesClient;
use tulle_proto::outbound::{TrafficSpec, traffic_spec::Target};
use tulle_proxy::messages;

/// Number of generated clusters; `TULLE_TEST_SEED` selects others.
const N_GENERATED_CLUSTERS: u64 = 150;

#[tokio::test]
async fn proxies_can_decode_every_message_of_the_control_plane() {
    let first: u64 = std::env::var("TULLE_TEST_SEED").map_or(0, |seed| seed.parse().unwrap());
    let mut counts = DecodedCounts::default();
    for seed in first..first + N_GENERATED_CLUSTERS {
        let manifests = ObjectGenerator(fastrand::Rng::with_seed(seed)).cluster();
        counts.decode_all(seed, &manifests).await;
    }
    let DecodedCounts {
        policies,
        profiles,
        endpoints,
        ports,
    } = counts;
    // Detects a generator whose objects are all refused.
    for (what, n) in [
        ("policies", policies),
        ("profiles", profiles),
        ("endpoints", endpoints),
        ("policies of ports", ports),
    ] {
        assert!(
            n as u64 > N_GENERATED_CLUSTERS,
            "{n} {what} of {N_GENERATED_CLUSTERS} clusters"
        );
    }
}

/// Number of decoded messages.
#[derive(Default)]
struct DecodedCounts {
    policies: usize,
    profiles: usize,
    endpoints: usize,
    ports: usize,
}

impl DecodedCounts {
    /// Reads these manifests into a control plane, requests all messages about destinations and ports, and decodes and counts them.
    async fn decode_all(&mut self, seed: u64, manifests: &str) {
        let (registry, dir) = (Registry::new(), tempfile::tempdir().unwrap());
        // Documents after a syntax error are not read, so each document has its own file.
        for (n, document) in manifests.split("---\n").enumerate() {
            std::fs::write(dir.path().join(format!("{n}.yaml")), document).unwrap();
        }
        let (_signal, drain) = drain::channel();
        let config = Config {
            transport: match seed % 2 {
                0 => TransportMode::TransportHeader,
                _ => TransportMode::Transparent,
            },
            ..Config::default()
        };
        let cluster = Cluster::new(config, &registry);
        let report = ManifestReport::new(&registry);
        let source = directory_source::run(dir.path().to_owned(), cluster.sink(), report, drain);
        let source = tokio::spawn(source);
        with_timeout(cluster.synced()).await;

        let fail = |what: &str, error: anyhow::Error| -> ! {
            panic!("{what} of TULLE_TEST_SEED={seed} cannot be decoded: {error:#}\n{manifests}")
        };
        let client = r#"{"ns":"front","pod":"front-0"}"#.to_owned();
        let mut outbound = OutboundPoliciesClient::new(policy::outbound_server(
            cluster.clone(),
            ClientCertificates::Optional,
            policy::config::Config::default(),
        ));
        let mut destinations = DestinationClient::new(destination::server(
            cluster.clone(),
            ClientCertificates::Optional,
            destination::config::Config::default(),
        ));
        for target in targets() {
            let spec = TrafficSpec {
                source_workload: client.clone(),
                target: Some(match target.parse::<SocketAddr>() {
                    Ok(addr) => Target::Addr(addr.into()),
                    Err(_) => Target::Authority(target.clone()),
                }),
            };
            if let Some(message) = first(outbound.watch(spec)).await {
                messages::check_outbound_policy(message)
                    .unwrap_or_else(|error| fail(&format!("the policy of {target}"), error));
                self.policies += 1;
            }
            let path = || GetDestination {
                path: target.clone(),
                context_token: client.clone(),
                ..Default::default()
            };
            if let Some(message) = first(destinations.get_profile(path())).await {
                messages::check_profile(message)
                    .unwrap_or_else(|error| fail(&format!("the profile of {target}"), error));
                self.profiles += 1;
            }
            if let Some(message) = first(destinations.get(path())).await {
                messages::check_endpoints(message)
                    .unwrap_or_else(|error| fail(&format!("the endpoints of {target}"), error));
                self.endpoints += 1;
            }
        }
        let mut inbound =
            InboundServerPoliciesClient::new(policy::inbound_server(cluster.clone(), ClientCertificates::Optional));
        for (workload, port) in workloads() {
            let spec = PortSpec {
                workload: workload.clone(),
                port,
            };
            if let Some(message) = first(inbound.watch_port(spec)).await {
                messages::check_inbound_policy(message)
                    .unwrap_or_else(|error| fail(&format!("the policy of port {port} of {workload}"), error));
                self.ports += 1;
            }
        }
        source.abort();
    }
}

/// The first message of a stream, or `None` for an error.
async fn first<T>(response: impl Future<Output = Result<tonic::Response<Streaming<T>>, Status>>) -> Option<T> {
    let mut stream = with_timeout(response).await.ok()?.into_inner();
    with_timeout(stream.message()).await.ok()?
}

async fn with_timeout<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("the control plane answers within 20 seconds")
}

const PORTS: [u16; 3] = [80, 90, 5432];

/// All targets that a proxy may request.
fn targets() -> Vec<String> {
    let services = ["10.247.0.10", "10.247.0.11"];
    let names = ["web.shop.svc.cluster.local", "web-v2.shop.svc.cluster.local"];
    let others = ["10.1.0.1", "10.2.0.1", "192.0.2.1", "192.0.2.200", "198.51.100.1"];
    let all = services.into_iter().chain(names).chain(others);
    all.flat_map(|host| PORTS.map(|port| format!("{host}:{port}")))
        .collect()
}

/// Workloads and ports whose policies a proxy may request.
fn workloads() -> Vec<(String, u32)> {
    let workloads = [
        r#"{"ns":"shop","pod":"web-0"}"#,
        r#"{"ns":"shop","external_workload":"vm"}"#,
    ];
    let ports = [80, 8080, 5432];
    workloads
        .into_iter()
        .flat_map(|workload| ports.map(|port| (workload.to_owned(), port)))
        .collect()
}

struct ObjectGenerator(fastrand::Rng);

impl ObjectGenerator {
    /// One of these values.
    fn pick<'a>(&mut self, values: &[&'a str]) -> &'a str {
        values[self.0.usize(..values.len())]
    }

    /// True with probability 1/n.
    fn is_one_in(&mut self, n: usize) -> bool {
        self.0.usize(..n) == 0
    }

    /// A field with probability 1/2.
    fn optional(&mut self, field: impl FnOnce(&mut Self) -> String) -> String {
        match self.0.bool() {
            true => format!("{}, ", field(self)),
            false => String::new(),
        }
    }

    fn list_up_to(&mut self, most: usize, item: impl Fn(&mut Self) -> String) -> String {
        let n = self.0.usize(..=most);
        (0..n).map(|_| item(self)).collect::<Vec<_>>().join(", ")
    }

    fn non_empty_list(&mut self, most: usize, item: impl Fn(&mut Self) -> String) -> String {
        let n = self.0.usize(1..=most);
        (0..n).map(|_| item(self)).collect::<Vec<_>>().join(", ")
    }

    fn duration(&mut self) -> &'static str {
        self.pick(&[
            "0s", "1ms", "10ms", "100ms", "1s", "10s", "1m", "1h", "9999h", "90s", "1.5s", "-1s", "2540400h", "x", "10",
        ])
    }

    fn number(&mut self) -> &'static str {
        self.pick(&[
            "0",
            "1",
            "2",
            "10",
            "65535",
            "65536",
            "4294967295",
            "4294967296",
            "-1",
            "0.5",
        ])
    }

    fn name(&mut self) -> &'static str {
        self.pick(&["web", "web-v2", "nobody", "vm"])
    }

    fn hosts(&mut self) -> String {
        let hosts = self.list_up_to(2, |this| {
            let host = this.pick(&[
                "a.b",
                "*.c.d",
                "web.shop",
                "UPPER.example",
                "xn--bcher-kva.example",
                "a..b",
                "*",
                "10.0.0.1",
            ]);
            format!("'{host}'")
        });
        format!("hostnames: [{hosts}]")
    }

    fn path(&mut self) -> &'static str {
        self.pick(&["/", "/a", "/a/b?c", "a", "", "/%2f", "/a b", "/é", "//", "/a#b", "/x|y"])
    }

    fn regex(&mut self) -> &'static str {
        self.pick(&[
            "/a.*",
            "(",
            "[a-",
            "a{1000}{1000}{1000}",
            "(?=x)",
            "\\\\Qa\\\\E",
            "(?P<n>a)",
            "\\\\pL+",
            ".*",
        ])
    }

    fn header(&mut self) -> &'static str {
        self.pick(&[
            "x-a",
            "X-Upper",
            "host",
            "connection",
            "x y",
            "",
            ":path",
            "l5d-client-id",
            "x_y",
            "é",
        ])
    }

    fn value(&mut self) -> &'static str {
        self.pick(&["a", "", "a b", "é", "a,b", "\\t", "\\n", "\\0", " a"])
    }

    fn match_fields(&mut self, kinds: &[&str], value: fn(&mut Self) -> &'static str) -> String {
        let kind = match self.is_one_in(3) {
            true => "RegularExpression",
            false => self.pick(kinds),
        };
        let value = match kind {
            "RegularExpression" => self.regex(),
            _ => value(self),
        };
        format!("type: {kind}, value: \"{value}\"")
    }

    fn http_match(&mut self) -> String {
        let path =
            self.optional(|this| format!("path: {{{}}}", this.match_fields(&["Exact", "PathPrefix"], Self::path)));
        let headers = self.optional(|this| format!("headers: [{}]", this.list_up_to(2, Self::header_match)));
        let query = self.optional(|this| format!("queryParams: [{}]", this.list_up_to(2, Self::header_match)));
        let method = self.optional(|this| format!("method: '{}'", this.pick(&["GET", "PROPFIND", "get", "", "A B"])));
        format!("{{{path}{headers}{query}{method}}}")
    }

    fn header_match(&mut self) -> String {
        let name = self.header();
        format!("{{name: \"{name}\", {}}}", self.match_fields(&["Exact"], Self::value))
    }

    fn grpc_match(&mut self) -> String {
        let method = self.optional(|this| {
            let (service, method) = (this.pick(&["a.B", "", "é"]), this.pick(&["Get", "", "a/b"]));
            format!("method: {{service: '{service}', method: '{method}'}}")
        });
        let headers = self.optional(|this| format!("headers: [{}]", this.list_up_to(2, Self::header_match)));
        format!("{{{method}{headers}}}")
    }

    fn modifier(&mut self) -> String {
        let pair = |this: &mut Self| format!("{{name: \"{}\", value: \"{}\"}}", this.header(), this.value());
        let set = self.optional(|this| format!("set: [{}]", this.list_up_to(2, pair)));
        let add = self.optional(|this| format!("add: [{}]", this.list_up_to(2, pair)));
        let remove = self.optional(|this| {
            format!(
                "remove: [{}]",
                this.list_up_to(2, |this| format!("\"{}\"", this.header()))
            )
        });
        format!("{{{set}{add}{remove}}}")
    }

    fn filter(&mut self) -> String {
        match self.0.u8(..7) {
            0 => format!(
                "{{type: RequestHeaderModifier, requestHeaderModifier: {}}}",
                self.modifier()
            ),
            1 => format!(
                "{{type: ResponseHeaderModifier, responseHeaderModifier: {}}}",
                self.modifier()
            ),
            2 => {
                let scheme = self.optional(|this| format!("scheme: '{}'", this.pick(&["http", "https", "ftp", "a b"])));
                let host =
                    self.optional(|this| format!("hostname: '{}'", this.pick(&["a.b", "a b", "", "a:1", "[::1]"])));
                let port = self.optional(|this| format!("port: {}", this.number()));
                let status = self
                    .optional(|this| format!("statusCode: {}", this.pick(&["301", "302", "303", "308", "200", "99"])));
                let path = self.optional(|this| match this.0.bool() {
                    true => format!("path: {{type: ReplaceFullPath, replaceFullPath: '{}'}}", this.path()),
                    false => format!(
                        "path: {{type: ReplacePrefixMatch, replacePrefixMatch: '{}'}}",
                        this.path()
                    ),
                });
                format!("{{type: RequestRedirect, requestRedirect: {{{scheme}{host}{port}{status}{path}}}}}")
            }
            3 => "{type: URLRewrite, urlRewrite: {hostname: a.b}}".to_owned(),
            4 => "{type: ExtensionRef, extensionRef: {group: a, kind: B, name: c}}".to_owned(),
            5 => {
                let origin = self.pick(&[
                    "*",
                    "https://a.b",
                    "http://*.a.b:81",
                    "https://*",
                    "a.b",
                    "https://a:99999",
                ]);
                let (method, header) = (self.pick(&["*", "GET", "A B"]), self.header());
                let lists =
                    format!("allowOrigins: ['{origin}'], allowMethods: ['{method}'], allowHeaders: [\"{header}\"]");
                format!("{{type: CORS, cors: {{{lists}}}}}")
            }
            _ => format!(
                "{{type: RequestMirror, requestMirror: {{backendRef: {{name: {}, port: 80}}}}}}",
                self.name()
            ),
        }
    }

    /// Filters are rare, because a route with an unsupported filter does nothing else.
    fn filters(&mut self) -> String {
        match self.is_one_in(3) {
            true => format!("filters: [{}], ", self.non_empty_list(2, Self::filter)),
            false => String::new(),
        }
    }

    fn backend(&mut self) -> String {
        let kind = self.pick(&[
            "",
            "",
            "",
            "",
            "group: policy.linkerd.io, kind: EgressNetwork, ",
            "kind: Pod, ",
        ]);
        let namespace = self.optional(|this| format!("namespace: {}", this.pick(&["shop", "front"])));
        let weight =
            self.optional(|this| format!("weight: {}", this.pick(&["0", "1", "2", "1000000", "4294967295", "-1"])));
        let (name, port, filters) = (self.name(), self.pick(&["80", "90", "0", "65536"]), self.filters());
        format!("{{{kind}{namespace}{weight}name: {name}, port: {port}, {filters}}}")
    }

    fn rule(&mut self, matches: Option<fn(&mut Self) -> String>) -> String {
        let matches = matches.map_or_else(String::new, |one| format!("matches: [{}], ", self.list_up_to(2, one)));
        let filters = self.filters();
        let backends = self.optional(|this| format!("backendRefs: [{}]", this.list_up_to(3, Self::backend)));
        let timeouts = self.optional(|this| {
            let request = this.optional(|this| format!("request: {}", this.duration()));
            let backend = this.optional(|this| format!("backendRequest: {}", this.duration()));
            format!("timeouts: {{{request}{backend}}}")
        });
        format!("{{{matches}{filters}{backends}{timeouts}}}")
    }

    /// Annotations of routes, services and egress networks.
    fn annotations(&mut self) -> String {
        let mut all = String::new();
        for (key, values) in [
            (
                "retry.linkerd.io/http",
                &["5xx", "gateway-error", "500-503", "99", "5xx,404", "600-700", "0"][..],
            ),
            (
                "retry.linkerd.io/grpc",
                &["internal", "cancelled,unavailable", "ok", "data-loss"],
            ),
            ("retry.linkerd.io/limit", &["0", "1", "65535", "65536", "4294967295"]),
            ("retry.linkerd.io/timeout", &["0s", "1s", "-1s", "2540400h"]),
            ("timeout.linkerd.io/request", &["0s", "1s", "9999h", "x"]),
            ("timeout.linkerd.io/response", &["10ms", "2540400h"]),
            ("timeout.linkerd.io/idle", &["1m", "-1m"]),
            (
                "balancer.linkerd.io/failure-accrual",
                &["consecutive", "success-rate", "unified", "x"],
            ),
            (
                "balancer.linkerd.io/failure-accrual-consecutive-max-failures",
                &["0", "1", "4294967295", "4294967296"],
            ),
            (
                "balancer.linkerd.io/failure-accrual-consecutive-min-penalty",
                &["0s", "1s", "1h", "2540400h"],
            ),
            (
                "balancer.linkerd.io/failure-accrual-consecutive-max-penalty",
                &["0s", "1ms", "1m", "2540400h"],
            ),
            (
                "balancer.linkerd.io/failure-accrual-consecutive-jitter-ratio",
                &["0", "0.5", "100", "101", "-1", "NaN", "1e30"],
            ),
            (
                "balancer.linkerd.io/failure-accrual-success-rate-threshold",
                &["0", "0.5", "1", "1.1", "NaN"],
            ),
            (
                "balancer.linkerd.io/failure-accrual-success-rate-decay",
                &["0s", "1ms", "10s", "2540400h"],
            ),
            (
                "balancer.linkerd.io/failure-accrual-success-rate-min-requests",
                &["0", "10", "1000000", "1000001", "4294967295"],
            ),
            ("balancer.linkerd.io/load-bias", &["penalize-failures", "x"]),
            (
                "config.linkerd.io/opaque-ports",
                &["90", "80,,90", "1-70000", "http", "80-"],
            ),
        ] {
            if self.is_one_in(4) {
                let value = self.pick(values);
                write!(all, "{key}: \"{value}\", ").unwrap();
            }
        }
        all
    }

    fn route(&mut self, n: usize) -> String {
        let (api, kind) = [
            ("gateway.networking.k8s.io/v1", "HTTPRoute"),
            ("policy.linkerd.io/v1beta3", "HTTPRoute"),
            ("gateway.networking.k8s.io/v1", "GRPCRoute"),
            ("gateway.networking.k8s.io/v1alpha2", "TLSRoute"),
            ("gateway.networking.k8s.io/v1alpha2", "TCPRoute"),
        ][self.0.usize(..5)];
        let parents = self.non_empty_list(2, |this| {
            let port = this.optional(|this| format!("port: {}", this.pick(&["80", "90", "5432"])));
            match this.0.u8(..4) {
                0 => format!("{{group: policy.linkerd.io, kind: EgressNetwork, name: out, namespace: front, {port}}}"),
                1 => format!(
                    "{{group: policy.linkerd.io, kind: Server, name: {}}}",
                    this.pick(&["web", "vm"])
                ),
                _ => format!(
                    "{{group: core, kind: Service, name: {}, namespace: shop, {port}}}",
                    this.name()
                ),
            }
        });
        let matches: Option<fn(&mut Self) -> String> = match kind {
            "HTTPRoute" => Some(Self::http_match),
            "GRPCRoute" => Some(Self::grpc_match),
            _ => None,
        };
        let hosts = match kind {
            "TCPRoute" => String::new(),
            _ => self.optional(Self::hosts),
        };
        let rules = match self.is_one_in(10) {
            true => String::new(),
            false => self.non_empty_list(if matches.is_some() { 2 } else { 1 }, |this| this.rule(matches)),
        };
        let (namespace, annotations) = (self.pick(&["shop", "shop", "front"]), self.annotations());
        // Some routes have the same age.
        let created = self.pick(&["2024-01-01T00:00:00Z", "2024-01-02T00:00:00Z"]);
        format!(
            "apiVersion: {api}\nkind: {kind}\nmetadata: {{name: r{n}, namespace: {namespace}, \
             creationTimestamp: '{created}', annotations: {{{annotations}}}}}\n\
             spec: {{parentRefs: [{parents}], {hosts}rules: [{rules}]}}\n"
        )
    }

    fn service(&mut self, name: &str, ip: &str) -> String {
        let protocol = self.optional(|this| {
            let protocol = this.pick(&["http", "HTTP", "kubernetes.io/h2c", "linkerd.io/opaque", "tcp", "x"]);
            format!("appProtocol: {protocol}")
        });
        let annotations = self.annotations();
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop, annotations: {{{annotations}}}}}\n\
             spec: {{clusterIP: {ip}, selector: {{app: web}}, \
             ports: [{{name: a, port: 80, targetPort: 8080, {protocol}}}, {{name: b, port: 90}}]}}\n"
        )
    }

    fn egress_network(&mut self) -> String {
        let policy = self.pick(&["Allow", "Deny"]);
        let networks = self.optional(|this| {
            let networks = this.list_up_to(2, |this| {
                let cidr = this.pick(&["192.0.2.0/24", "0.0.0.0/0", "::/0", "192.0.2.1/33", "x"]);
                format!(
                    "{{cidr: '{cidr}', except: [{}]}}",
                    this.list_up_to(1, |this| this.pick(&["192.0.2.0/25", "10.0.0.0/8"]).to_owned())
                )
            });
            format!("networks: [{networks}]")
        });
        let annotations = self.annotations();
        format!(
            "apiVersion: policy.linkerd.io/v1alpha1\nkind: EgressNetwork\n\
             metadata: {{name: out, namespace: front, annotations: {{{annotations}}}}}\n\
             spec: {{{networks}trafficPolicy: {policy}}}\n"
        )
    }

    fn server(&mut self, name: &str) -> String {
        let selector = match name {
            "vm" => "externalWorkloadSelector",
            _ => "podSelector",
        };
        let protocol = self.optional(|this| {
            let protocol = this.pick(&["unknown", "HTTP/1", "HTTP/2", "gRPC", "opaque", "TLS", "x"]);
            format!("proxyProtocol: '{protocol}'")
        });
        let access = self.optional(|this| {
            let policy = this.pick(&[
                "deny",
                "all-authenticated",
                "all-unauthenticated",
                "audit",
                "cluster-authenticated",
                "x",
            ]);
            format!("accessPolicy: {policy}")
        });
        let port = self.pick(&["80", "8080", "http", "5432"]);
        format!(
            "apiVersion: policy.linkerd.io/v1beta3\nkind: Server\nmetadata: {{name: {name}, namespace: shop}}\n\
             spec: {{{selector}: {{matchLabels: {{app: web}}}}, port: {port}, {protocol}{access}}}\n"
        )
    }

    fn authorization(&mut self, n: usize) -> String {
        let identity = |this: &mut Self| {
            let identity = this.pick(&["*", "*.shop", "a.b", "no identity", "", "spiffe://root/a", "**"]);
            format!("'{identity}'")
        };
        let network = |this: &mut Self| {
            let cidr = this.pick(&["10.0.0.0/8", "::/0", "10.0.0.1", "10.0.0.0/33", "x"]);
            format!(
                "{{cidr: '{cidr}', except: [{}]}}",
                this.list_up_to(1, |this| this.pick(&["10.1.0.0/16", "x"]).to_owned())
            )
        };
        let target = match self.0.bool() {
            true => "kind: Server, name: web".to_owned(),
            false => format!("kind: HTTPRoute, name: r{}", self.0.u8(..4)),
        };
        match self.0.u8(..4) {
            0 => {
                let identities = self.optional(|this| format!("identities: [{}]", this.list_up_to(2, identity)));
                let accounts = self.optional(|_| "identityRefs: [{kind: ServiceAccount, name: a}]".to_owned());
                format!(
                    "apiVersion: policy.linkerd.io/v1alpha1\nkind: MeshTLSAuthentication\n\
                     metadata: {{name: identities, namespace: shop}}\nspec: {{{identities}{accounts}}}\n"
                )
            }
            1 => format!(
                "apiVersion: policy.linkerd.io/v1alpha1\nkind: NetworkAuthentication\n\
                 metadata: {{name: networks, namespace: shop}}\nspec: {{networks: [{}]}}\n",
                self.list_up_to(2, network)
            ),
            2 => {
                let references = self.list_up_to(3, |this| {
                    let (kind, name) = [
                        ("policy.linkerd.io, kind: MeshTLSAuthentication", "identities"),
                        ("policy.linkerd.io, kind: NetworkAuthentication", "networks"),
                        ("'', kind: ServiceAccount", "a"),
                    ][this.0.usize(..3)];
                    format!("{{group: {kind}, name: {name}}}")
                });
                format!(
                    "apiVersion: policy.linkerd.io/v1alpha1\nkind: AuthorizationPolicy\n\
                     metadata: {{name: p{n}, namespace: shop}}\n\
                     spec: {{targetRef: {{group: policy.linkerd.io, {target}}}, requiredAuthenticationRefs: [{references}]}}\n"
                )
            }
            _ => {
                let client = match self.0.u8(..3) {
                    0 => "unauthenticated: true, ".to_owned(),
                    1 => "meshTLS: {unauthenticatedTLS: true}, ".to_owned(),
                    _ => format!("meshTLS: {{identities: [{}]}}, ", self.list_up_to(2, identity)),
                };
                let networks = self.optional(|this| format!("networks: [{}]", this.list_up_to(2, network)));
                format!(
                    "apiVersion: policy.linkerd.io/v1beta1\nkind: ServerAuthorization\n\
                     metadata: {{name: s{n}, namespace: shop}}\n\
                     spec: {{server: {{name: web}}, client: {{{client}{networks}}}}}\n"
                )
            }
        }
    }

    fn rate_limit(&mut self) -> String {
        let total = self.optional(|this| format!("total: {{requestsPerSecond: {}}}", this.number()));
        let identity = self.optional(|this| format!("identity: {{requestsPerSecond: {}}}", this.number()));
        let overrides = self.optional(|this| {
            format!(
                "overrides: [{{requestsPerSecond: {}, clientRefs: [{{kind: ServiceAccount, name: a}}]}}]",
                this.number()
            )
        });
        format!(
            "apiVersion: policy.linkerd.io/v1alpha1\nkind: HTTPLocalRateLimitPolicy\n\
             metadata: {{name: limit, namespace: shop}}\n\
             spec: {{targetRef: {{group: policy.linkerd.io, kind: Server, name: web}}, {total}{identity}{overrides}}}\n"
        )
    }

    fn condition(&mut self, depth: u8) -> String {
        match self.0.u8(..if depth == 0 { 2 } else { 5 }) {
            0 => format!("pathRegex: '{}'", self.regex()),
            1 => format!("method: {}", self.pick(&["GET", "PROPFIND", "get", "'A B'", "''"])),
            2 => format!("not: {{{}}}", self.condition(depth - 1)),
            3 => format!(
                "all: [{{{}}}, {{{}}}]",
                self.condition(depth - 1),
                self.condition(depth - 1)
            ),
            _ => format!("any: [{{{}}}]", self.condition(depth - 1)),
        }
    }

    fn profile(&mut self) -> String {
        let route = |this: &mut Self| {
            let name = this.pick(&["a", "GET /a", "é", "a\\nb"]);
            let condition = this.condition(2);
            let classes = this.optional(|this| {
                let class = |this: &mut Self| {
                    let (min, max) = (
                        this.pick(&["0", "100", "500", "599", "600"]),
                        this.pick(&["0", "404", "599", "70000"]),
                    );
                    format!("{{condition: {{status: {{min: {min}, max: {max}}}}}, isFailure: true}}")
                };
                format!("responseClasses: [{}]", this.list_up_to(2, class))
            });
            let timeout = this.optional(|this| format!("timeout: {}", this.duration()));
            format!("{{name: \"{name}\", condition: {{{condition}}}, {classes}{timeout}isRetryable: true}}")
        };
        let routes = self.optional(|this| format!("routes: [{}]", this.list_up_to(3, route)));
        let budget = self.optional(|this| {
            let (ratio, least, ttl) = (
                this.pick(&["0", "0.2", "1000.5", "-1", ".nan", "1e39"]),
                this.pick(&["0", "10", "4294967295", "-1"]),
                this.duration(),
            );
            format!("retryBudget: {{retryRatio: {ratio}, minRetriesPerSecond: {least}, ttl: {ttl}}}")
        });
        let overrides = self.optional(|this| {
            let dst = |this: &mut Self| {
                let authority = this.pick(&[
                    "web-v2.shop.svc.cluster.local:80",
                    "web-v2.shop.svc.cluster.local.:80",
                    "web-v2.shop.svc.cluster.local",
                    "web-v2.shop:80",
                    "web-v2.shop.svc:80",
                    "web-v2",
                    "a b:80",
                    "web-v2.shop:0",
                    "10.0.0.1:80",
                    "[::1]:80",
                    "",
                    ":80",
                ]);
                let weight = this.pick(&["0", "1", "500m", "0.5", "1k", "4294967295", "-1"]);
                format!("{{authority: '{authority}', weight: {weight}}}")
            };
            format!("dstOverrides: [{}]", this.list_up_to(3, dst))
        });
        format!(
            "apiVersion: linkerd.io/v1alpha2\nkind: ServiceProfile\n\
             metadata: {{name: web.shop.svc.cluster.local, namespace: shop}}\nspec: {{{routes}{budget}{overrides}}}\n"
        )
    }

    fn workloads(&mut self) -> String {
        let account = self.pick(&["web", "default", "Upper", "a.b", "é"]);
        let annotations = self.annotations();
        let probe =
            self.optional(|this| format!("readinessProbe: {{httpGet: {{path: '{}', port: 8080}}}}", this.path()));
        let identity = self.pick(&[
            "vm.shop",
            "spiffe://root/vm",
            "no identity",
            "Upper.Shop",
            "",
            "10.0.0.1",
        ]);
        let server_name = self.pick(&["vm.shop", "a b", "", "10.0.0.1", "spiffe://root/vm"]);
        let ip = self.pick(&[
            "10.2.0.1",
            "10.2.0.1",
            "169.254.169.254",
            "127.0.0.1",
            "::1",
            "fd00::1",
            "x",
        ]);
        format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: web-0, namespace: shop, \
             labels: {{app: web, linkerd.io/control-plane-ns: linkerd}}, annotations: {{{annotations}}}}}\n\
             spec: {{serviceAccountName: '{account}', containers: [{{name: web, ports: [{{name: http, containerPort: 8080}}], {probe}}}]}}\n\
             status: {{podIP: 10.1.0.1}}\n---\n\
             apiVersion: workload.linkerd.io/v1beta1\nkind: ExternalWorkload\n\
             metadata: {{name: vm, namespace: shop, labels: {{app: web}}}}\n\
             spec: {{meshTLS: {{identity: '{identity}', serverName: '{server_name}'}}, \
             ports: [{{name: http, port: 8080}}, {{port: 80}}], workloadIPs: [{{ip: '{ip}'}}]}}\n"
        )
    }

    fn cluster(&mut self) -> String {
        let mut all = vec![
            self.service("web", "10.247.0.10"),
            self.service("web-v2", "10.247.0.11"),
            self.egress_network(),
            self.server("web"),
            self.server("vm"),
            self.rate_limit(),
            self.workloads(),
        ];
        for n in 0..self.0.usize(..6) {
            all.push(self.route(n));
        }
        for n in 0..self.0.usize(..4) {
            all.push(self.authorization(n));
        }
        if self.0.bool() {
            all.push(self.profile());
        }
        all.join("---\n")
    }
}
