//! Trust anchor rotation in a running mesh: no restart and no failure.

use std::cell::{Cell, RefCell};

use futures_util::future::join;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tulle_control::trust;
use tulle_tests::apps;
use tulle_tests::eventually::eventually;
use tulle_tests::mesh::{HTTP, Mesh, OPAQUE, mesh};

/// Proxies start with the trust anchors of a variable, as injected proxies do, and get new anchors from the control plane.
#[test]
fn trust_anchors_are_rotated_by_an_overlapping_bundle_without_a_restart_or_a_failed_connection() {
    mesh()
        .flag("--identity-issuance-lifetime=1m")
        .flag("--identity-clock-skew-allowance=1s")
        .env("IDENTITY_MIN_REFRESH", "300ms")
        .env("IDENTITY_MAX_REFRESH", "300ms")
        .workload("client")
        .workload("web")
        .run(async |mesh: &Mesh| {
            apps::start_echo(mesh, "web").await;
            let (failures, n_ok, ended) = (RefCell::new(Vec::new()), Cell::new(0), Cell::new(false));
            let load = async {
                while !ended.get() {
                    match echo(mesh).await {
                        Ok(()) => n_ok.set(n_ok.get() + 1),
                        Err(error) => failures.borrow_mut().push(error.to_string()),
                    }
                }
            };
            let rotation = async {
                rotate(mesh).await;
                ended.set(true);
            };
            join(load, rotation).await;
            let failures = failures.into_inner();
            assert!(
                failures.is_empty() && n_ok.get() > 0,
                "{} of {}: {failures:?}",
                failures.len(),
                n_ok.get()
            );
            assert_eq!(
                mesh.get("client", mesh.service_addr("web", HTTP), "/").await.status,
                200
            );
        });
}

/// Rotation in three steps: both anchors, an issuer signed by the new one, then only the new one. Each step waits until
/// all proxies know the previous one.
async fn rotate(mesh: &Mesh) {
    let files = mesh.files();
    let new = trust::create_anchor("new", trust::ANCHOR_LIFETIME).expect("the lifetime is valid");
    files
        .replace_anchors(&[files.anchors.as_str(), &new.certificate].concat())
        .expect("the directory is writable");
    wait_for_renewal(mesh).await;
    let issuer = trust::create_issuer("new", trust::ISSUER_LIFETIME, &new).expect("the anchor is valid");
    files.replace_issuer(&issuer).expect("the directory is writable");
    wait_for_renewal(mesh).await;
    files
        .replace_anchors(&new.certificate)
        .expect("the directory is writable");
    wait_for_renewal(mesh).await;
}

/// Waits until every proxy has renewed its certificate after the control plane has read the change.
///
/// Of three renewals, the first may have started before the change and the second before the change was read.
async fn wait_for_renewal(mesh: &Mesh) {
    let ok = [r#"result="ok""#];
    for workload in ["client", "web"] {
        let before = mesh.metric(workload, REFRESHES, &ok).await;
        eventually("three renewals", async || {
            (mesh.metric(workload, REFRESHES, &ok).await >= before + 3.).then_some(())
        })
        .await;
    }
}

/// One connection through both proxies with opaque bytes, so that each connection has its own handshake between proxies.
async fn echo(mesh: &Mesh) -> std::io::Result<()> {
    let mut stream = mesh.dial("client", mesh.service_addr("web", OPAQUE)).await;
    stream.write_all(b"ping").await?;
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes).await?;
    assert_eq!(&bytes, b"ping");
    Ok(())
}

const REFRESHES: &str = "control_identity_cert_refreshes_total";
