//! The service for client policies, with Get and Watch.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::Stream;
use http::{Request, Response};
use tonic::Status;
use tonic::body::Body;
use tulle_proto::outbound::outbound_policies_server::SERVICE_NAME;
use tulle_proto::outbound::{TrafficSpec, traffic_spec};

use crate::cluster::publish::published_value::{EncoderId, EncodingKey, PublishedValue};
use crate::cluster::views::outbound::{Key, Target};
use crate::cluster::{Cluster, Subscription};
use crate::grpc::{self, Caller, Methods};
use crate::model::outbound::Outbound;
use crate::policy::config::Config;
use crate::policy::{messages, translate, workload};
use crate::resources::meta::NamespacedName;
use crate::tls::mesh_credentials::ClientCertificates;

/// The service. Clones share its state.
#[derive(Clone)]
pub struct OutboundPolicyService {
    cluster: Cluster,
    client_certificates: ClientCertificates,
    config: Config,
    encoder_id: EncoderId,
}

impl OutboundPolicyService {
    pub(super) fn new(cluster: Cluster, client_certificates: ClientCertificates, config: Config) -> Self {
        let encoder_id = cluster.new_encoder_id();
        Self {
            cluster,
            client_certificates,
            config,
            encoder_id,
        }
    }

    fn subscribe(&self, spec: TrafficSpec, caller: Option<&Caller>) -> Result<(Subscription<Outbound>, Bytes), Status> {
        let client =
            workload::parse(&spec.source_workload).map_err(|error| Status::invalid_argument(error.to_string()))?;
        let target = match spec.target {
            None => return Err(Status::invalid_argument("the request has no target")),
            Some(traffic_spec::Target::Addr(addr)) => {
                let addr = SocketAddr::try_from(addr).map_err(|error| Status::invalid_argument(error.to_string()))?;
                if addr.port() == 0 {
                    return Err(Status::invalid_argument("Invalid port"));
                }
                Target::Address(tulle_core::addr::canonical(addr))
            }
            Some(traffic_spec::Target::Authority(authority)) => {
                let (name, port) = parse_authority(&authority, &self.cluster.config().cluster_domain)?;
                Target::Service(name, port)
            }
        };
        if !self.cluster.is_synced() {
            return Err(Status::unavailable("the objects of the cluster are not loaded yet"));
        }
        let client_namespace = client.id.name().namespace.clone();
        if let Some(identities) = self.client_certificates.identities_to_check(caller) {
            self.cluster
                .check_client_namespace(&client_namespace, identities)
                .map_err(|error| Status::permission_denied(error.to_string()))?;
        }
        let key = Key {
            client_namespace,
            exported_services: client.exported_services,
            target,
        };
        let mut subscription = self.cluster.outbound(key);
        let first = subscription.current();
        match self.message(&first) {
            Some(message) => Ok((subscription, message)),
            None => Err(Status::not_found("No such service")),
        }
    }

    fn watch(
        self,
        spec: TrafficSpec,
        caller: Option<&Caller>,
    ) -> Result<impl Stream<Item = Bytes> + Send + use<>, Status> {
        let (subscription, first) = self.subscribe(spec, caller)?;
        Ok(messages::message_stream(subscription, first, move |outbound| {
            self.message(outbound)
        }))
    }

    /// Returns the message for a policy. Streams with the same policy share the bytes.
    fn message(&self, outbound: &Arc<PublishedValue<Outbound>>) -> Option<Bytes> {
        let Outbound::Policy(policy) = &***outbound else {
            return None;
        };
        Some(
            outbound.encode_cached(&EncodingKey::for_all_subscribers(&self.encoder_id), || {
                grpc::encode(&[translate::outbound::policy(policy, self.config)])
            }),
        )
    }
}

impl Methods for OutboundPolicyService {
    const SERVICE: &'static str = SERVICE_NAME;

    async fn call(self, method: &str, req: Request<Body>) -> Response<Body> {
        let caller = req.extensions().get::<Caller>().cloned();
        let caller = caller.as_ref();
        match method {
            "Get" => {
                grpc::unary(req, |spec: TrafficSpec| {
                    self.subscribe(spec, caller).map(|(_, policy)| policy)
                })
                .await
            }
            "Watch" => grpc::stream(req, |spec: TrafficSpec| self.watch(spec, caller)).await,
            _ => grpc::unimplemented(),
        }
    }
}

/// Parses `name.namespace.svc[.<domain>][.][:port]`. The default port is 80.
fn parse_authority(authority: &str, cluster_domain: &str) -> Result<(NamespacedName, u16), Status> {
    let invalid = || Status::invalid_argument(format!("Invalid authority: {authority}"));
    let (host, port) = match authority.split_once(':') {
        None => (authority, 80),
        Some((host, port)) => match port.parse::<u16>() {
            Ok(port) if port > 0 => (host, port),
            _ => return Err(invalid()),
        },
    };
    if host.is_empty()
        || host
            .bytes()
            .any(|byte| byte.is_ascii_whitespace() || b"/@?#[]".contains(&byte))
    {
        return Err(invalid());
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    // A stream holds the names of its target in memory, even if the Service does not exist, so their length is limited.
    if host.len() > MAX_HOST_BYTES {
        return Err(Status::not_found("No such service"));
    }
    let mut labels = host.splitn(4, '.');
    let (name, namespace, svc, domain) = (labels.next(), labels.next(), labels.next(), labels.next());
    match (name, namespace, svc, domain) {
        (Some(name), Some(namespace), Some("svc"), domain)
            if !name.is_empty() && !namespace.is_empty() && domain.is_none_or(|domain| domain == cluster_domain) =>
        {
            Ok((NamespacedName::new(namespace, name), port))
        }
        _ => Err(Status::not_found("No such service")),
    }
}

/// Maximum length of a DNS name.
const MAX_HOST_BYTES: usize = 253;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    proptest! {
        #[test]
        fn parsing_an_authority_never_panics(text in ".*|[a-z.:0-9]*") {
            let _ = parse_authority(&text, "cluster.local");
        }
    }

    #[test]
    fn authorities_name_services() {
        let check = |authority: &str, expected: Result<(&str, &str, u16), Code>| {
            let found = parse_authority(authority, "cluster.local").map_err(|status| status.code());
            let found = found
                .as_ref()
                .map(|(name, port)| (&*name.name, &*name.namespace, *port));
            assert_eq!(found.map_err(|code| *code), expected, "{authority}");
        };
        check("web.shop.svc.cluster.local:8080", Ok(("web", "shop", 8080)));
        check("web.shop.svc.cluster.local.:8080", Ok(("web", "shop", 8080)));
        check("web.shop.svc", Ok(("web", "shop", 80)));
        check("web.shop.example:80", Err(Code::NotFound));
        check("web.shop.svc.example.org", Err(Code::NotFound));
        check("web", Err(Code::NotFound));
        check(&format!("{}.shop.svc", "a".repeat(250)), Err(Code::NotFound));
        check("", Err(Code::InvalidArgument));
        check(":80", Err(Code::InvalidArgument));
        check("web.shop.svc:0", Err(Code::InvalidArgument));
        check("web.shop.svc:http", Err(Code::InvalidArgument));
        check("user@web.shop.svc", Err(Code::InvalidArgument));
    }
}
