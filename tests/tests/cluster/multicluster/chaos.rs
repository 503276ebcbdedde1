//! No request between clusters is lost: POST requests at a fixed rate, from a client without retries, while parts of both clusters
//! and the network between them are unavailable for a time.
//!
//! With `TULLE_TEST_FULL=1` a run causes all disturbances, otherwise only those without a long wait.

use std::env;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use tokio::time::{Instant, sleep};
use tulle_bench::load::stats::Report;
use tulle_tests::cluster::Cut;
use tulle_tests::linked_clusters::{CLIENT, LinkedClusters, NAMESPACE, SERVICE_MIRROR, responding_clusters, tulle};
use tulle_tests::meshed::{MeshedCluster, assert_all_ok, find_process};

/// Requests to the mirror, through the gateway.
pub(super) const GATEWAY: &str = "http://web-east:80/echo --rate=500 --body-size=200";
/// Requests to pods of both clusters.
const FEDERATED: &str = "http://web-federated:80/echo --rate=500 --body-size=200";

/// Maximum number of requests that may fail when the network is cut: in a default run, and in a full run, which needs a machine
/// without other load.
///
/// Requests fail that are in flight, or that are sent before the proxy notices the cut. It notices the cut within 400 ms if the
/// peak latency was 200 ms, and within 40 ms without other load.
const MAX_FAILED_REQUESTS_AT_CUT: [u64; 2] = [100, 25];

/// Maximum number of requests that may fail when a gateway is killed: those that it serves at that moment. In a default run, and in a
/// full run.
const MAX_FAILED_REQUESTS_AT_KILL: [u64; 2] = [50, 10];

/// The process names of proxies. tulle's image starts the program as `linkerd2-proxy-identity`, of which the kernel keeps 15 bytes;
/// Linkerd's is `linkerd2-proxy`.
const PROXY_PROGRAMS: [&str; 2] = ["linkerd2-proxy-", "linkerd2-proxy"];

/// The sum of three intervals of probes, 3.3 s each, the timeout of the last probe in the proxy, 1 s, and the time of the command.
const MAX_UNREPORTED: Duration = Duration::from_secs(15);
/// Two intervals of probes, because the first probe can be sent before the nodes forward it to the new pod, and the time until the
/// client knows the change.
const MAX_UNSERVED: Duration = Duration::from_secs(10);
/// Half of the time that a proxy waits for a connection: a request without a gateway must not wait for one.
const MAX_LATENCY_WITHOUT_GATEWAY: Duration = Duration::from_millis(500);

pub(super) async fn no_request_is_lost(linked: &LinkedClusters) {
    let full = env::var_os("TULLE_TEST_FULL").is_some();
    linked
        .east
        .kubectl("label --overwrite -n shop service web mirror.linkerd.io/exported=true")
        .await
        .unwrap();
    scale_deployment(&linked.east, NAMESPACE, "linkerd-gateway", 2)
        .await
        .unwrap();

    let killed = Box::pin(kill_process(&linked.east, "app=linkerd-gateway", &PROXY_PROGRAMS));
    let (report, _) = run_during(linked, "a gateway killed", GATEWAY, 10, killed).await;
    assert!(
        report.failed <= MAX_FAILED_REQUESTS_AT_KILL[usize::from(full)],
        "a gateway killed: {report:?}"
    );
    let rollout = Box::pin(async {
        linked
            .east
            .kubectl(&format!("rollout restart -n {NAMESPACE} deploy/linkerd-gateway"))
            .await?;
        wait_for_rollout(&linked.east, NAMESPACE, "linkerd-gateway").await
    });
    load_during(linked, "a rollout of the gateway", GATEWAY, 10, rollout).await;
    let service_mirror = format!("app={SERVICE_MIRROR}");
    for target in [GATEWAY, FEDERATED] {
        let killed = Box::pin(kill_process(&linked.west, &service_mirror, &["tulle-control"]));
        load_during(linked, "the service mirror killed", target, 5, killed).await;
    }
    let seconds = if full { 30 } else { 10 };
    let cut = Box::pin(async {
        linked.network.cut(Cut::All)?;
        sleep(Duration::from_secs(seconds)).await;
        linked.network.restore()?;
        linked.wait_for_both_clusters().await
    });
    let what = format!("network cut for {seconds} s");
    let (report, per_second) = run_during(linked, &what, FEDERATED, seconds + 10, cut).await;
    let is_west_only = |second: &&Report| second.requests > 0 && responding_clusters(second).iter().eq(&["west"]);
    let n_cut = per_second.iter().filter(is_west_only).count() as u64;
    assert!(
        n_cut + 3 >= seconds,
        "{what}: west alone responded during {n_cut} seconds only"
    );
    assert!(
        report.failed <= MAX_FAILED_REQUESTS_AT_CUT[usize::from(full)],
        "{what}: {report:?}"
    );
    if full {
        Box::pin(run_long_disturbances(linked)).await;
    }
}

