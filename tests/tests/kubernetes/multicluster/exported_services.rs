//! Mirrors of exported Services while Services, namespaces, credentials and the Link change.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Namespace;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::*;

/// A proxy in front of an API server. It passes on only the first bytes of the responses on each connection, until it is released.
struct HoldingProxy {
    port: u16,
    is_released: watch::Sender<bool>,
    /// The tasks that forward connections. They end when this is dropped.
    _tasks: JoinSet<()>,
}

impl HoldingProxy {
    async fn start(server: &ApiServer) -> Self {
        let url: http::Uri = server.url().parse().unwrap();
        let ip: IpAddr = url.host().unwrap().parse().unwrap();
        let target = SocketAddr::new(ip, url.port_u16().unwrap());
        // The certificate of the API server is valid for its address with any port.
        let listener = TcpListener::bind((ip, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let is_released = watch::Sender::new(false);
        let released = is_released.subscribe();
        let mut tasks: JoinSet<()> = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.unwrap();
                connections.spawn(forward(client, target, released.clone()));
            }
        });
        Self {
            port,
            is_released,
            _tasks: tasks,
        }
    }

    /// Writes a kubeconfig with this proxy instead of the API server.
    fn write_access(&self, access: &Path) -> PathBuf {
        let through_proxy = access.with_extension("proxy");
        let text = fs::read_to_string(access).unwrap();
        let text = text.replace(":6443", &format!(":{}", self.port));
        fs::write(&through_proxy, text).unwrap();
        through_proxy
    }

    fn release(&self) {
        self.is_released.send_replace(true);
    }
}

async fn forward(mut client: TcpStream, target: SocketAddr, mut released: watch::Receiver<bool>) -> io::Result<()> {
    let mut server = TcpStream::connect(target).await?;
    let (mut from_client, mut to_client) = client.split();
    let (from_server, mut to_server) = server.split();
    let requests = async {
        tokio::io::copy(&mut from_client, &mut to_server).await?;
        to_server.shutdown().await
    };
    let responses = async {
        let mut first = from_server.take(N_PASSED_BYTES);
        tokio::io::copy(&mut first, &mut to_client).await?;
        released
            .wait_for(|released| *released)
            .await
            .map_err(io::Error::other)?;
        let mut rest = first.into_inner();
        tokio::io::copy(&mut rest, &mut to_client).await?;
        to_client.shutdown().await
    };
    tokio::try_join!(requests, responses).map(drop)
}

/// Creates the Link, exported Services in `east`, and objects in `west` that have the names of mirrors.
async fn create_objects(west: &ApiServer, east: &ApiServer) {
    let exported = json!({"mirror.linkerd.io/exported": "true", "app": "web"});
    for name in ["web", "taken", "closed"] {
        apply(east, &service(name, &exported)).await;
    }
    apply(east, &slice_of(&endpoints("web", &json!([{"ip": "10.1.0.1"}])))).await;
    let direct = json!({"mirror.linkerd.io/exported": "remote-discovery"});
    apply(east, &service("direct", &direct)).await;
    let mut portless = service("portless", &exported);
    portless["spec"] = json!({"clusterIP": "None"});
    apply(east, &portless).await;
    let mut private = service("private", &json!({}));
    // The list of all Services is longer than the part of it that `HoldingProxy` passes on.
    private["metadata"]["annotations"] = json!({"text": "x".repeat(32 * 1024)});
    apply(east, &private).await;
    apply(west, &service("taken-east", &json!({}))).await;
    // Endpoints with the name of a mirror exist already, without the labels of a mirror.
    apply(west, &endpoints("web-east", &json!([{"ip": "10.9.9.9"}]))).await;
    apply(west, &link("east")).await;
}

