//! Failures of the API server of a linked cluster. A reverse proxy in front of it causes them.

use std::net::SocketAddr;
use std::path::PathBuf;

use futures_util::future::join_all;
use http::header::{ACCEPT, CONTENT_TYPE, TRANSFER_ENCODING};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::Incoming;
use kube::client::Body;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tulle_tests::apps::{self, App, unfinished_response};
use tulle_tests::client::{AnyBody, any, empty, full};

use super::leadership::{export, free_addr};
use super::*;

/// A reverse proxy in front of an API server. Its port is closed while it has no upstream.
struct ReverseProxy {
    addr: SocketAddr,
    app: Option<App>,
}

/// What responds to the requests to the proxy.
#[derive(Clone)]
enum Upstream {
    /// The API server, after a delay. Requests for EndpointSlices have credentials of their own.
    Server {
        client: Client,
        slices_client: Box<Client>,
        delay: Duration,
    },
    /// The lists of an earlier time. A watch from a later time is refused, as after a restore that marks later versions as compacted.
    /// Other watches report no change.
    Backup { services: String, slices: String },
}

impl ReverseProxy {
    /// Closes all connections, and forwards new ones to another upstream.
    async fn set_upstream(&mut self, upstream: Option<Upstream>) {
        if let Some(app) = self.app.take() {
            app.kill().await;
        }
        if let Some(upstream) = upstream {
            let listener = TcpListener::bind(self.addr).await.unwrap();
            self.app = Some(apps::serve_http(listener, move |req| upstream.clone().respond(req)));
        }
    }

    /// Writes a copy of the kubeconfig with the address of this proxy instead of that of the API server.
    fn write_kubeconfig(&self, server: &ApiServer, access: &Path) -> PathBuf {
        let path = access.with_extension(self.addr.port().to_string());
        let text = fs::read_to_string(access).unwrap();
        fs::write(&path, text.replace(&server.url(), &format!("http://{}", self.addr))).unwrap();
        path
    }
}

impl Upstream {
    fn server(client: &Client) -> Self {
        Self::Server {
            client: client.clone(),
            slices_client: Box::new(client.clone()),
            delay: Duration::ZERO,
        }
    }

    /// The present lists of the API server.
    async fn backup(client: &Client) -> Self {
        let list = async |path: &str| {
            let request = Request::get(path).body(Vec::new()).unwrap();
            client.request_text(request).await.unwrap()
        };
        Self::Backup {
            services: list(SERVICES).await,
            slices: list(SLICES).await,
        }
    }

    async fn respond(self, req: Request<Incoming>) -> Response<AnyBody> {
        match self {
            Self::Server {
                client,
                slices_client,
                delay,
            } => {
                sleep(delay).await;
                match req.uri().path() {
                    SLICES => forward(&slices_client, req).await,
                    _ => forward(&client, req).await,
                }
            }
            Self::Backup { services, slices } => {
                let list = match req.uri().path() {
                    SERVICES => services,
                    SLICES => slices,
                    _ => return empty_response(StatusCode::NOT_FOUND),
                };
                let query = req.uri().query().unwrap_or_default();
                if !query.contains("watch=true") {
                    return Response::new(full(list));
                }
                let content: Value = serde_json::from_str(&list).unwrap();
                let version = content["metadata"]["resourceVersion"].as_str().unwrap();
                if query
                    .split('&')
                    .any(|pair| pair == format!("resourceVersion={version}"))
                {
                    unfinished_response(0, Duration::ZERO)
                } else {
                    empty_response(StatusCode::GONE)
                }
            }
        }
    }
}

