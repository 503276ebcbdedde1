//! Stores the manifests of a test in an API server. tulle's controller writes the statuses of routes there.

use std::cell::RefCell;
use std::rc::Rc;

use tulle_control::cluster::Config;
use tulle_control::kubernetes as client;
use tulle_control::resources::event::EventSink;
use tulle_control::source::kubernetes;
use tulle_control::source::kubernetes::kinds::WatchRequirements;
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::readiness::Readiness;
use tulle_tests::charts::install_custom_resources;
use tulle_tests::cluster::ApiServer;

use crate::stored::TestObjects;

thread_local! {
    /// One server for all rows of a test; each test has its own thread.
    static SERVER: RefCell<Option<Rc<Server>>> = const { RefCell::new(None) };
}

struct Server {
    api: ApiServer,
    stored: tokio::sync::Mutex<TestObjects>,
}

/// The server with the objects of the current row; those of the previous row are removed.
pub(crate) struct ManifestStore(Rc<Server>);

impl ManifestStore {
    pub(crate) async fn new(yaml: &str, _registry: &Registry) -> Self {
        let known = SERVER.with_borrow(Clone::clone);
        let server = match known {
            Some(server) => server,
            None => {
                let api = ApiServer::start().await.unwrap();
                install_custom_resources(&api).await.unwrap();
                api.create_namespace("linkerd").await.unwrap();
                let stored = tokio::sync::Mutex::new(TestObjects::new(api.client()));
                let server = Rc::new(Server { api, stored });
                SERVER.set(Some(server.clone()));
                server
            }
        };
        let mut stored = server.stored.lock().await;
        stored.replace(&server.api, yaml).await.unwrap();
        drop(stored);
        Self(server)
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
            kubeconfig: Some(self.0.api.kubeconfig()),
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

    /// Always empty: an object that the server refuses fails the row.
    pub(crate) fn errors(&self) -> Vec<String> {
        Vec::new()
    }
}
