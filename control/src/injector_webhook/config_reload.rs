//! The configuration of injection from files: the chart's values and the trust anchors. It is reloaded when the files change.
//!
//! Both are mounted from ConfigMaps, which the kubelet updates by replacing the whole directory.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwap;
use k8s_openapi::api::core::v1::ObjectReference;
use tokio::fs;
use tracing::{info, warn};
use tulle_core::drain::Watch;
use tulle_core::metrics::Registry;

use crate::injection::values::{Values, ValuesError};
use crate::injection::{Config, InjectionOrigin};
use crate::kubernetes::event_recorder::{EventNote, EventRecorder, Severity};
use crate::tls::file_watcher::{FileWatcher, WatchError, WatchPath};
use crate::tls::unserved_files::UnservedFiles;

/// The files of the configuration, and the control plane's namespace, which the files do not contain.
#[derive(Clone, Debug)]
pub struct Files {
    /// The chart's values in YAML: the key `values` of ConfigMap `linkerd-config`.
    pub values: PathBuf,
    /// Trust anchors in PEM. If this file exists, it overrides the value `identityTrustAnchorsPEM`.
    pub trust_anchors: PathBuf,
    pub control_plane_namespace: String,
}

#[cfg(test)]
impl Files {
    /// The files that a test writes to this directory.
    pub(super) fn in_dir(dir: &Path) -> Self {
        Self {
            values: dir.join("values"),
            trust_anchors: dir.join("ca.crt"),
            control_plane_namespace: "linkerd".to_owned(),
        }
    }
}

/// The current configuration of injection. Clones share it.
#[derive(Clone)]
pub(super) struct CurrentConfig {
    current: Arc<ArcSwap<Config>>,
}

