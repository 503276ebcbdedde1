//! Pages for a mesh in use. Requests are sent while a page is followed, except in [`install_by_tulle`], and none may fail.

use std::time::{SystemTime, UNIX_EPOCH};

use super::guide::{Guide, ROLLED_OUT};
use super::objects;

/// All Deployments with a proxy; the control plane has none.
const PROXIES: [&str; 4] = [
    "deploy/web -n shop",
    "deploy/front -n shop",
    "deploy/other -n shop",
    "deploy/load -n steady",
];
const CONTROL_PLANE_ROLLED_OUT: &str = "kubectl rollout status deployment -n linkerd --timeout=5m";

pub(super) async fn monitor(guide: &mut Guide) {
    const PAGE: &str = "how-to/monitoring.md";
    let group = "monitoring.coreos.com";
    let monitors = objects::definition(group, "v1", "PodMonitor", "podmonitors", "Namespaced");
    let rules = objects::definition(group, "v1", "PrometheusRule", "prometheusrules", "Namespaced");
    guide.apply(&(monitors + &rules)).await;
    guide
        .bash("kubectl wait crd --all --for=condition=Established --timeout=1m")
        .await
        .unwrap();
    let n_reports_before = guide.begin_load().await;
    let values = guide.yaml(PAGE, "1. Enable it", 0);
    guide.write("monitoring.yaml", &values);
    let made = guide.run(PAGE, "1. Enable it", 0).await;
    assert!(
        made.contains("podmonitor.") && made.contains("prometheusrule."),
        "{made}"
    );
    let boards = "kubectl get configmap -n linkerd -l grafana_dashboard=1 -o name | wc -l";
    assert_eq!(guide.bash(boards).await.unwrap().trim(), "3");
    let rules = guide.run(PAGE, "Without the operator", 0).await;
    assert!(
        rules.contains("kind: PrometheusRule") && rules.contains("alert: TulleIssuerExpiresSoon"),
        "{rules}"
    );
    let alerts = guide.yaml(PAGE, "2. Change an alert", 0);
    guide.write("values-alerts.yaml", &alerts);
    let upgrade = "helm upgrade tulle-control-plane CHART -n linkerd --reuse-values";
    let upgrade = upgrade.replace("CHART", &format!("{}/tulle-control-plane", guide.values["charts"]));
    guide.bash(&format!("{upgrade} -f values-alerts.yaml")).await.unwrap();
    let rules = guide
        .bash("kubectl get prometheusrule -n linkerd -o yaml")
        .await
        .unwrap();
    assert!(!rules.contains("TulleProxyVersionSkew"), "a disabled alert:\n{rules}");
    // The command of the section "Undo".
    let off = "--set podMonitor.enabled=false --set prometheusRule.enabled=false --set dashboards.enabled=false";
    guide.bash(&format!("{upgrade} {off}")).await.unwrap();
    assert_eq!(guide.bash(boards).await.unwrap().trim(), "0");
    guide.assert_no_failure_since(n_reports_before, "monitoring").await;
}

pub(super) async fn rotate_issuer(guide: &mut Guide) {
    const PAGE: &str = "how-to/rotate-trust.md";
    let n_reports_before = guide.begin_load().await;
    guide.run(PAGE, "The issuer", 0).await;
    guide.run(PAGE, "The issuer", 1).await;
    let events = guide.commands(PAGE, "The issuer", 2);
    let checked = guide.run_until_output_contains(&events, "IssuerUpdated").await;
    assert!(!checked.contains('×'), "{checked}");
    // "Proxies renew their certificates …, and then have the new issuer."
    let key = "openssl x509 -in new-issuer/crt.pem -noout -ext subjectKeyIdentifier | tail -n 1 | tr -d ' '";
    let key = guide.bash(key).await.unwrap();
    for proxy in PROXIES {
        // The authority key ids of the pods' own certificates, without those of the issuers' certificates.
        let issuers = format!(
            "tulle identity {proxy} | openssl crl2pkcs7 -nocrl -certfile /dev/stdin | openssl pkcs7 -print_certs -text -noout \
             | grep -A24 'Subject:.*serviceaccount' | grep -A1 'Authority Key' | grep -v 'Authority Key\\|--'"
        );
        guide.run_until_each_line_contains(&issuers, key.trim()).await;
    }
    guide.assert_no_failure_since(n_reports_before, "a new issuer").await;
}

