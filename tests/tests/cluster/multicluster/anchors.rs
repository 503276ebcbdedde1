//! Both clusters get another trust anchor, by the steps of `docs/how-to/rotate-trust.md`, each in both clusters before the next
//! one. No request between the clusters fails meanwhile, and no new connection.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::ensure;
use serde_json::Value;
use tulle_control::trust::{self, CertificateAuthority};
use tulle_tests::charts::chart_path;
use tulle_tests::linked_clusters::{LinkedClusters, NAMESPACE, tulle};
use tulle_tests::meshed::MeshedCluster;

use super::chaos::{GATEWAY, load_during};
use super::traffic::{GATEWAY_ID, export};

pub(super) async fn another_anchor_loses_no_request(linked: &LinkedClusters) {
    let (west, east) = (&linked.west, &linked.east);
    Box::pin(set_certificate_lifetime(linked, "1m")).await.unwrap();
    // The present certificates would be renewed much later.
    Box::pin(restart_proxies(linked)).await.unwrap();
    export(linked, "true", GATEWAY_ID).await;

    let first = fs::read_to_string(west.file("ca.crt")).unwrap();
    let second = trust::create_anchor(SECOND_ANCHOR, AUTHORITY_LIFETIME).unwrap();
    let both = [&*first, &*second.certificate].concat();
    let add = async {
        tokio::try_join!(install_anchors(west, &both), install_anchors(east, &both))?;
        wait_for_renewals(linked).await
    };
    change_under_load(linked, "a second trust anchor", Box::pin(add)).await;
    assert_trusted(linked, &[FIRST_ANCHOR, SECOND_ANCHOR]).await;
    let issue = async {
        tokio::try_join!(install_issuer(west, &second), install_issuer(east, &second))?;
        wait_for_second_issuer(linked).await
    };
    change_under_load(linked, "issuers of the second anchor", Box::pin(issue)).await;
    let only = &second.certificate;
    let remove = async {
        tokio::try_join!(install_anchors(west, only), install_anchors(east, only))?;
        wait_for_renewals(linked).await
    };
    change_under_load(linked, "the first anchor removed", Box::pin(remove)).await;
    assert_trusted(linked, &[SECOND_ANCHOR]).await;
    Box::pin(wait_for_second_issuer(linked)).await.unwrap();
    Box::pin(set_certificate_lifetime(linked, "24h0m0s")).await.unwrap();
}

/// Sends requests and opens connections through the gateway during a change, and asserts that none fails.
async fn change_under_load(linked: &LinkedClusters, what: &str, change: impl Future<Output = anyhow::Result<()>>) {
    let disturb = Box::pin(async {
        tokio::select! {
            changed = change => changed?,
            error = connect_until_failure(linked) => return Err(error),
        }
        connect(linked).await
    });
    load_during(linked, what, GATEWAY, 10, disturb).await;
}

async fn connect_until_failure(linked: &LinkedClusters) -> anyhow::Error {
    loop {
        if let Err(error) = connect(linked).await {
            return error;
        }
    }
}

/// Opens connections for opaque bytes. For each of them the proxies open one from the client to the gateway and one from the gateway
/// to the server; the first after a change of certificates or trust anchors needs a complete handshake. HTTP requests do not show
/// whether a handshake succeeds: they share a connection that may be older than the change.
async fn connect(linked: &LinkedClusters) -> anyhow::Result<()> {
    let line = "web-east:6000 --protocol=tcp --reconnect --body-size=100 --rate=20 --requests=100";
    let report = linked.load(line).await?;
    ensure!(
        report.requests > 0 && report.failed == 0,
        "new connections: {:?} {:?}",
        report.outcomes,
        report.errors
    );
    Ok(())
}

/// Sets the lifetime of the next certificates.
async fn set_certificate_lifetime(linked: &LinkedClusters, lifetime: &str) -> anyhow::Result<()> {
    let value = [format!("--set=identity.issuer.issuanceLifetime={lifetime}")];
    tokio::try_join!(upgrade(&linked.west, &value), upgrade(&linked.east, &value))?;
    Ok(())
}

async fn restart_proxies(linked: &LinkedClusters) -> anyhow::Result<()> {
    for (cluster, namespace) in namespaces_with_proxies(linked) {
        let restart = format!("rollout restart deployment -n {namespace}");
        cluster.kubectl(&restart).await?;
    }
    for (cluster, namespace) in namespaces_with_proxies(linked) {
        let list = format!("get deployments -n {namespace} -o jsonpath={{.items[*].metadata.name}}");
        for name in cluster.kubectl(&list).await?.split_whitespace() {
            cluster.cluster.wait_for_deployment(namespace, name).await?;
        }
    }
    Ok(())
}

async fn install_anchors(cluster: &MeshedCluster, bundle: &str) -> anyhow::Result<()> {
    let file = cluster.file("anchors.crt");
    fs::write(&file, bundle)?;
    let value = format!("--set-file=identityTrustAnchorsPEM={}", file.display());
    upgrade(cluster, &[value]).await
}

