//! A webhook's certificate from a mounted Secret, read again when Kubernetes swaps it.

use std::error::Error as StdError;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::{info, warn};
use tulle_core::drain::Watch;
use tulle_core::ready::Latch;

use super::certificate::{self, Pair};
use super::creds::Creds;
use crate::tls::files::{Changes, WatchError, Watched};

/// Keeps showing what the files say.
pub struct Mounted {
    paths: Paths,
    creds: Arc<Creds>,
    changes: Changes,
}

/// Where certificate and key are, both PEM.
#[derive(Clone, Debug)]
pub struct Paths {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Paths {
    /// Where the certificate of one webhook is mounted, if it is: in a directory of the webhook's name beside these
    /// files, or, for all webhooks of a process, in these files.
    pub fn of(&self, webhook: &str) -> Option<Self> {
        let own = Self {
            certificate: beside(&self.certificate, webhook),
            key: beside(&self.key, webhook),
        };
        [own, self.clone()].into_iter().find(|paths| paths.certificate.exists())
    }
}

/// `dir/file` becomes `dir/name/file`.
fn beside(file: &Path, name: &str) -> PathBuf {
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
    #[error("{certificate:?} and {key:?} are not usable")]
    Pair {
        certificate: PathBuf,
        key: PathBuf,
        #[source]
        source: certificate::Error,
    },
    #[error("installing the certificate")]
    Install(#[source] rustls::Error),
}

impl Mounted {
    /// Watches both files, whose directories must exist.
    ///
    /// # Errors
    /// Directories that cannot be watched.
    pub fn watch(paths: Paths, creds: Arc<Creds>) -> Result<Self, WatchError> {
        let changes = Changes::watch(&[Watched::File(&paths.certificate), Watched::File(&paths.key)])?;
        Ok(Self { paths, creds, changes })
    }

    /// Reads until the drain; the latch goes with the first certificate, and a bad one leaves the last.
    pub async fn run(mut self, latch: Latch, drain: Watch) {
        let mut latch = Some(latch);
        let mut shown = None;
        loop {
            match self.load(shown.as_ref()) {
                Ok(None) => {}
                Ok(Some(pair)) => {
                    info!(path = ?self.paths.certificate, until = %pair.not_after, "showing a certificate");
                    shown = Some(pair);
                    latch.take();
                }
                Err(err) => warn!(error = &err as &dyn StdError, "a webhook's certificate is not usable"),
            }
            tokio::select! {
                () = drain.signaled() => return,
                () = self.changes.next() => {}
            }
        }
    }

    /// Installs what the files say, if it is something else.
    fn load(&self, shown: Option<&Pair>) -> Result<Option<Pair>, LoadError> {
        let Paths { certificate, key } = &self.paths;
        let pair = Pair::parse(&read(certificate)?, &read(key)?).map_err(|source| LoadError::Pair {
            certificate: certificate.clone(),
            key: key.clone(),
            source,
        })?;
        if shown == Some(&pair) {
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
    fn a_webhook_has_a_certificate_of_its_own_or_shares_one() {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths {
            certificate: dir.path().join("tls.crt"),
            key: dir.path().join("tls.key"),
        };
        let found = |webhook| paths.of(webhook).map(|paths| paths.key);
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