/// Checks the mirrors of the objects that [`create_objects`] creates. `taken_version` is the resource version of the Service in the
/// way of a mirror.
async fn check_mirrors(west: &ApiServer, east: &ApiServer, taken_version: &Option<String>) {
    wait_for_condition(west, "east", "mirrorServices", ("web", "True", "")).await;
    wait_for_addresses(west, "web-east", 1).await;
    let cause = "is not a mirror of east";
    let condition = wait_for_condition(west, "east", "mirrorServices", ("taken", "False", cause)).await;
    assert_eq!(condition["reason"], "InvalidService");
    wait_for_event(east, "shop", "taken", cause).await;
    wait_for_event(east, "shop", "portless", "the Service has no ports").await;
    let local = services(west.client());
    let web = local.get("web-east").await.unwrap();
    assert_eq!(web.metadata.labels.as_ref().unwrap()["app"], "web");
    assert_eq!(
        web.metadata.annotations.as_ref().unwrap()["mirror.linkerd.io/remote-svc-fq-name"],
        "web.shop.svc.east.test"
    );
    assert!(web.spec.unwrap().cluster_ip.is_some_and(|ip| ip != "None"));
    let direct = local.get("direct-east").await.unwrap();
    assert_eq!(
        direct.metadata.labels.unwrap()["multicluster.linkerd.io/remote-service"],
        "direct"
    );
    let all = Api::<Endpoints>::namespaced(west.client(), "shop");
    let subsets = all.get("web-east").await.unwrap().subsets.unwrap();
    assert_eq!(subsets[0].addresses.as_ref().unwrap()[0].ip, "192.0.2.7");
    for name in ["direct-east", "taken-east"] {
        assert!(all.get_opt(name).await.unwrap().is_none(), "{name}");
    }
    let taken = local.get("taken-east").await.unwrap();
    assert_eq!(taken.metadata.resource_version, *taken_version);
    for name in ["private-east", "portless-east"] {
        assert!(local.get_opt(name).await.unwrap().is_none(), "{name}");
    }
}

/// Waits for an Event on an exported Service that contains this text.
pub(super) async fn wait_for_event(server: &ApiServer, namespace: &str, service: &str, text: &str) {
    let events = Api::<Event>::namespaced(server.client(), namespace);
    eventually(&format!("an Event on {namespace}/{service}"), async || {
        let found = events.list(&ListParams::default()).await.unwrap();
        let is_about_service = |event: &&Event| {
            let regarding = event.regarding.as_ref();
            regarding.is_some_and(|object| object.name.as_deref() == Some(service))
        };
        let note = found.items.iter().find(is_about_service)?.note.clone().unwrap();
        assert!(note.contains(text), "{note}");
        Some(())
    })
    .await;
}

/// Checks that changes in the other cluster reach the mirrors in time, and that a deleted mirror is created again.
async fn check_changes(west: &ApiServer, east: &ApiServer) {
    let exported = json!({"mirror.linkerd.io/exported": "true"});
    let local = services(west.client());
    let ready = endpoints("web", &json!([{"ip": "10.1.0.2"}]));
    let mut unready = ready.clone();
    let subset = unready["subsets"][0].as_object_mut().unwrap();
    let addresses = subset.remove("addresses").unwrap();
    subset.insert("notReadyAddresses".to_owned(), addresses);
    for (changed, n_addresses) in [
        (&endpoints("web", &json!([])), 0),
        (&ready, 1),
        (&unready, 0),
        (&ready, 1),
    ] {
        apply(east, &slice_of(changed)).await;
        let followed = wait_for_addresses(west, "web-east", n_addresses);
        in_time(Duration::from_secs(1), followed).await;
    }
    apply(east, &service("late", &exported)).await;
    let mirrored = wait_for_condition(west, "east", "mirrorServices", ("late", "True", ""));
    let condition = in_time(Duration::from_secs(2), mirrored).await;
    assert_eq!(condition["reason"], "Mirrored");
    let mirror = json!({"group": "core", "kind": "Service", "name": "late-east", "namespace": "shop"});
    assert_eq!(condition["localRef"], mirror);
    services(east.client())
        .delete("late", &Default::default())
        .await
        .unwrap();
    wait_until_gone(west, "late-east").await;

    // A deleted mirror is created again, with its Endpoints, which the API server deletes with their Service.
    let local_endpoints = Api::<Endpoints>::namespaced(west.client(), "shop");
    let service_before = local.get("web-east").await.unwrap().metadata.uid;
    let endpoints_before = local_endpoints.get("web-east").await.unwrap().metadata.uid;
    local.delete("web-east", &Default::default()).await.unwrap();
    let is_new = async || {
        let service = local.get_opt("web-east").await.unwrap()?;
        let endpoints = local_endpoints.get_opt("web-east").await.unwrap()?;
        let uids = (service.metadata.uid, endpoints.metadata.uid);
        (uids.0 != service_before && uids.1 != endpoints_before).then_some(())
    };
    eventually("web-east and its Endpoints exist again", is_new).await;
    wait_for_addresses(west, "web-east", 1).await;
}