/// The other disturbances: of the servers, of the gateway, of the control plane of `east`, of the link, and of its credentials.
async fn run_long_disturbances(linked: &LinkedClusters) {
    no_request_is_lost_while_servers_scale(linked).await;
    an_absent_gateway_is_reported(linked).await;
    for target in [GATEWAY, FEDERATED] {
        let gone = Box::pin(async {
            linked
                .east
                .kubectl("scale deploy --all -n linkerd --replicas=0")
                .await?;
            sleep(Duration::from_secs(60)).await;
            linked
                .east
                .kubectl("scale deploy --all -n linkerd --replicas=1")
                .await?;
            linked.east.wait_for_control_plane().await
        });
        load_during(linked, "control plane of east gone for 60 s", target, 60, gone).await;
    }
    for target in [GATEWAY, FEDERATED] {
        let relinked = Box::pin(async {
            linked.west.kubectl(&format!("delete link -n {NAMESPACE} east")).await?;
            sleep(Duration::from_secs(5)).await;
            linked.link().await?;
            linked.wait_for_both_clusters().await
        });
        load_during(linked, "the Link removed and created again", target, 20, relinked).await;
    }
    for target in [GATEWAY, FEDERATED] {
        load_during(
            linked,
            "credentials rotated",
            target,
            20,
            Box::pin(rotate_credentials(linked)),
        )
        .await;
    }
    let cut = Box::pin(async {
        linked.network.cut(Cut::ApiServers)?;
        sleep(Duration::from_secs(30)).await;
        linked.network.restore()?;
        linked.wait_for_both_clusters().await
    });
    load_during(linked, "API server of east not reachable for 30 s", FEDERATED, 40, cut).await;
}

/// In one cluster the server is scaled to 0 and back, while the other cluster has five replicas and responds alone.
async fn no_request_is_lost_while_servers_scale(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    for (absent_name, absent, present_name, present) in [("east", east, "west", west), ("west", west, "east", east)] {
        let scaled = Box::pin(async {
            linked.wait_for_both_clusters().await?;
            scale_deployment(present, "shop", "web", 5).await?;
            scale_deployment(absent, "shop", "web", 0).await?;
            let responds_alone = async || {
                let report = linked.load("web-federated:80/ --rate=100 --requests=100").await?;
                ensure!(
                    report.failed == 0 && responding_clusters(&report).iter().eq(&[present_name]),
                    "{report:?}"
                );
                Ok(())
            };
            let what = format!("{present_name} responds alone");
            linked.west.cluster.wait_until(&what, responds_alone).await?;
            scale_deployment(absent, "shop", "web", 2).await?;
            scale_deployment(present, "shop", "web", 2).await?;
            linked.wait_for_both_clusters().await
        });
        let what = format!("{absent_name} scaled to 0 and back");
        load_during(linked, &what, FEDERATED, 10, scaled).await;
    }
}

