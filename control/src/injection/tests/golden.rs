//! Compares whole patches byte by byte with the files in `control/tests/injection/`.
//!
//! To write the files again: `TULLE_BLESS=1 cargo nextest run -p tulle-control golden`.

use std::path::PathBuf;
use std::{env, fs};

use super::*;

#[test]
fn whole_patches_are_as_recorded() {
    let everything = Case::pod("metadata: {labels: {app: web}}")
        .values(
            "{cniEnabled: true, disableIPv6: false, debugContainer: {image: {name: cr.l5d.io/linkerd/debug}}, proxy: {nativeSidecar: false, waitBeforeExitSeconds: 5, gid: 2103, \
             resources: {cpu: {request: 100m, limit: 1}, memory: {limit: 250Mi}}, \
             tracing: {enabled: true, collector: {endpoint: 'collector:4317', \
             meshIdentity: {serviceAccountName: collector, namespace: obs}}}}}",
        )
        .namespace(&[
            ("config.linkerd.io/opaque-ports", "3306"),
            ("config.linkerd.io/access-log", "json"),
        ])
        .annotate(&[
            ("linkerd.io/inject", "ingress"),
            ("config.linkerd.io/enable-debug-sidecar", "true"),
        ])
        .owner("statefulset", "web");
    let bare = Case::pod("{metadata: {annotations: null}, spec: {volumes: null, containers: [{name: app, image: a}]}}")
        .namespace(&[("linkerd.io/inject", "enabled")]);
    for (name, case) in [
        ("usual", Case::pod("").owner("deployment", "web")),
        ("everything", everything),
        ("bare", bare),
    ] {
        let outcome = case.outcome();
        case.patched(&outcome);
        let mut patch = serde_json::to_string_pretty(&outcome.patch).unwrap();
        patch.push('\n');
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/injection/{name}.json"));
        if env::var_os("TULLE_BLESS").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &patch).unwrap();
        }
        assert_eq!(patch, fs::read_to_string(&path).unwrap(), "{}", path.display());
    }
}