/// An exported Service in another namespace than `shop`.
fn service_in(namespace: &str, name: &str) -> Value {
    let mut service = service(name, &json!({"mirror.linkerd.io/exported": "true"}));
    service["metadata"]["namespace"] = namespace.into();
    service
}

/// Checks that a Service is mirrored in time when its namespace exists in both clusters.
async fn check_missing_namespace(west: &ApiServer, east: &ApiServer) {
    east.create_namespace("only-east").await.unwrap();
    apply(east, &service_in("only-east", "remote")).await;
    let cause = "namespace only-east does not exist here";
    let condition = wait_for_condition(west, "east", "mirrorServices", ("remote", "False", cause)).await;
    assert_eq!(condition["reason"], "MissingNamespace");
    wait_for_event(east, "only-east", "remote", cause).await;
    west.create_namespace("only-east").await.unwrap();
    let local = Api::<Service>::namespaced(west.client(), "only-east");
    let mirrored = eventually("the Service in only-east is mirrored", async || {
        local.get_opt("remote-east").await.unwrap().map(drop)
    });
    in_time(Duration::from_secs(1), mirrored).await;
    wait_for_condition(west, "east", "mirrorServices", ("remote", "True", "")).await;
}

/// Checks that a mirror that may do so creates the namespace of an exported Service.
async fn check_created_namespace(west: &ApiServer, east: &ApiServer) {
    east.create_namespace("created").await.unwrap();
    apply(east, &service_in("created", "first")).await;
    wait_for_condition(west, "east", "mirrorServices", ("first", "True", "")).await;
    let namespaces = Api::<Namespace>::all(west.client());
    let labels = namespaces.get("created").await.unwrap().metadata.labels.unwrap();
    assert_eq!(labels["mirror.linkerd.io/mirrored-service"], "true");
    assert_eq!(labels["mirror.linkerd.io/cluster-name"], "east");
}

/// Changes Services while the mirror does not run, and starts it. Checks that nothing is deleted before the list of all Services is
/// complete, and that exactly the exported Services are mirrored then.
async fn check_restart(west: &ApiServer, east: &ApiServer, proxy: &HoldingProxy, config: Config) -> Mirror {
    let remote = services(east.client());
    remote.delete("direct", &Default::default()).await.unwrap();
    apply(east, &service("closed", &json!({}))).await;
    apply(east, &service("new", &json!({"mirror.linkerd.io/exported": "true"}))).await;
    let access = proxy.write_access(&remote_access(east).await);
    put_credentials(west, "east", &access).await;
    let mirror = Mirror::start_with(west, "controller-east", config).await;
    let cause = "the mirrors keep their last known state: the first list of";
    let condition = wait_for_condition(west, "east", "mirrorServices", ("web", "Unknown", cause)).await;
    let message = condition["message"].as_str().unwrap();
    assert!(message.contains("of the cluster east is not complete"), "{message}");
    assert_eq!(mirror.metric(SYNCED), Some(0.0));
    assert_eq!(mirrors(west).await, ["closed-east", "direct-east", "web-east"]);

    proxy.release();
    wait_for_condition(west, "east", "mirrorServices", ("new", "True", "")).await;
    eventually("exactly the exported Services are mirrored", async || {
        (mirrors(west).await == ["new-east", "web-east"]).then_some(())
    })
    .await;
    mirror
}