/// Reloads the configuration when the files change.
pub struct ConfigReloader {
    files: Files,
    current_config: CurrentConfig,
    changes: FileWatcher,
    recorder: EventRecorder,
    unserved: UnservedFiles,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    #[error("reading {path:?}")]
    Read {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("reading the values in {path:?}")]
    Values {
        path: PathBuf,
        #[source]
        source: ValuesError,
    },
    #[error("no trust anchors: create the file {0:?} or set the value identityTrustAnchorsPEM")]
    NoTrustAnchors(PathBuf),
    #[error(transparent)]
    Watch(#[from] WatchError),
}

impl CurrentConfig {
    pub(super) fn get(&self) -> Arc<Config> {
        self.current.load_full()
    }
}

/// Reads the files for the first time.
///
/// # Errors
/// Fails if a file is missing or invalid.
pub(super) async fn open(
    files: Files,
    recorder: EventRecorder,
    registry: &Registry,
) -> Result<(CurrentConfig, ConfigReloader), ConfigError> {
    // The watch starts before the files are read, so that no change is missed.
    let mut watched = vec![WatchPath::File(&files.values)];
    if files.trust_anchors.parent().is_some_and(Path::is_dir) {
        watched.push(WatchPath::File(&files.trust_anchors));
    }
    let changes = FileWatcher::watch(&watched)?;
    let current_config = CurrentConfig {
        current: Arc::new(ArcSwap::from_pointee(read(&files).await?)),
    };
    let reload = ConfigReloader {
        files,
        current_config: current_config.clone(),
        changes,
        recorder,
        unserved: UnservedFiles::new(registry, "values"),
    };
    Ok((current_config, reload))
}

impl ConfigReloader {
    /// Reloads the files on every change until the drain. If they are invalid, the previous configuration stays; the invalid file
    /// is counted in `unserved_configuration`, and an Event on the Deployment has the reason.
    pub async fn run(mut self, drain: Watch) {
        let mut last_error = None;
        loop {
            tokio::select! {
                () = drain.signaled() => return,
                () = self.changes.wait_for_change() => {}
            }
            let read = read(&self.files).await;
            self.unserved.set(read.as_ref().err().map(|err| err.path(&self.files)));
            match read {
                Ok(config) if config == *self.current_config.get() => last_error = None,
                Ok(config) => {
                    info!(path = ?self.files.values, "the configuration of injection has changed");
                    self.current_config.current.store(Arc::new(config));
                    last_error = None;
                }
                Err(err) => {
                    let text = format!("{:#}", anyhow::Error::new(err));
                    // Each error is reported once.
                    if last_error.as_ref() != Some(&text) {
                        warn!(
                            error = text,
                            "reloading the configuration of injection failed; the previous one stays"
                        );
                        self.record_skipped(&text);
                        last_error = Some(text);
                    }
                }
            }
        }
    }
}

impl ConfigReloader {
    fn record_skipped(&self, error: &str) {
        self.recorder.record(EventNote {
            regarding: ObjectReference {
                kind: Some("Deployment".to_owned()),
                api_version: Some("apps/v1".to_owned()),
                namespace: Some(self.files.control_plane_namespace.clone()),
                name: Some(DEPLOYMENT.to_owned()),
                ..ObjectReference::default()
            },
            severity: Severity::Warning,
            reason: "ConfigUpdateSkipped",
            action: "Reload",
            message: format!("the configuration of injection is invalid; the previous one stays: {error}"),
        });
    }
}

impl ConfigError {
    /// The file that is missing or invalid.
    fn path<'a>(&'a self, files: &'a Files) -> &'a Path {
        match self {
            Self::Read { path, .. } | Self::Values { path, .. } | Self::NoTrustAnchors(path) => path,
            Self::Watch(_) => &files.values,
        }
    }
}

async fn read(files: &Files) -> Result<Config, ConfigError> {
    let read = async |path: &Path| {
        fs::read_to_string(path).await.map_err(|source| ConfigError::Read {
            path: path.to_owned(),
            source,
        })
    };
    let text = read(&files.values).await?;
    let mut values = Values::from_yaml(&text).map_err(|source| ConfigError::Values {
        path: files.values.clone(),
        source,
    })?;
    match read(&files.trust_anchors).await {
        Ok(anchors) => values.identity_trust_anchors_pem = anchors,
        Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {}
        Err(err) => return Err(err),
    }
    if values.identity_trust_anchors_pem.trim().is_empty() {
        return Err(ConfigError::NoTrustAnchors(files.trust_anchors.clone()));
    }
    Ok(Config {
        values,
        control_plane_namespace: files.control_plane_namespace.clone(),
        origin: InjectionOrigin::Webhook,
    })
}

/// The Deployment of the injector.
const DEPLOYMENT: &str = "linkerd-proxy-injector";

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, sleep};
    use tulle_core::drain;

    use super::*;

    #[tokio::test]
    async fn values_are_reloaded_when_they_change_and_kept_when_they_are_invalid() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::in_dir(dir.path());
        let write = |name: &str, text: &str| {
            let new = dir.path().join("new");
            std::fs::write(&new, text).unwrap();
            std::fs::rename(&new, dir.path().join(name)).unwrap();
        };
        let registry = Registry::new();
        let open = async || open(files.clone(), EventRecorder::default(), &registry).await;
        let missing = open().await.err().unwrap();
        assert!(missing.to_string().contains("values"), "{missing}");
        write("values", "clusterDomain: a.test");
        let missing = open().await.err().unwrap();
        assert!(missing.to_string().contains("no trust anchors"), "{missing}");

        write("ca.crt", "first");
        let (current_config, reload) = open().await.unwrap();
        let (signal, drain) = drain::channel();
        let running = tokio::spawn(reload.run(drain));
        let is_counted = || registry.render().contains("/values\",field=\"values\"} 1");
        let domain = || current_config.get().values.cluster_domain.clone();
        assert_eq!(domain(), "a.test");
        write("ca.crt", "second");
        write("values", "clusterDomain: b.test");
        until(|| domain() == "b.test").await;
        assert_eq!(current_config.get().values.identity_trust_anchors_pem, "second");
        // Invalid values are counted, and the previous configuration stays.
        assert!(!is_counted());
        write("values", "proxy: 5");
        until(is_counted).await;
        assert_eq!(domain(), "b.test");
        write("values", "clusterDomain: c.test");
        until(|| domain() == "c.test").await;
        assert!(!is_counted());
        signal.drain().await;
        running.await.unwrap();
    }

    async fn until(condition: impl Fn() -> bool) {
        let started_at = Instant::now();
        while !condition() {
            assert!(
                started_at.elapsed() < Duration::from_secs(10),
                "the condition did not become true"
            );
            sleep(Duration::from_millis(10)).await;
        }
    }
}
