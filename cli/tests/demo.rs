//! Runs the demo with the built binaries in network namespaces, from start to cleanup.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::Duration;

/// The command, or `None` if this machine or build cannot run the demo. In CI, that is a failure.
fn tulle() -> Option<Command> {
    let tulle = PathBuf::from(env!("CARGO_BIN_EXE_tulle"));
    let beside = |name: &str| tulle.with_file_name(name).exists();
    let programs = ["tulle-proxy", "tulle-init", "tulle-control", "tulle-bench"];
    let missing = if !programs.into_iter().all(beside) {
        Some("build all binaries first (cargo build --workspace --bins)")
    } else if !nix::unistd::Uid::effective().is_root() {
        Some("the test lists the namespaces of the whole machine, which requires root")
    } else {
        None
    };
    if let Some(missing) = missing {
        assert!(std::env::var_os("CI").is_none(), "{missing}");
        eprintln!("SKIPPED: {missing}");
        return None;
    }
    let mut command = Command::new(tulle);
    command.arg("demo").stdin(Stdio::null());
    Some(command)
}

/// The namespaces, files and processes that a demo with this process id has left behind.
fn list_leftovers(demo_pid: u32) -> Vec<String> {
    let names = |dir: &str| -> Vec<String> {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    };
    let namespace = format!("tulle-demo-{demo_pid}-");
    let run = format!("/tmp/tulle-demo-0/{demo_pid}");
    let mut left: Vec<_> = names("/run/netns")
        .into_iter()
        .filter(|name| name.starts_with(&namespace))
        .collect();
    left.extend(Path::new(&run).exists().then(|| run.clone()));
    for pid in names("/proc") {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if line.starts_with(run.as_bytes()) {
            left.push(format!("process {pid}: {}", String::from_utf8_lossy(&line)));
        }
    }
    left
}

fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..600 {
        if condition() {
            return;
        }
        sleep(Duration::from_millis(100));
    }
    panic!("the condition did not hold within a minute: {description}");
}

/// Starts the demo and waits until its last sidecar is started.
fn start_demo() -> Option<Child> {
    let child = tulle()?
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary is built");
    let sidecar = format!("/tmp/tulle-demo-0/{}/logs/tcp-sidecar.log", child.id());
    wait_until("the last sidecar is started", || Path::new(&sidecar).exists());
    Some(child)
}

fn wait_for_exit(mut child: Child) -> (u32, ExitStatus) {
    let mut status = None;
    wait_until("the demo ends", || {
        status = child.try_wait().expect("the child has not been reaped");
        status.is_some()
    });
    (child.id(), status.expect("the child has exited"))
}

fn signal(child: &Child, signal: nix::sys::signal::Signal) {
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    nix::sys::signal::kill(pid, signal).expect("the demo is running");
}

#[test]
fn only_permitted_traffic_passes_and_the_demo_leaves_nothing_behind() {
    let Some(mut command) = tulle() else { return };
    let child = command
        .args(["--once", "8", "--output", "json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let problems = json["problems"]
        .as_array()
        .unwrap()
        .iter()
        .map(|problem| problem.as_str().unwrap());
    // On a busy machine, every replica can be slow, and requests can remain unsent because all connections are busy. Tests with
    // simulated time check how requests are distributed to replicas.
    let problems: Vec<_> = problems
        .filter(|problem| !problem.starts_with("slow replica") && !problem.contains("requests were not sent"))
        .collect();
    assert_eq!(problems, Vec::<&str>::new());
    if !output.status.success() {
        // The logs of a failed run are kept until another demo starts.
        let _ = std::fs::remove_dir_all(format!("/tmp/tulle-demo-0/{pid}"));
    }
    assert_eq!(json["edges"].as_array().unwrap().len(), 7);
    assert_eq!(list_leftovers(pid), Vec::<String>::new());
}

#[test]
fn a_terminated_demo_leaves_nothing_behind() {
    let Some(child) = start_demo() else { return };
    signal(&child, nix::sys::signal::Signal::SIGTERM);
    let (pid, _) = wait_for_exit(child);
    assert_eq!(list_leftovers(pid), Vec::<String>::new());
}

#[test]
fn a_killed_demo_leaves_nothing_behind() {
    let Some(child) = start_demo() else { return };
    signal(&child, nix::sys::signal::Signal::SIGKILL);
    let (pid, _) = wait_for_exit(child);
    wait_until("leftovers are removed", || list_leftovers(pid).is_empty());
}

#[test]
fn invalid_manifests_are_reported_before_the_demo_starts() {
    let Some(mut command) = tulle() else { return };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("mesh.yaml"), "kind: Service\n").unwrap();
    let output = command.arg("--manifests").arg(dir.path()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains("mesh.yaml"), "{stderr}");
}
