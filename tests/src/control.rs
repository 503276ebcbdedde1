//! The control plane of a mesh: the real one, with a directory of manifests as its source.

use std::ffi::OsString;
use std::fs;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tulle_control::app::App;
use tulle_control::cmd::Command;
use tulle_control::config::Config;
use tulle_control::trust::{self, CertificateAuthority, TokenKeys, TokenSubject};

pub const CONTROL_IP: Ipv4Addr = Ipv4Addr::new(10, 66, 0, 1);
/// Namespace of the control plane in identities.
pub const CONTROL_NS: &str = "linkerd";

/// The files that the control plane of a [`Mesh`](crate::mesh::Mesh) reads: credentials and manifests. Tests that start the shipped
/// binaries use [`Credentials`](crate::credentials::Credentials).
pub struct ControlPlaneFiles {
    dir: tempfile::TempDir,
    keys: TokenKeys,
    /// The CA that all proxies trust from the start.
    pub anchor: CertificateAuthority,
    /// The certificate of `anchor`, as the bundle that proxies start with (PEM).
    pub anchors: String,
}

impl ControlPlaneFiles {
    /// Creates new credentials and no manifests.
    ///
    /// # Errors
    /// Fails if the temporary directory cannot be written.
    pub fn new() -> anyhow::Result<Self> {
        let keys = trust::create_token_keys()?;
        let anchor = trust::create_anchor("root", trust::ANCHOR_LIFETIME)?;
        let issuer = trust::create_issuer("issuer", trust::ISSUER_LIFETIME, &anchor)?;
        let files = Self {
            dir: tempfile::tempdir()?,
            keys,
            anchors: anchor.certificate.clone(),
            anchor: anchor.clone(),
        };
        for name in ["issuer", "keys", "manifests", "tokens"] {
            fs::create_dir(files.path(name))?;
        }
        anchor.write(&files.path("ca.crt"), &files.path("ca.key"))?;
        issuer.write(&files.path("issuer/crt.pem"), &files.path("issuer/key.pem"))?;
        files
            .keys
            .write(&files.path("keys/join.pub"), &files.path("join.key"))?;
        Ok(files)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Replaces the trust anchors (PEM) that the control plane reads.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn replace_anchors(&self, bundle: &str) -> anyhow::Result<()> {
        self.replace("ca.crt", bundle)
    }

    /// Replaces the issuer of the control plane.
    ///
    /// # Errors
    /// Fails if the files cannot be written.
    pub fn replace_issuer(&self, issuer: &CertificateAuthority) -> anyhow::Result<()> {
        self.replace("issuer/key.pem", &issuer.key)?;
        self.replace("issuer/crt.pem", &issuer.certificate)
    }

    /// Replaces a file atomically.
    fn replace(&self, name: &str, text: &str) -> anyhow::Result<()> {
        let partial = self.path("partial");
        fs::write(&partial, text)?;
        Ok(fs::rename(partial, self.path(name))?)
    }

    /// Writes a manifest, or replaces it atomically.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, name: &str, yaml: &str) -> anyhow::Result<()> {
        let partial = self.path("partial");
        fs::write(&partial, yaml)?;
        Ok(fs::rename(partial, self.manifest(name))?)
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// Fails if the manifest does not exist.
    pub fn read(&self, name: &str) -> anyhow::Result<String> {
        Ok(fs::read_to_string(self.manifest(name))?)
    }

    /// Removes a manifest.
    ///
    /// # Errors
    /// Fails if the manifest does not exist.
    pub fn remove(&self, name: &str) -> anyhow::Result<()> {
        Ok(fs::remove_file(self.manifest(name))?)
    }

    fn manifest(&self, name: &str) -> PathBuf {
        self.path("manifests").join(format!("{name}.yaml"))
    }

    /// Writes a file with a join token for a workload of one service account.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn create_token_file(&self, workload: &str, service_account: &str, namespace: &str) -> anyhow::Result<PathBuf> {
        let subject = TokenSubject {
            service_account,
            namespace,
            lifetime: Duration::from_secs(3600),
        };
        let path = self.path("tokens").join(workload);
        fs::write(&path, trust::create_token(&self.keys.private, &subject)?)?;
        Ok(path)
    }
}

/// A control plane on its own thread. Dropping it stops it.
pub struct ControlPlane {
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ControlPlane {
    /// Starts all services at [`CONTROL_IP`], with `flags` in addition to those for the files.
    ///
    /// # Errors
    /// Fails if the control plane refuses its flags or files.
    pub fn start(files: &ControlPlaneFiles, flags: &[String]) -> anyhow::Result<Self> {
        let mut line: Vec<OsString> = vec!["tulle-control".into(), "all-in-one".into()];
        for (flag, name) in [
            ("--manifests", "manifests"),
            ("--trust-anchors", "ca.crt"),
            ("--issuer", "issuer"),
            ("--token-keys", "keys"),
        ] {
            line.extend([flag.into(), files.path(name).into()]);
        }
        for (flag, port) in [
            ("destination", 8086),
            ("identity", 8080),
            ("grpc", 8090),
            ("metrics", 9996),
            ("admin", 9990),
        ] {
            line.push(format!("--{flag}-addr={CONTROL_IP}:{port}").into());
        }
        line.push("--cluster-domain=cluster.local".into());
        line.extend(flags.iter().map(OsString::from));
        let command = Command::parse_from_line(line).context("flags of the control plane")?;
        let config = Config::from_command(&command)?;
        let (end_tx, end_rx) = oneshot::channel();
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let mut app = runtime.block_on(App::build(config))?;
        let thread = thread::Builder::new().name("control".into()).spawn(move || {
            runtime.block_on(async {
                let end = async {
                    // An error means that the sender was dropped, which also means the end.
                    let _ = end_rx.await;
                    Ok(())
                };
                if let Err(error) = app.run_until(end).await {
                    panic!("the control plane ended: {error:#}");
                }
                app.drain().await;
            });
        })?;
        Ok(Self {
            end: Some(end_tx),
            thread: Some(thread),
        })
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        drop(self.end.take());
        let ended = self.thread.take().map(JoinHandle::join);
        if matches!(ended, Some(Err(_))) && !thread::panicking() {
            panic!("the control plane panicked");
        }
    }
}