pub(super) async fn rotate_anchor(guide: &mut Guide) {
    const PAGE: &str = "how-to/rotate-trust.md";
    const HEADING: &str = "The trust anchor";
    let n_reports_before = guide.begin_load().await;
    guide.run(PAGE, HEADING, 0).await;
    guide.run(PAGE, HEADING, 1).await;
    let installed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
    let refreshed = guide.commands(PAGE, HEADING, 2);
    for proxy in PROXIES {
        let refreshed = refreshed.replace("deploy/web -n shop", proxy);
        assert!(refreshed.contains(proxy), "{refreshed}");
        let later = async || {
            let times = guide.bash(&refreshed).await?;
            let times = times.lines().filter(|line| !line.starts_with('#'));
            let times: Vec<f64> = times.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
            anyhow::ensure!(
                !times.is_empty() && times.iter().all(|time| *time > installed),
                "{times:?}"
            );
            Ok(())
        };
        guide.cluster.wait_until(proxy, later).await.unwrap();
    }
    guide.run(PAGE, HEADING, 3).await;
    let renewed = guide.commands(PAGE, HEADING, 4);
    let (identity, check) = renewed.split_once("tulle check").expect("a check");
    for proxy in PROXIES {
        let identity = identity.replace("deploy/web -n shop", proxy);
        assert!(identity.contains(proxy), "{identity}");
        guide.run_until_each_line_contains(&identity, "-2027").await;
    }
    let checked = guide.bash(&format!("tulle check{check}")).await.unwrap();
    assert!(!checked.contains('×'), "{checked}");
    let checked = guide.run(PAGE, HEADING, 5).await;
    assert!(!checked.contains('×'), "{checked}");
    guide.bash(CONTROL_PLANE_ROLLED_OUT).await.unwrap();
    guide
        .assert_no_failure_since(n_reports_before, "a new trust anchor")
        .await;
    // Later pages use these files.
    guide
        .bash("cp new-ca.crt ca.crt; cp new-ca.key ca.key; cp issuer-2027/*.pem issuer/")
        .await
        .unwrap();
}

pub(super) async fn upgrade(guide: &mut Guide) {
    const PAGE: &str = "how-to/upgrade.md";
    let n_reports_before = guide.begin_load().await;
    guide.run(PAGE, "2. Check, and save the values", 0).await;
    assert!(guide.read("values-before.yaml").contains("issuanceLifetime"));
    guide.run(PAGE, "3. Upgrade the custom resources", 0).await;
    guide.run(PAGE, "4. Upgrade the control plane", 0).await;
    let upgraded = guide.run(PAGE, "5. Upgrade the proxies", 0).await;
    assert!(upgraded.contains(env!("CARGO_PKG_VERSION")), "{upgraded}");
    guide.run(PAGE, "Undo", 0).await;
    guide.bash(ROLLED_OUT).await.unwrap();
    set_previous_revision(guide).await;
    guide.run(PAGE, "Undo", 1).await;
    guide
        .assert_no_failure_since(n_reports_before, "upgrade and rollback")
        .await;
}

/// Sets the value `revision` to the Helm revision before the current one.
async fn set_previous_revision(guide: &mut Guide) {
    let history = "helm history tulle-control-plane -n linkerd | tail -n 2 | head -n 1 | cut -f 1";
    let revision = guide.bash(history).await.unwrap().trim().to_owned();
    guide.values.insert("revision", revision);
}

