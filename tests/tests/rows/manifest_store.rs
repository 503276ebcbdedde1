//! Stores the manifests of a test in an API server. tulle's controller writes the statuses of routes there.

use std::path::PathBuf;

use tulle_control::cluster::Config;
use tulle_control::kubernetes as client;
use tulle_control::resources::event::EventSink;
use tulle_control::source::kubernetes;
use tulle_control::source::kubernetes::kinds::WatchRequirements;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_tests::cluster::kubeconfig;

use crate::KUBECONFIG_VARIABLE;
use crate::stored::TEST_OBJECTS;

/// The server with the objects of the current row; those of the previous row are removed.
pub(crate) struct ManifestStore {
    kubeconfig: PathBuf,
}

impl ManifestStore {
    pub(crate) async fn new(yaml: &str, _registry: &Registry) -> Self {
        let path: PathBuf = std::env::var_os(KUBECONFIG_VARIABLE)
            .expect("this test runs as a part of `every_row_holds_with_an_api_server`")
            .into();
        // Each test has its own runtime, and a client ends with its runtime.
        let client = kubeconfig::client(&path).await.unwrap();
        TEST_OBJECTS.lock().await.replace(client, yaml).await.unwrap();
        Self { kubeconfig: path }
    }

    /// A source that watches the server.
    pub(crate) async fn source(
        &self,
        config: &Config,
        sink: EventSink,
        registry: &Registry,
        drain: drain::Watch,
    ) -> impl Future<Output = ()> + Send + use<> {
        let access = client::Config {
            kubeconfig: Some(self.kubeconfig.clone()),
            ..client::Config::default()
        };
        let client = client::client(&access, registry).await.unwrap();
        let config = kubernetes::Config {
            requirements: WatchRequirements {
                destination: true,
                policy: true,
                endpoints_source: config.endpoints_source,
            },
            log_addr: ":8086".to_owned(),
            stale_kinds: Readiness::new(),
        };
        let source = kubernetes::run(client, config, sink, registry.clone(), drain);
        async { source.await.unwrap() }
    }

    /// Returns no errors, because an object that the server refuses fails the row.
    pub(crate) fn errors(&self) -> Vec<String> {
        Vec::new()
    }
}
