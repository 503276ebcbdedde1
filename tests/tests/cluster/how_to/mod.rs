//! Runs the commands of `docs/how-to` as they are written, except for the replacements in `replaced.rs`, and checks the results
//! that the pages describe.

mod guide;
mod hosts;
mod objects;
mod operate;
mod pages;
mod policy;
mod replaced;

use tokio::time::Instant;
use tulle_tests::cluster::Cluster;

use self::guide::{Guide, ROLLED_OUT};
use self::objects::APPLICATION;
use self::pages::Run;

/// Follows the pages in the order in which an operator needs them. The cluster has three nodes, because `install.md` requires
/// them.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_follows_the_how_to_pages() {
    let begun = Instant::now();
    let mut guide = Guide::new(Cluster::start(3).await.unwrap());
    let done = |what: &str| eprintln!("{:6.1?} since the start: {what}", begun.elapsed());
    done("cluster");
    install(&mut guide).await;
    done("install.md");
    policy::enforce(&mut guide).await;
    done("policy.md, steps 1 to 4");
    policy::debug(&mut guide).await;
    done("debug-a-request.md");
    policy::refine(&mut guide).await;
    policy::undo(&guide).await;
    done("policy.md");
    operate::monitor(&mut guide).await;
    done("monitoring.md");
    operate::rotate_issuer(&mut guide).await;
    operate::rotate_anchor(&mut guide).await;
    done("rotate-trust.md");
    operate::upgrade(&mut guide).await;
    done("upgrade.md");
    operate::external_issuer(&mut guide).await;
    done("cert-manager.md, gitops.md");
    operate::replace_linkerd(&mut guide).await;
    done("replace-linkerd.md");
    operate::air_gapped(&mut guide).await;
    done("air-gapped.md");
    uninstall(&mut guide).await;
    done("undo of install.md");
    operate::install_by_tulle(&mut guide).await;
    done("tulle install");
    guide.assert_complete(&pages::planned(Run::OnCluster));
}

async fn install(guide: &mut Guide) {
    const PAGE: &str = "how-to/install.md";
    guide.apply(APPLICATION).await;
    let checked = guide.run(PAGE, "1. Check the cluster", 0).await;
    assert_eq!(checked.lines().last(), Some("Status check results are √"), "{checked}");
    guide.run(PAGE, "2. Create trust anchor and issuer", 0).await;
    guide
        .bash("ls ca.crt ca.key issuer/crt.pem issuer/key.pem")
        .await
        .unwrap();
    guide.run(PAGE, "3. Install the custom resources", 0).await;
    let values = guide.yaml(PAGE, "4. Write your values", 0);
    // Certificates are renewed after half a minute, so that waits for this do not take a day.
    guide.write(
        "values.yaml",
        &(values + "identity: {issuer: {issuanceLifetime: 30s}}\n"),
    );
    guide.run(PAGE, "5. Install the control plane", 0).await;
    let nodes = "kubectl get pods -n linkerd -l linkerd.io/control-plane-component=destination \
                 -o jsonpath='{range .items[*]}{.spec.nodeName}{\"\\n\"}{end}' | sort | tr '\\n' ' '";
    assert_eq!(guide.bash(nodes).await.unwrap(), "node1 node2 node3 ");
    let checked = guide.run(PAGE, "6. Check the control plane", 0).await;
    assert!(!checked.contains('×'), "{checked}");
    // The commands from `tulle check` on need the new pods, so the rollout is awaited first.
    let mesh = guide.commands(PAGE, "7. Mesh a namespace", 0);
    let (mesh, check) = mesh.split_once("tulle check").expect("a check");
    guide.bash(mesh).await.unwrap();
    guide.bash(ROLLED_OUT).await.unwrap();
    let edges = guide
        .run_until_output_contains(&format!("tulle check{check}"), "other")
        .await;
    assert!(!edges.contains('×'), "{edges}");
}

async fn uninstall(guide: &mut Guide) {
    guide.bash("kubectl delete namespace steady plain").await.unwrap();
    guide.run("how-to/install.md", "Undo", 0).await;
    guide.bash(ROLLED_OUT).await.unwrap();
    let containers = "kubectl get pods -n shop -o jsonpath='{.items[*].spec.initContainers[*].name}'";
    assert_eq!(guide.bash(containers).await.unwrap(), "");
    let definitions = guide.bash("kubectl get crd -o name").await.unwrap();
    assert!(!definitions.contains("linkerd.io"), "{definitions}");
    assert!(definitions.contains("gateway.networking.k8s.io"), "{definitions}");
}
