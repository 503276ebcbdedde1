//! The mesh of `without-kubernetes.md`, with `explicit-proxy.md` on one of its hosts.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt as _;

use tokio::process::Command;
use tulle_tests::{commands, programs};

use super::pages::{self, Id, Run};

const TUTORIAL: &str = "tutorials/without-kubernetes.md";
const EXPLICIT: &str = "how-to/explicit-proxy.md";

/// In namespaces of its own, because the page sets the names of the hosts, and this machine may use the same names.
#[tokio::test]
async fn a_mesh_without_kubernetes_is_built_and_used_without_redirects_as_the_pages_say() {
    let files = tempfile::tempdir().unwrap();
    // Proxies run as another user.
    fs::set_permissions(files.path(), Permissions::from_mode(0o755)).unwrap();
    let bin = files.path().join("bin");
    fs::create_dir(&bin).unwrap();
    for program in ["tulle", "tulle-control", "tulle-init", "tulle-proxy"] {
        programs::install(program, &bin).unwrap();
    }
    let mut script = vec!["set -x; mount -t tmpfs tmpfs /run; mkdir -p /run/netns".to_owned()];
    let mut run: BTreeSet<Id> = BTreeSet::new();
    let steps = pages::commands(TUTORIAL);
    let (clean_up, steps): (Vec<_>, Vec<_>) = steps
        .into_iter()
        .partition(|((_, heading, _), _)| heading == "9. Clean up");
    for (id, text) in steps {
        script.push(format!("echo '=== {}'\n{text}", id.1));
        run.insert(id);
    }
    let mut explicit = pages::commands(EXPLICIT).into_iter();
    let (id, variable) = explicit.next().unwrap();
    run.insert(id);
    script.push(RESTART.replace("@variable", variable.trim()));
    for (id, text) in explicit {
        // The address of the Service in the tutorial.
        let text = text.replace("10.43.0.17", "10.96.0.10");
        // The heading begins with the number of the step.
        let step = id.1.as_bytes()[0] - b'0';
        script.push(format!(
            "ip netns exec client bash -euo pipefail >explicit-{step} <<'EOF'\n{text}EOF"
        ));
        run.insert(id);
    }
    for (id, text) in clean_up {
        script.push(text);
        run.insert(id);
    }
    script.push("! ip link show mesh".to_owned());

    let path = std::env::var("PATH").unwrap();
    let mut bash = Command::new("setpriv");
    bash.args(["--pdeathsig=KILL", "unshare"])
        .args([
            "--net",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
        ])
        .current_dir(files.path())
        .env("PATH", format!("{}:{path}:/usr/sbin:/sbin", bin.display()));
    let stdout = commands::run_script(bash, &script.join("\n")).await.unwrap();
    assert!(stdout.contains("client_id=\"client.shop"), "{stdout}");
    assert!(
        stdout.contains("policy-denied: No authorization permits this client."),
        "{stdout}"
    );
    let read = |file: &str| fs::read_to_string(files.path().join(file)).unwrap();
    assert_eq!(
        read("explicit-2").matches("Directory listing").count(),
        8,
        "{}",
        read("explicit-2")
    );
    assert!(read("explicit-3").contains("web.shop"), "{}", read("explicit-3"));
    assert_eq!(run, pages::planned(Run::OnHosts));
}

/// Starts the sidecar of `client` again with a further variable.
const RESTART: &str = "
echo '@variable' >>client.env
sidecar=$(ip netns pids client)
kill $sidecar
wait $sidecar || true
(set -a; . ./client.env; exec ip netns exec client setpriv --reuid=2102 --regid=2102 --clear-groups tulle-proxy) >client.log 2>&1 &
until ip netns exec client curl -sf localhost:4191/ready; do sleep 0.1; done
";