/// Sends a request with the credentials of `client` instead of its own.
async fn forward(client: &Client, req: Request<Incoming>) -> Response<AnyBody> {
    let (head, body) = req.into_parts();
    let mut forwarded = Request::builder().method(head.method).uri(head.uri);
    for name in [ACCEPT, CONTENT_TYPE] {
        if let Some(value) = head.headers.get(&name) {
            forwarded = forwarded.header(name, value);
        }
    }
    let Ok(body) = body.collect().await else {
        return empty_response(StatusCode::BAD_REQUEST);
    };
    let forwarded = forwarded.body(Body::from(body.to_bytes())).unwrap();
    let Ok(response) = client.send(forwarded).await else {
        return empty_response(StatusCode::BAD_GATEWAY);
    };
    let (mut head, mut body) = response.into_parts();
    head.headers.remove(TRANSFER_ENCODING);
    let (frame_tx, frames) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let frame = tokio::select! {
                frame = body.frame() => frame,
                () = frame_tx.closed() => return,
            };
            let Some(frame) = frame else { return };
            if frame_tx.send(frame).await.is_err() {
                return;
            }
        }
    });
    Response::from_parts(head, any(StreamBody::new(ReceiverStream::new(frames))))
}

fn empty_response(status: StatusCode) -> Response<AnyBody> {
    Response::builder().status(status).body(empty()).unwrap()
}

/// A client whose token the API server does not accept.
async fn client_with_invalid_token(access: &Path) -> Client {
    let text = fs::read_to_string(access).unwrap();
    let lines = text.lines().map(|line| match line.split_once("token: ") {
        Some((indent, _)) => format!("{indent}token: invalid"),
        None => line.to_owned(),
    });
    let path = access.with_extension("invalid");
    fs::write(&path, lines.collect::<Vec<_>>().join("\n")).unwrap();
    kubeconfig::client(&path).await.unwrap()
}

/// A Link of `west` to `east` through a reverse proxy, and its service mirror.
struct ProxiedLink<'a> {
    west: &'a ApiServer,
    east: &'a ApiServer,
    name: &'static str,
    proxy: ReverseProxy,
    mirror: Mirror,
}

impl<'a> ProxiedLink<'a> {
    /// Starts the service mirror. The port of the proxy is still closed.
    async fn start(west: &'a ApiServer, east: &'a ApiServer, name: &'static str, access: &Path) -> Self {
        let proxy = ReverseProxy {
            addr: free_addr(west),
            app: None,
        };
        apply(west, &link(name)).await;
        put_credentials(west, name, &proxy.write_kubeconfig(east, access)).await;
        Self {
            west,
            east,
            name,
            proxy,
            mirror: Mirror::start_for_link(west, name).await,
        }
    }

    /// A metric of the service mirror, given its name and labels for the cluster `east`.
    fn metric(&self, series: &str) -> Option<f64> {
        self.mirror
            .metric(&series.replace("\"east\"", &format!("\"{}\"", self.name)))
    }

    async fn wait_for_condition(&self, service: &str, status: &str, text: &str) {
        wait_for_condition(self.west, self.name, "mirrorServices", (service, status, text)).await;
    }

    async fn wait_until_mirrored(&self, service: &str) {
        self.wait_for_condition(service, "True", "").await;
        eventually("the mirrors are up to date", async || {
            (self.metric(SYNCED)? == 1.0).then_some(())
        })
        .await;
    }

    /// The names and uids of the mirrors.
    async fn mirrors(&self) -> BTreeMap<String, String> {
        let params = ListParams::default().labels(&format!("mirror.linkerd.io/cluster-name={}", self.name));
        let found = services(self.west.client()).list(&params).await.unwrap();
        let metadata = found.items.into_iter().map(|service| service.metadata);
        metadata
            .map(|metadata| (metadata.name.unwrap(), metadata.uid.unwrap()))
            .collect()
    }
}

