//! Compares the manifests that `tulle multicluster` prints byte by byte with the files in `tests/tests/charts/multicluster_commands/`.
//!
//! To write the files again: `TULLE_BLESS=1 ./run with cargo nextest run -p tulle-tests --test charts printed_manifests`, after
//! `cargo build --workspace --bins`, because the program contains the charts.

use std::{env, fs};

use tokio::process::Command;
use tulle_tests::{commands, programs};

#[tokio::test]
async fn printed_manifests_are_as_recorded() {
    for (name, line) in [
        ("install", "install --ignore-cluster"),
        (
            "install-ha",
            "install --ignore-cluster --ha --set controllers[0].link.ref.name=east",
        ),
        ("allow", "allow --ignore-cluster --service-account-name west"),
    ] {
        let mut tulle = Command::new(programs::built_binary("tulle").unwrap());
        tulle
            .arg("multicluster")
            .args(line.split(' '))
            .env("KUBECONFIG", "/dev/null")
            .env("PATH", programs::search_path());
        let output = commands::output(line, tulle).await.unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{line}: {error}");
        // A release changes only the version.
        let text = String::from_utf8(output.stdout).unwrap();
        let text = text.replace(env!("CARGO_PKG_VERSION"), "VERSION");
        compare(name, &text);
    }
}

fn compare(name: &str, text: &str) {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/charts/multicluster_commands");
    let path = format!("{dir}/{name}.yaml");
    if env::var_os("TULLE_BLESS").is_some() {
        fs::create_dir_all(dir).unwrap();
        fs::write(&path, text).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    for (at, (expected, found)) in expected.lines().zip(text.lines()).enumerate() {
        assert_eq!(found, expected, "{path}:{}", at + 1);
    }
    assert_eq!(text.len(), expected.len(), "{path} has more or fewer lines");
}
