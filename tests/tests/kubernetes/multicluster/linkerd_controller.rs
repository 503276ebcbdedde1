//! Linkerd's program `controller` in processes of their own: its service mirror and its destination service.

use std::process::Command;

use tulle_bench::run::process::Process;
use tulle_tests::linkerd::Linkerd;
use tulle_tests::programs::find;

use super::*;

/// The program, in the directory that `TULLE_TEST_LINKERD` names.
pub(super) struct LinkerdController {
    path: PathBuf,
    version: Vec<u32>,
}

impl LinkerdController {
    pub(super) async fn from_env() -> Self {
        let linkerd = Linkerd::from_env().unwrap();
        Self {
            path: linkerd.controller(),
            version: linkerd.controller_version().await.unwrap(),
        }
    }

    /// Whether it is older than the edge version with these numbers.
    pub(super) fn is_before(&self, version: [u32; 3]) -> bool {
        self.version.as_slice() < version.as_slice()
    }

    /// Starts a subcommand, as administrator of a cluster. `holder` names the process, and the holder of its lease: the next process
    /// of the same name does not wait for the lease.
    pub(super) fn start(&self, subcommand: &str, holder: &str, server: &ApiServer, args: &[String]) -> LinkerdProcess {
        // The kernel kills the process with the test.
        let mut command = Command::new(find("setpriv").unwrap());
        command
            .arg("--pdeathsig=KILL")
            .arg(&self.path)
            .arg(subcommand)
            .arg(format!("-kubeconfig={}", server.kubeconfig().display()))
            .arg("-metrics-addr=127.0.0.1:0")
            .args(args)
            .env("HOSTNAME", holder);
        LinkerdProcess(Process::start(holder, command, server.dir()).unwrap())
    }
}

/// A process of the program. Dropping it ends it.
pub(super) struct LinkerdProcess(Process);

impl Drop for LinkerdProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: {}", self.0.name(), self.0.log_tail());
        }
    }
}