/// The API server cannot be reached at first, then it can, and then it fails. Mirrors stay meanwhile, with the gateway's addresses.
async fn check_failure(mut link: ProxiedLink<'_>, healthy: &Upstream, failure: Option<Upstream>, cause: &str) {
    eventually("the failure is counted", async || {
        (link.metric(UNREADABLE)? >= 1.0).then_some(())
    })
    .await;
    assert_eq!(link.metric(SYNCED), Some(0.0));
    // The status has no entries yet.
    let first_cause = format!("of the cluster {}", link.name);
    wait_for_link_event(link.west, link.name, "Unreadable", &first_cause).await;
    link.proxy.set_upstream(Some(healthy.clone())).await;
    link.wait_until_mirrored("web").await;
    let mirror = format!("web-{}", link.name);
    wait_for_addresses(link.west, &mirror, 1).await;

    let before = link.mirrors().await;
    link.proxy.set_upstream(failure).await;
    link.wait_for_condition("web", "Unknown", cause).await;
    wait_for_link_event(link.west, link.name, "Unreadable", cause).await;
    assert_eq!(link.metric(SYNCED), Some(0.0), "{cause}");
    // Mirrors are still repaired, which does not change the status.
    let all = Api::<Endpoints>::namespaced(link.west.client(), "shop");
    let emptied = Patch::Merge(json!({"subsets": null}));
    all.patch(&mirror, &PatchParams::default(), &emptied).await.unwrap();
    wait_for_addresses(link.west, &mirror, 1).await;
    link.wait_for_condition("web", "Unknown", cause).await;
    assert_eq!(link.metric(SYNCED), Some(0.0), "{cause}");
    let after = link.mirrors().await;
    let is_kept = |(name, uid): (&String, &String)| after.get(name) == Some(uid);
    assert!(before.iter().all(is_kept), "{cause}: {before:?}, then {after:?}");

    link.proxy.set_upstream(Some(healthy.clone())).await;
    let added = format!("added-{}", link.name);
    export(link.east, &added).await;
    link.wait_until_mirrored(&added).await;
    link.wait_for_condition("web", "True", "").await;
    link.mirror.end().await;
}

/// The API server responds slowly, and is restored from a backup later, so that it has lost objects.
async fn check_backup(mut link: ProxiedLink<'_>, slow: Upstream, backup: Upstream) {
    link.proxy.set_upstream(Some(slow.clone())).await;
    link.wait_until_mirrored("web").await;
    export(link.east, "later").await;
    link.wait_until_mirrored("later").await;

    let before = link.mirrors().await;
    link.proxy.set_upstream(Some(backup)).await;
    let only = eventually("one mirror is left", async || {
        Some(link.mirrors().await).filter(|mirrors| mirrors.len() == 1)
    })
    .await;
    let mirror = format!("web-{}", link.name);
    assert_eq!(only.get(&mirror), before.get(&mirror));
    link.wait_until_mirrored("web").await;
    link.proxy.set_upstream(Some(slow)).await;
    link.wait_until_mirrored("later").await;
    link.mirror.end().await;
}