/// The names of the mirrors in `shop`.
async fn mirrors(west: &ApiServer) -> Vec<String> {
    let of_east = ListParams::default().labels("mirror.linkerd.io/cluster-name=east");
    let found = services(west.client()).list(&of_east).await.unwrap();
    let found = found.items.into_iter();
    let mut names: Vec<String> = found.filter_map(|service| service.metadata.name).collect();
    names.sort_unstable();
    names
}

/// Checks that mirrors do not change while the credentials are broken, and that new credentials are used without a restart.
async fn check_broken_access(west: &ApiServer, east: &ApiServer, mirror: &Mirror) {
    let (local, access) = (services(west.client()), remote_access(east).await);
    let unreachable = access.with_extension("unreachable");
    let text = fs::read_to_string(&access).unwrap().replace(":6443", ":1");
    fs::write(&unreachable, text).unwrap();
    put_credentials(west, "east", &unreachable).await;
    let cause = "the mirrors keep their last known state";
    wait_for_condition(west, "east", "mirrorServices", ("web", "Unknown", cause)).await;
    assert_eq!(mirror.metric(SYNCED), Some(0.0));
    services(east.client())
        .delete("new", &Default::default())
        .await
        .unwrap();
    assert!(local.get_opt("new-east").await.unwrap().is_some());
    put_credentials(west, "east", &access).await;
    wait_until_gone(west, "new-east").await;
    wait_for_condition(west, "east", "mirrorServices", ("web", "True", "")).await;
}

/// Checks that the mirrors stay while the Link is invalid, and that its status and an Event name the field.
async fn check_invalid_link(west: &ApiServer, mirror: &Mirror) {
    let links = links(west, "v1alpha3");
    let set = async |spec: Value| {
        let patch = Patch::Merge(json!({ "spec": spec }));
        links.patch("east", &PatchParams::default(), &patch).await.unwrap();
    };
    for (invalid, valid, cause) in [
        (
            json!({"selector": {"matchLabels": {"app": 1}}}),
            json!({"selector": {"matchLabels": {"app": null}}}),
            "spec.selector is invalid: ",
        ),
        (
            json!({"targetClusterDomain": ""}),
            json!({"targetClusterDomain": "east.test"}),
            "spec.targetClusterDomain is empty",
        ),
    ] {
        set(invalid).await;
        wait_for_condition(west, "east", "mirrorServices", ("web", "Unknown", cause)).await;
        wait_for_link_event(west, "east", "Unreadable", cause).await;
        assert_eq!(mirror.metric(SYNCED), Some(0.0));
        assert!(services(west.client()).get_opt("web-east").await.unwrap().is_some());
        set(valid).await;
        wait_for_condition(west, "east", "mirrorServices", ("web", "True", "")).await;
    }
}