/// Checks that mirrors have no ready endpoint while the gateway has no replica, so that requests fail soon, and that they work again
/// when it has one.
pub(super) async fn an_absent_gateway_is_reported(linked: &LinkedClusters) {
    let west = &linked.west;
    scale_deployment(&linked.east, NAMESPACE, "linkerd-gateway", 0)
        .await
        .unwrap();
    // A pod that ends still responds to probes, because kube-proxy uses it while there is no other one.
    let has_no_pods = async || {
        let pods = format!("get pods -n {NAMESPACE} -l app=linkerd-gateway -o name");
        let pods = linked.east.kubectl(&pods).await?;
        ensure!(pods.is_empty(), "{pods}");
        Ok(())
    };
    let east = &linked.east.cluster;
    east.wait_until("the gateway has no pods", has_no_pods).await.unwrap();
    let begun = Instant::now();
    let report_is = async |alive: &str| {
        let gateways = tulle(west, "multicluster gateways").await?;
        let row = gateways.lines().nth(1).unwrap_or_default();
        ensure!(row.split_whitespace().nth(1) == Some(alive), "{gateways}");
        Ok(())
    };
    let is_dead = async || report_is("False").await;
    west.cluster
        .wait_until("the gateway is not alive", is_dead)
        .await
        .unwrap();
    let took = begun.elapsed();
    eprintln!("gateway scaled to 0: reported after {took:.1?}");
    assert!(took <= MAX_UNREPORTED, "reported after {took:.1?}");
    let ready = "get endpoints -n shop web-east -o jsonpath={.subsets[*].addresses}";
    let is_unready = async || {
        let addresses = west.kubectl(ready).await?;
        ensure!(addresses.is_empty(), "{addresses}");
        Ok(())
    };
    west.cluster
        .wait_until("the mirror is unready", is_unready)
        .await
        .unwrap();
    let report = linked.load("web-east:80/ --rate=10 --requests=10").await.unwrap();
    let are_refused = report.errors.keys().all(|error| error.starts_with("status 503"));
    assert!(are_refused && report.failed == report.requests, "{report:?}");
    let max = Duration::from_secs_f64(report.latency_us.map_or(0., |latency| latency.max) / 1e6);
    eprintln!("requests without a gateway: {:?}, at most {max:.1?}", report.errors);
    assert!(max < MAX_LATENCY_WITHOUT_GATEWAY, "a response took {max:.1?}");

    scale_deployment(&linked.east, NAMESPACE, "linkerd-gateway", 2)
        .await
        .unwrap();
    let begun = Instant::now();
    let responds = async || {
        let report = linked.load("web-east:80/ --rate=50 --requests=10").await?;
        ensure!(report.failed == 0, "{report:?}");
        Ok(())
    };
    west.cluster.wait_until("the mirror responds", responds).await.unwrap();
    let took = begun.elapsed();
    eprintln!("gateway scaled to 2: served {took:.1?} after it was ready");
    assert!(took <= MAX_UNSERVED, "served {took:.1?} after the gateway was ready");
    let is_alive = async || report_is("True").await;
    west.cluster.wait_until("the gateway is alive", is_alive).await.unwrap();
}

/// Replaces the token of the account by a new one, and revokes the old one.
async fn rotate_credentials(linked: &LinkedClusters) -> anyhow::Result<()> {
    let secret = "linkerd-service-mirror-remote-access-default-token";
    let manifest = linked
        .east
        .kubectl(&format!("get secret -n {NAMESPACE} {secret} -o yaml"))
        .await?;
    let without_data: Vec<&str> = manifest
        .lines()
        .filter(|line| {
            ![
                "  token:",
                "  ca.crt:",
                "  namespace: bGl",
                "  uid:",
                "  resourceVersion:",
            ]
            .iter()
            .any(|key| line.starts_with(key))
        })
        .collect();
    linked
        .east
        .kubectl(&format!("delete secret -n {NAMESPACE} {secret}"))
        .await?;
    linked.east.apply(&without_data.join("\n")).await?;
    linked.link().await?;
    // Changes still arrive. This does not show which token a watch uses: a watch that began with the old token can continue. The
    // outage of the API servers in `outages` ends such watches.
    for replicas in [3, 2] {
        scale_deployment(&linked.east, "shop", "web", replicas).await?;
        let shown = async || {
            let line = "diagnostics endpoints web-federated.shop.svc.cluster.local:80";
            let endpoints = tulle(&linked.west, line).await?;
            let shown = endpoints.matches("linkerd.east.id").count();
            ensure!(shown == usize::from(replicas), "{endpoints}");
            Ok(())
        };
        linked
            .west
            .cluster
            .wait_until("west sees the pods of east", shown)
            .await?;
    }
    Ok(())
}