/// The service mirror has never listed the exported Services, because it has no credentials, or because the API server cannot be
/// reached. An existing mirror still follows the gateway, which does not answer probes.
async fn check_gateway_without_list(west: &ApiServer, name: &'static str, access: Option<&Path>, cause: &str) {
    let mirror = format!("known-{name}");
    let labels = json!({"mirror.linkerd.io/mirrored-service": "true", "mirror.linkerd.io/cluster-name": name});
    let mut known = endpoints(&mirror, &json!([{"ip": "192.0.2.7"}]));
    known["metadata"]["labels"] = labels.clone();
    apply(west, &service(&mirror, &labels)).await;
    apply(west, &known).await;
    let before = services(west.client()).get(&mirror).await.unwrap();

    let mut probed = link(name);
    probed["spec"]["probeSpec"] = json!({
        "path": "/ready", "port": "4191", "period": "100ms", "timeout": "100ms", "failureThreshold": "2",
    });
    apply(west, &probed).await;
    // The status that an earlier process wrote.
    let condition = json!({
        "type": "Mirrored", "status": "True", "reason": "Mirrored", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    });
    let remote = json!({"name": "known", "namespace": "shop"});
    let entry = json!({"controllerName": "linkerd.io/service-mirror", "remoteRef": remote, "conditions": [condition]});
    let status = Patch::Merge(json!({"status": {"mirrorServices": [entry]}}));
    let written = links(west, "v1alpha3");
    let written = written.patch_status(name, &PatchParams::default(), &status).await;
    written.unwrap();
    if let Some(access) = access {
        put_credentials(west, name, access).await;
    }

    // Nothing answers at the cluster IP of the Service that the chart creates.
    let config = Config {
        probe_service: Some(format!("probe-{name}")),
        ..mirror_config(Scope::Link(name.to_owned()))
    };
    let running = Mirror::start_with(west, &format!("controller-{name}"), config).await;
    wait_for_addresses(west, &mirror, 0).await;
    let all = Api::<Endpoints>::namespaced(west.client(), "shop");
    let subsets = all.get(&mirror).await.unwrap().subsets.unwrap();
    assert_eq!(subsets[0].not_ready_addresses.as_ref().unwrap()[0].ip, "192.0.2.7");
    for (series, expected) in [("gateway_enabled", 1.0), ("gateway_alive", 0.0)] {
        let series = format!("{series}{{target_cluster_name=\"{name}\"}}");
        assert_eq!(running.metric(&series), Some(expected), "{series}");
    }
    wait_for_condition(west, name, "mirrorServices", ("known", "Unknown", cause)).await;
    let after = services(west.client()).get(&mirror).await.unwrap();
    assert_eq!(after.metadata.uid, before.metadata.uid);
    running.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mirrors_stay_while_the_other_api_server_fails_and_follow_it_afterwards() {
    let (west, east) = tokio::join!(cluster(&FAILING_LINKS), cluster(&[]));
    let access = remote_access(&east).await;
    let client = kubeconfig::client(&access).await.unwrap();
    export(&east, "web").await;
    apply(&east, &slice_of(&endpoints("web", &json!([{"ip": "10.1.0.1"}])))).await;

    let backup = Upstream::backup(&client).await;
    let healthy = Upstream::server(&client);
    let unauthorized = Upstream::server(&client_with_invalid_token(&access).await);
    let without_permissions = east.service_account_kubeconfig(NAMESPACE, "default").await.unwrap();
    let forbidden = Upstream::Server {
        client: client.clone(),
        slices_client: Box::new(kubeconfig::client(&without_permissions).await.unwrap()),
        delay: Duration::ZERO,
    };
    let slow = Upstream::Server {
        client: client.clone(),
        slices_client: Box::new(client),
        delay: Duration::from_secs(2),
    };

    // A failure is reported after 5 s, so the links are checked side by side.
    let mut checks = Vec::new();
    for (name, failure, cause) in [
        ("unauthorized", Some(unauthorized), "Unauthorized"),
        (
            "forbidden",
            Some(forbidden),
            "endpointslices.discovery.k8s.io is forbidden",
        ),
        ("gone", None, "watching"),
    ] {
        let link = ProxiedLink::start(&west, &east, name, &access).await;
        checks.push(Box::pin(check_failure(link, &healthy, failure, cause)));
    }
    let restored = ProxiedLink::start(&west, &east, "restored", &access).await;
    let closed = ReverseProxy {
        addr: free_addr(&west),
        app: None,
    };
    let away = closed.write_kubeconfig(&east, &access);
    let unusable = access.with_extension("unusable");
    fs::write(&unusable, "no kubeconfig").unwrap();
    let without_list = [
        ("absent", None, "there is no Secret"),
        ("unusable", Some(&*unusable), "gives no access to unusable"),
        ("away", Some(&*away), "of the cluster away"),
    ]
    .map(|(name, access, cause)| Box::pin(check_gateway_without_list(&west, name, access, cause)));
    tokio::join!(
        join_all(checks),
        join_all(without_list),
        Box::pin(check_backup(restored, slow, backup))
    );
}

const FAILING_LINKS: [&str; 7] = [
    "unauthorized",
    "forbidden",
    "gone",
    "restored",
    "absent",
    "unusable",
    "away",
];

/// How often it was reported that the exported Services of `east` cannot be read.
const UNREADABLE: &str = "tulle_mirror_errors_total{target_cluster_name=\"east\",reason=\"Unreadable\"}";
const SERVICES: &str = "/api/v1/services";
const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
