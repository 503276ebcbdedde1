//! Connections to the application: one HTTP client for each worker and target.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::Arc,
};

use parking_lot::Mutex;

use crate::{
    http::{
        client::{EndpointClient, HttpVersion},
        error::Error,
        h1::pool::PoolConfig,
        h2,
    },
    inbound::{connection_addrs::ConnectionAddrs, metrics::Families},
    net::{
        connect,
        io::{Io, Tcp},
    },
};

/// Dials the application, and holds its HTTP clients.
pub(crate) struct AppClients {
    pub(crate) connect: connect::Config,
    pub(crate) source_address: SourceAddress,
    pub(crate) http2: h2::Http2Config,
    pub(crate) pool: PoolConfig,
    pub(crate) families: Families,
    /// HTTP clients, by worker and target.
    pub(crate) by_worker: Vec<Mutex<HashMap<AppTarget, Arc<EndpointClient>>>>,
}

/// The source address of connections to the application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceAddress {
    Proxy,
    /// The address of the client that connected to the proxy.
    Client,
}

/// The application's address, and the source IP of connections to it; `None` means an address of the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct AppTarget {
    pub(super) addr: SocketAddr,
    pub(super) source_ip: Option<IpAddr>,
}

impl AppClients {
    /// Returns the HTTP client of a worker for the target of a connection, and creates it on first use.
    pub(super) fn client(&self, worker: usize, addrs: &ConnectionAddrs) -> Arc<EndpointClient> {
        let app = self.target(addrs);
        let mut apps = self.by_worker[worker].lock();
        if apps.len() >= APP_CLIENTS_SWEEP_THRESHOLD && !apps.contains_key(&app) {
            apps.retain(|_, client| Arc::strong_count(client) > 1);
        }
        apps.entry(app)
            .or_insert_with(|| Arc::new(self.new_client(app)))
            .clone()
    }

    pub(super) fn target(&self, addrs: &ConnectionAddrs) -> AppTarget {
        let source_ip = match (self.source_address, addrs.client.0.ip()) {
            (SourceAddress::Proxy, _) => None,
            // A link-local address cannot be used without its scope id.
            (SourceAddress::Client, IpAddr::V6(ip)) if ip.is_unicast_link_local() => None,
            (SourceAddress::Client, ip) => Some(ip),
        };
        AppTarget {
            addr: addrs.target,
            source_ip,
        }
    }

    fn new_client(&self, app: AppTarget) -> EndpointClient {
        let (config, metrics) = (self.connect, self.families.app_connection_metrics(app.addr));
        let open = move |_: HttpVersion| -> Pin<Box<dyn Future<Output = _> + Send>> {
            let metrics = metrics.clone();
            Box::pin(async move { Ok(dial(app, &config).await?.count(metrics)) })
        };
        EndpointClient::new(app.addr, Box::new(open), self.http2, None, self.pool)
    }
}

async fn dial(app: AppTarget, config: &connect::Config) -> Result<Io, Error> {
    let stream = connect::dial_from(app.source_ip, app.addr, config)
        .await
        .map_err(Error::from_connect)?;
    Ok(Io::tcp(Tcp::new(stream).with_local_peer()))
}

/// Number of HTTP clients of a worker at which unused clients are removed before another is added. Otherwise a peer that scans
/// ports would make the map grow without limit.
const APP_CLIENTS_SWEEP_THRESHOLD: usize = 64;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::TcpListener;

    use super::*;
    use crate::net::connect::SocketOptions;

    /// The kernel dials 127.0.0.2 from 127.0.0.1, so the two addresses of the connection differ, as they do with a `source_ip`.
    #[tokio::test]
    async fn a_connection_to_an_application_is_local_with_every_source_address() {
        let listener = TcpListener::bind("127.0.0.2:0").await.unwrap();
        let app = AppTarget {
            addr: listener.local_addr().unwrap(),
            source_ip: None,
        };
        let config = connect::Config {
            timeout: Duration::from_secs(10),
            options: SocketOptions::default(),
            own_port: None,
        };
        let io = dial(app, &config).await.unwrap();
        assert_eq!(listener.accept().await.unwrap().1.ip().to_string(), "127.0.0.1");
        assert!(io.is_local(app.addr.ip()));
    }
}
