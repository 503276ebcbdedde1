//! A webhook certificate from a mounted Secret, read again when Kubernetes updates it.

use std::error::Error as StdError;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::{info, warn};
use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Latch;

use super::certificate::{self, CertificateKeyPair};
use super::server_credentials::ServerCredentials;
use crate::tls::file_watcher::{FileWatcher, WatchError, WatchPath};
use crate::tls::unserved_files::UnservedFiles;

/// Serves a certificate that is read from two mounted files.
pub struct MountedCertificate {
    paths: Paths,
    creds: Arc<ServerCredentials>,
    changes: FileWatcher,
    unserved: UnservedFiles,
}

/// Paths of certificate and key, both PEM.
#[derive(Clone, Debug)]
pub struct Paths {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Paths {
    /// For the paths `/a/tls.crt` and `/a/tls.key`, returns `/a/<webhook>/tls.crt` and `/a/<webhook>/tls.key` if that certificate
    /// exists, otherwise the paths themselves if their certificate exists, otherwise `None`.
    pub fn find_for_webhook(&self, webhook: &str) -> Option<Self> {
        let webhook_paths = Self {
            certificate: in_subdirectory(&self.certificate, webhook),
            key: in_subdirectory(&self.key, webhook),
        };
        [webhook_paths, self.clone()]
            .into_iter()
            .find(|paths| paths.certificate.exists())
    }
}

/// Returns `dir/name/file` for `dir/file`.
fn in_subdirectory(file: &Path, name: &str) -> PathBuf {
    let mut path = file.with_file_name(name);
    path.extend(file.file_name());
    path
}

#[derive(Debug, thiserror::Error)]
enum LoadError {
    #[error("reading {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{certificate:?} and {key:?} are invalid")]
    Pair {
        certificate: PathBuf,
        key: PathBuf,
        #[source]
        source: certificate::Error,
    },
    #[error("installing the certificate")]
    Install(#[source] rustls::Error),
}

impl MountedCertificate {
    /// Watches both files. Their directories must exist.
    ///
    /// # Errors
    /// Fails if a directory cannot be watched.
    pub fn watch(paths: Paths, creds: Arc<ServerCredentials>, registry: &Registry) -> Result<Self, WatchError> {
        let changes = FileWatcher::watch(&[WatchPath::File(&paths.certificate), WatchPath::File(&paths.key)])?;
        Ok(Self {
            paths,
            creds,
            changes,
            unserved: UnservedFiles::new(registry, "certificate"),
        })
    }

    /// Reads the files until the drain. The first certificate releases the latch; an invalid one leaves the previous
    /// one, and is counted in `unserved_configuration` until it is valid.
    pub async fn run(mut self, latch: Latch, drain: Watch) {
        let mut latch = Some(latch);
        let mut served = None;
        loop {
            let loaded = self.load(served.as_ref());
            self.unserved.set(loaded.is_err().then_some(&*self.paths.certificate));
            match loaded {
                Ok(None) => {}
                Ok(Some(pair)) => {
                    info!(path = ?self.paths.certificate, until = %pair.not_after, "serving a certificate");
                    served = Some(pair);
                    latch.take();
                }
                Err(err) => warn!(
                    error = &err as &dyn StdError,
                    "the mounted certificate is invalid; the previous one stays"
                ),
            }
            tokio::select! {
                () = drain.signaled() => return,
                () = self.changes.wait_for_change() => {}
            }
        }
    }

    /// Installs the certificate if it has changed.
    fn load(&self, served: Option<&CertificateKeyPair>) -> Result<Option<CertificateKeyPair>, LoadError> {
        let Paths { certificate, key } = &self.paths;
        let pair = CertificateKeyPair::parse(&read(certificate)?, &read(key)?).map_err(|source| LoadError::Pair {
            certificate: certificate.clone(),
            key: key.clone(),
            source,
        })?;
        if served == Some(&pair) {
            return Ok(None);
        }
        self.creds.install(&pair).map_err(LoadError::Install)?;
        Ok(Some(pair))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, LoadError> {
    fs::read(path).map_err(|source| LoadError::Read {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_webhook_has_its_own_certificate_or_the_shared_one() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            certificate: dir.path().join("tls.crt"),
            key: dir.path().join("tls.key"),
        };
        let found = |webhook| paths.find_for_webhook(webhook).map(|paths| paths.key);
        assert_eq!(found("web"), None);
        fs::create_dir(dir.path().join("web")).unwrap();
        fs::write(dir.path().join("web/tls.crt"), "").unwrap();
        assert_eq!(found("web"), Some(dir.path().join("web/tls.key")));
        assert_eq!(found("other"), None);
        fs::write(&paths.certificate, "").unwrap();
        assert_eq!(found("other"), Some(paths.key.clone()));
        assert_eq!(found("web"), Some(dir.path().join("web/tls.key")));
    }
}
