//! Tests the Workload API as a process; every user of the machine may connect to its socket.

#![allow(clippy::unwrap_used)] // allowed in tests; clippy recognizes only functions with a test attribute

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::unistd::Uid;
use tulle_control::trust;

/// A Workload API process, killed on drop.
struct Server {
    dir: tempfile::TempDir,
    child: Child,
}

impl Server {
    /// Serves one user, with a low limit of descriptors.
    fn start(uid: u32, descriptors: u32) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME).unwrap();
        let issuer = trust::create_single_identity_issuer("spiffe://root/vm", trust::ISSUER_LIFETIME, &anchor).unwrap();
        std::fs::create_dir(at("issuer")).unwrap();
        anchor.write(&at("ca.crt"), &at("ca.key")).unwrap();
        issuer.write(&at("issuer/crt.pem"), &at("issuer/key.pem")).unwrap();
        let line = format!(
            "ulimit -n {descriptors}; exec {} trust serve-workload-api --identity spiffe://root/vm --uid {uid} \
             --issuer issuer --trust-anchors ca.crt --socket api.sock 2> errors",
            env!("CARGO_BIN_EXE_tulle")
        );
        let child = Command::new("sh")
            .args(["-c", &line])
            .current_dir(dir.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Self { dir, child };
        wait_until("the socket is served", || UnixStream::connect(server.socket()).is_ok());
        server
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("api.sock")
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
        stream
    }

    /// The error output of the process.
    fn errors(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("errors")).unwrap()
    }

    fn assert_runs(&mut self) {
        let ended = self.child.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?}: {}", self.errors());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn connections_of_an_unauthorized_user_are_closed_and_the_server_continues() {
    let mut server = Server::start(own_uid() + 1, 64);
    let mut idle: Vec<_> = (0..200).map(|_| server.connect()).collect();
    for stream in &mut idle {
        // The server serves a few of them for a second, so its HTTP/2 settings may arrive before the end.
        stream.read_to_end(&mut Vec::new()).unwrap();
    }
    server.assert_runs();
    assert_eq!(server.errors(), "");
}

#[test]
fn a_process_that_ran_out_of_descriptors_recovers() {
    let mut server = Server::start(own_uid(), 24);
    let idle: Vec<_> = (0..40).map(|_| server.connect()).collect();
    wait_until("the process runs out of descriptors", || {
        server.errors().contains("accepting a connection failed: ")
    });
    server.assert_runs();
    drop(idle);
    let mut stream = server.connect();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    stream.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).unwrap();
    let mut head = [0; 9];
    stream.read_exact(&mut head).unwrap();
    assert_eq!(head[3], 4, "no SETTINGS: {head:?}");
    server.assert_runs();
}

fn own_uid() -> u32 {
    Uid::current().as_raw()
}

fn wait_until(description: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if condition() {
            return;
        }
        sleep(Duration::from_millis(20));
    }
    panic!("the condition did not hold in time: {description}");
}

const WAIT_TIMEOUT: Duration = Duration::from_secs(20);