/// An issuer and trust anchors that the chart does not render; the test does what cert-manager would do.
pub(super) async fn external_issuer(guide: &mut Guide) {
    const PAGE: &str = "how-to/cert-manager.md";
    let n_reports_before = guide.begin_load().await;
    let rendered = guide.run("how-to/gitops.md", "1. Check what is rendered", 0).await;
    assert!(rendered.contains("kind: Deployment"), "{rendered}");
    // The page: "do step 4 after step 1, with `--reuse-values` and without the wait, and steps 2 and 3 right after it".
    let install = guide.commands(PAGE, "4. Install the control plane", 0);
    let (install, wait) = install.split_once("kubectl rollout").expect("a wait");
    guide
        .bash(&format!("{} --reuse-values", install.trim_end()))
        .await
        .unwrap();
    let secret =
        "kubectl create secret tls linkerd-identity-issuer -n linkerd --cert=issuer/crt.pem --key=issuer/key.pem";
    guide.bash(secret).await.unwrap();
    guide.run(PAGE, "3. Create the ConfigMap of trust anchors", 0).await;
    let checked = guide.bash(&format!("kubectl rollout{wait}")).await.unwrap();
    assert!(!checked.contains('×'), "{checked}");
    guide.run("how-to/gitops.md", "Conflicts of server-side apply", 0).await;
    guide.bash(CONTROL_PLANE_ROLLED_OUT).await.unwrap();
    guide.run(PAGE, "Undo", 0).await;
    guide.run(PAGE, "Undo", 1).await;
    guide.bash(CONTROL_PLANE_ROLLED_OUT).await.unwrap();
    guide
        .assert_no_failure_since(n_reports_before, "an issuer of cert-manager")
        .await;
}

/// The installed tulle stands in for the Linkerd that the page replaces.
pub(super) async fn replace_linkerd(guide: &mut Guide) {
    const PAGE: &str = "how-to/replace-linkerd.md";
    let n_reports_before = guide.begin_load().await;
    guide.run(PAGE, "The proxies", 0).await;
    let look = guide.commands(PAGE, "The proxies", 1);
    let seen = guide
        .run_until_output_contains(&format!("trap 'kill $(jobs -p)' EXIT\n{look}"), "request_total")
        .await;
    assert!(seen.contains("proxy_build_info"), "{seen}");
    guide.run(PAGE, "The proxies", 2).await;
    guide.bash(ROLLED_OUT).await.unwrap();

    const HEADING: &str = "The control plane";
    guide.run(PAGE, HEADING, 0).await;
    let values = guide.yaml(PAGE, HEADING, 0);
    let saved = guide.read("tulle-values.yaml");
    guide.write("tulle-values.yaml", &merge(&saved, &values));
    let changes = guide.run(PAGE, HEADING, 1).await;
    assert!(changes.contains("linkerd-destination"), "{changes}");
    guide.run(PAGE, HEADING, 2).await;
    set_previous_revision(guide).await;
    guide.run(PAGE, HEADING, 3).await;
    guide
        .assert_no_failure_since(n_reports_before, "another proxy and control plane")
        .await;
}

/// Adds values to a values file.
fn merge(values: &str, added: &str) -> String {
    let [mut values, added]: [serde_json::Value; 2] =
        [values, added].map(|text| serde_yaml_ng::from_str(text).unwrap());
    json_patch::merge(&mut values, &added);
    serde_yaml_ng::to_string(&values).unwrap()
}

pub(super) async fn air_gapped(guide: &mut Guide) {
    const PAGE: &str = "how-to/air-gapped.md";
    let n_reports_before = guide.begin_load().await;
    let before = guide.read("values.yaml");
    let images = guide.yaml(PAGE, "2. Write your values", 0);
    // Still with three replicas: with one, the scheduler would leave the new pod pending, because the anti-affinity of the
    // three old pods keeps it from every node.
    let replicas = guide.read("tulle-control-plane/values-ha.yaml");
    let values = merge(&merge(&replicas, &before), &images);
    guide.write("values.yaml", &values);
    guide.run(PAGE, "2. Write your values", 0).await;
    guide.run(PAGE, "3. Install", 0).await;
    guide.bash(CONTROL_PLANE_ROLLED_OUT).await.unwrap();
    let checked = guide.run(PAGE, "4. Check the images", 0).await;
    assert!(
        checked.contains("ghcr.io/tulle-mesh/controller:0.1.0") && !checked.contains('×'),
        "{checked}"
    );
    guide
        .assert_no_failure_since(n_reports_before, "images of another registry")
        .await;
}

/// A second installation, by `tulle install`.
pub(super) async fn install_by_tulle(guide: &mut Guide) {
    guide.run("how-to/air-gapped.md", "3. Install", 1).await;
    guide.bash(CONTROL_PLANE_ROLLED_OUT).await.unwrap();
    guide
        .run("how-to/upgrade.md", "An installation by `tulle install`", 0)
        .await;
    let checked = guide.bash("tulle check").await.unwrap();
    assert!(!checked.contains('×'), "{checked}");
}