/// Checks that members leave and exclusions end when a client that knows only `v1alpha1` removes both from the Link, and that the
/// mirror then follows the Link as before.
async fn check_write_in_an_old_version(west: &ApiServer, east: &ApiServer) {
    let wait_for_label = async |expected: Option<&str>| {
        let has_label = async || {
            let mirror = services(west.client()).get("web-east").await.unwrap();
            let labels = mirror.metadata.labels.unwrap();
            (labels.get("app").map(String::as_str) == expected).then_some(())
        };
        eventually(&format!("the label app of web-east is {expected:?}"), has_label).await;
    };
    let mut excluding = link("east");
    excluding["spec"]["excludedLabels"] = json!(["app"]);
    excluding["spec"]["excludedAnnotations"] = json!(["text"]);
    apply(west, &excluding).await;
    wait_for_label(None).await;
    let member = json!({"mirror.linkerd.io/federated": "member"});
    apply(east, &service("member", &member)).await;
    wait_for_condition(west, "east", "federatedServices", ("member", "True", "")).await;
    let old = links(west, "v1alpha1");
    let link = old.get("east").await.unwrap();
    old.replace("east", &Default::default(), &link).await.unwrap();
    wait_until_gone(west, "member-federated").await;
    wait_for_label(Some("web")).await;
    let link = links(west, "v1alpha3").get("east").await.unwrap();
    for field in ["federatedServiceSelector", "excludedLabels", "excludedAnnotations"] {
        assert_eq!(link.data["spec"][field], Value::Null, "{field}");
    }
    let exported = json!({"mirror.linkerd.io/exported": "true"});
    apply(east, &service("afterwards", &exported)).await;
    for name in ["web", "afterwards"] {
        wait_for_condition(west, "east", "mirrorServices", (name, "True", "")).await;
    }
}

/// Deletes the Link. Its mirrors stay, because `unlink` deletes them; its metrics do not.
async fn check_deleted_link(west: &ApiServer, east: &ApiServer, mirror: Mirror) {
    let has_series = || mirror.registry.render().contains("=\"east\"");
    assert!(has_series());
    west.kubectl(&["delete", "links.multicluster.linkerd.io", "east", "-n", NAMESPACE])
        .await
        .unwrap();
    eventually("the metrics of the Link are gone", async || {
        (!has_series()).then_some(())
    })
    .await;
    services(east.client())
        .delete("web", &Default::default())
        .await
        .unwrap();
    mirror.end().await;
    assert!(services(west.client()).get_opt("web-east").await.unwrap().is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn exported_services_are_mirrored_while_their_cluster_can_be_read_and_kept_while_it_cannot() {
    let values = ["enableNamespaceCreation=true"];
    let (west, east) = tokio::join!(cluster_with_values(&["east"], &values), cluster(&[]));
    create_objects(&west, &east).await;
    let taken = services(west.client()).get("taken-east").await.unwrap();

    // Without credentials nothing is mirrored, and the process waits for them.
    let config = Config {
        mirrors_pods: true,
        ..mirror_config(Scope::Link("east".to_owned()))
    };
    let mirror = Mirror::start_with(&west, "controller-east", config.clone()).await;
    eventually("the missing Secret is reported", async || {
        (mirror.metric(SYNCED)? == 0.0).then_some(())
    })
    .await;
    let cause = "there is no Secret linkerd-multicluster/cluster-credentials-east";
    wait_for_link_event(&west, "east", "Unreadable", cause).await;
    put_credentials(&west, "east", &remote_access(&east).await).await;
    check_mirrors(&west, &east, &taken.metadata.resource_version).await;
    assert_eq!(mirror.metric(SYNCED), Some(1.0));
    check_changes(&west, &east).await;
    check_missing_namespace(&west, &east).await;
    mirror.end().await;

    let config = Config {
        may_create_namespaces: true,
        ..config
    };
    let proxy = HoldingProxy::start(&east).await;
    let mirror = check_restart(&west, &east, &proxy, config).await;
    check_created_namespace(&west, &east).await;
    check_broken_access(&west, &east, &mirror).await;
    check_invalid_link(&west, &mirror).await;
    check_write_in_an_old_version(&west, &east).await;
    check_deleted_link(&west, &east, mirror).await;

    let refused: Vec<_> = [&west, &east]
        .iter()
        .flat_map(|server| server.audit_log().unwrap())
        .filter(tulle_tests::cluster::AuditRecord::is_forbidden)
        .map(|record| (record.user.username, record.verb))
        .collect();
    assert!(refused.is_empty(), "{refused:?}");
}

/// More than the handshake of TLS and the reviews of permissions have, and less than the list of all Services.
const N_PASSED_BYTES: u64 = 16 * 1024;