/// Installs an issuer of this anchor.
async fn install_issuer(cluster: &MeshedCluster, anchor: &CertificateAuthority) -> anyhow::Result<()> {
    let name = format!("{SECOND_ISSUER_PREFIX}{}", cluster.cluster.addresses().domain);
    let (certificate, key) = (cluster.file("second-issuer.crt"), cluster.file("second-issuer.key"));
    trust::create_issuer(&name, AUTHORITY_LIFETIME, anchor)?.write(&certificate, &key)?;
    let values = [
        format!("--set-file=identity.issuer.tls.crtPEM={}", certificate.display()),
        format!("--set-file=identity.issuer.tls.keyPEM={}", key.display()),
    ];
    upgrade(cluster, &values).await
}

/// Changes values of the control plane, and waits until none of its pods has the earlier values.
async fn upgrade(cluster: &MeshedCluster, values: &[String]) -> anyhow::Result<()> {
    let chart = chart_path("tulle-control-plane");
    let fixed = [
        "upgrade",
        "tulle-control-plane",
        &chart,
        "-n",
        "linkerd",
        "--reuse-values",
    ];
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    cluster.helm.run(&[&fixed[..], &values].concat())?;
    cluster.wait_for_control_plane().await?;
    // While it ends, the earlier pod can still sign a certificate, and send the earlier trust anchors with it.
    let has_ended = async || {
        let pods = cluster
            .pods("linkerd", "linkerd.io/control-plane-component=identity")
            .await?;
        ensure!(pods.len() == 1, "pods of identity: {pods:?}");
        Ok(())
    };
    cluster
        .cluster
        .wait_until("the earlier pod of identity has ended", has_ended)
        .await
}

/// Waits until all proxies have renewed their certificates. They get the trust anchors with them.
async fn wait_for_renewals(linked: &LinkedClusters) -> anyhow::Result<()> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    for (cluster, namespace) in namespaces_with_proxies(linked) {
        let line = format!("diagnostics proxy-metrics -n {namespace} pod");
        let are_renewed = async || {
            let pages = tulle(cluster, &line).await?;
            let times = pages.lines().filter_map(|line| line.strip_prefix(RENEWED_AT));
            let times = times.map(str::parse::<f64>).collect::<Result<Vec<_>, _>>()?;
            ensure!(
                !times.is_empty() && times.iter().all(|time| *time > since),
                "renewed at {times:?}, expected after {since}"
            );
            Ok(())
        };
        let what = format!("proxies of {namespace} have renewed their certificates");
        cluster.cluster.wait_until(&what, are_renewed).await?;
    }
    Ok(())
}

/// Waits until all proxies have a certificate of a second issuer.
async fn wait_for_second_issuer(linked: &LinkedClusters) -> anyhow::Result<()> {
    for (cluster, namespace) in namespaces_with_proxies(linked) {
        let line = format!("identity -n {namespace} -l linkerd.io/control-plane-ns");
        let are_issued = async || {
            let certificates = pem::parse_many(tulle(cluster, &line).await?)?;
            // The issuer's name is in the certificate as it is.
            let is_issued = |certificate: &pem::Pem| {
                let mut parts = certificate.contents().windows(SECOND_ISSUER_PREFIX.len());
                parts.any(|part| part == SECOND_ISSUER_PREFIX.as_bytes())
            };
            let n_issued = certificates.iter().filter(|certificate| is_issued(certificate)).count();
            ensure!(
                n_issued > 0 && n_issued == certificates.len(),
                "{n_issued} of {} certificates are of the second issuer",
                certificates.len()
            );
            Ok(())
        };
        let what = format!("proxies of {namespace} have certificates of the second issuer");
        cluster.cluster.wait_until(&what, are_issued).await?;
    }
    Ok(())
}

/// Asserts that proxies trust exactly these anchors. Only clients in the same pod can read this page, so proxies of pods without
/// `curl`, such as the gateway, are left out.
async fn assert_trusted(linked: &LinkedClusters, anchors: &[&str]) {
    let expected: BTreeSet<String> = anchors.iter().map(|name| format!("CN={name}")).collect();
    for (cluster, name) in [(&linked.west, "client"), (&linked.west, "web"), (&linked.east, "web")] {
        let url = "http://127.0.0.1:4191/debug/certificates?format=json";
        let get = format!("exec -n shop deploy/{name} -c {name} -- curl -sSf {url}");
        let page: Value = serde_json::from_str(&cluster.kubectl(&get).await.unwrap()).unwrap();
        let trusted = page["trust_anchors"].as_array().unwrap().iter();
        let trusted: BTreeSet<String> = trusted
            .map(|anchor| anchor["subject"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(trusted, expected, "{name}");
    }
}

fn namespaces_with_proxies(linked: &LinkedClusters) -> [(&MeshedCluster, &'static str); 4] {
    let (west, east) = (&linked.west, &linked.east);
    [(west, "shop"), (west, NAMESPACE), (east, "shop"), (east, NAMESPACE)]
}

const AUTHORITY_LIFETIME: Duration = Duration::from_hours(365 * 24);
/// The anchor of the harness.
const FIRST_ANCHOR: &str = "root.linkerd.cluster.local";
const SECOND_ANCHOR: &str = "second-root.linkerd.cluster.local";
/// The domain of the cluster follows.
const SECOND_ISSUER_PREFIX: &str = "second-identity.linkerd.";
const RENEWED_AT: &str = "control_identity_cert_refresh_timestamp_seconds ";
