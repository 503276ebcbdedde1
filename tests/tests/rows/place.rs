//! Where manifests are: an API server, on which routes have the status that our own controller writes.

use std::cell::RefCell;
use std::rc::Rc;

use tulle_control::cluster::{Config, EndpointsFrom};
use tulle_control::kubernetes as client;
use tulle_control::resources::event::Writer;
use tulle_control::source::kubernetes;
use tulle_control::source::kubernetes::kinds::{Drives, Needs};
use tulle_core::drain;
use tulle_core::metrics::Registry;
use tulle_core::ready::Readiness;
use tulle_tests::charts::install_custom_resources;
use tulle_tests::cluster::ApiServer;

use crate::stored::Stored;

thread_local! {
    /// One server for all rows of a test, which has a thread of its own.
    static SERVER: RefCell<Option<Rc<Server>>> = const { RefCell::new(None) };
}

struct Server {
    api: ApiServer,
    stored: tokio::sync::Mutex<Stored>,
}

/// The server with the objects of the latest row; those of the row before are gone.
pub(crate) struct Place(Rc<Server>);

impl Place {
    pub(crate) async fn new(yaml: &str, _registry: &Registry) -> Self {
        let known = SERVER.with_borrow(Clone::clone);
        let server = match known {
            Some(server) => server,
            None => {
                let api = ApiServer::start().await.unwrap();
                install_custom_resources(&api).await.unwrap();
                api.create_namespace("linkerd").await.unwrap();
                let stored = tokio::sync::Mutex::new(Stored::new(api.client()));
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

    /// Watches the server.
    pub(crate) async fn source(
        &self,
        config: &Config,
        writer: Writer,
        registry: &Registry,
        drain: drain::Watch,
    ) -> impl Future<Output = ()> + Send + use<> {
        let access = client::Config {
            kubeconfig: Some(self.0.api.kubeconfig()),
            ..client::Config::default()
        };
        let client = client::client(&access, registry).await.unwrap();
        let config = kubernetes::Config {
            needs: Needs {
                destination: true,
                policy: true,
                drives: match config.endpoints_from {
                    EndpointsFrom::Slices => Drives::Slices,
                    EndpointsFrom::Endpoints => Drives::Endpoints,
                },
            },
            addr: ":8086".to_owned(),
            kinds: Readiness::new(),
        };
        let source = kubernetes::run(client, config, writer, registry.clone(), drain);
        async { source.await.unwrap() }
    }

    /// What the server refuses is an error of the row at once.
    pub(crate) fn errors(&self) -> Vec<String> {
        Vec::new()
    }
}