/// Kills one of these programs in the first pod that the selector selects, by a signal that it cannot handle, and waits until its
/// container runs again and the pod is ready.
async fn kill_process(cluster: &MeshedCluster, selector: &str, programs: &[&str]) -> anyhow::Result<()> {
    let pods = cluster.pods(NAMESPACE, selector).await?;
    let pod = pods.first().context("no pod")?;
    let before = count_restarts(&pod_status(cluster, pod).await?);
    let hostname = format!("HOSTNAME={pod}\0");
    let process = find_process(&format!("{programs:?} of pod {pod}"), |read| {
        programs.contains(&read("comm").trim()) && read("environ").contains(&hostname)
    })?;
    kill(process, Signal::SIGKILL)?;
    let runs_again = async || {
        let status = pod_status(cluster, pod).await?;
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        let is_ready = conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
        ensure!(is_ready && count_restarts(&status) > before, "{status}");
        Ok(())
    };
    let what = format!("pod {pod} is ready again");
    cluster.cluster.wait_until(&what, runs_again).await
}

async fn pod_status(cluster: &MeshedCluster, pod: &str) -> anyhow::Result<Value> {
    let get = format!("get pod -n {NAMESPACE} {pod} -o jsonpath={{.status}}");
    Ok(serde_json::from_str(&cluster.kubectl(&get).await?)?)
}

/// The restarts of all containers of a pod.
fn count_restarts(status: &Value) -> u64 {
    let lists = ["containerStatuses", "initContainerStatuses"].map(|list| status[list].as_array());
    let containers = lists.into_iter().flatten().flatten();
    containers
        .filter_map(|container| container["restartCount"].as_u64())
        .sum()
}

/// Runs load during a disturbance, and asserts that no request failed.
pub(super) async fn load_during(
    linked: &LinkedClusters,
    what: &str,
    target: &str,
    seconds: u64,
    disturb: impl Future<Output = anyhow::Result<()>>,
) {
    let (report, _) = run_during(linked, what, target, seconds, disturb).await;
    assert_all_ok(&report, what);
}

/// Runs load during a disturbance, prints its result and how long the disturbance took, and returns its report and one for each second.
async fn run_during(
    linked: &LinkedClusters,
    what: &str,
    target: &str,
    seconds: u64,
    disturb: impl Future<Output = anyhow::Result<()>>,
) -> (Report, Vec<Report>) {
    let begun = Instant::now();
    let mut took = Duration::ZERO;
    let timed = async {
        let disturbed = disturb.await;
        took = begun.elapsed();
        disturbed
    };
    let duration = Duration::from_secs(seconds);
    let reports = Box::pin(linked.west.load_during(CLIENT, target, duration, timed)).await;
    let (report, per_second) = reports.unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let latency = report
        .latency_us
        .map_or([0.; 3], |latency| [latency.p50, latency.p99, latency.max]);
    eprintln!(
        "{what:42} {:6} requests, {} failed; over after {took:.1?}; p50, p99, max in ms: {:.1?} {:?}",
        report.requests,
        report.failed,
        latency.map(|us| us / 1e3),
        report.errors
    );
    (report, per_second)
}

pub(super) async fn scale_deployment(
    cluster: &MeshedCluster,
    namespace: &str,
    name: &str,
    replicas: u8,
) -> anyhow::Result<()> {
    cluster
        .kubectl(&format!("scale -n {namespace} deploy/{name} --replicas={replicas}"))
        .await?;
    wait_for_rollout(cluster, namespace, name).await
}

pub(super) async fn wait_for_rollout(cluster: &MeshedCluster, namespace: &str, name: &str) -> anyhow::Result<()> {
    cluster.cluster.wait_for_deployment(namespace, name).await
}
