//! Get and Watch: the client policy of one destination.

use std::net::SocketAddr;
use std::pin::Pin;

use futures_util::stream::{self, Stream};
use tonic::{Request, Response, Status};
use tulle_core::drain;
use tulle_proto::outbound::outbound_policies_server::OutboundPolicies;
use tulle_proto::outbound::{OutboundPolicy, TrafficSpec, traffic_spec};

use crate::cluster::outbound::{Key, Target};
use crate::cluster::{Cluster, Subscription};
use crate::model::outbound::Outbound;
use crate::policy::{Config, source, translate};
use crate::resources::meta::Name;

pub struct Service {
    cluster: Cluster,
    config: Config,
    drain: drain::Watch,
}

impl Service {
    pub(super) fn new(cluster: Cluster, config: Config, drain: drain::Watch) -> Self {
        Self { cluster, config, drain }
    }

    fn subscribe(&self, spec: TrafficSpec) -> Result<(Subscription<Outbound>, OutboundPolicy), Status> {
        let client =
            source::parse(&spec.source_workload).map_err(|error| Status::invalid_argument(error.to_string()))?;
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
            return Err(Status::unavailable("the state of the cluster is not known yet"));
        }
        let key = Key {
            client_namespace: client.name().namespace.clone(),
            target,
        };
        let mut subscription = self.cluster.outbound(key);
        let first = subscription.current();
        match &*first {
            Outbound::Policy(policy) => Ok((subscription, translate::outbound::policy(policy, self.config))),
            Outbound::Unknown => Err(Status::not_found("No such service")),
        }
    }
}

#[tonic::async_trait]
impl OutboundPolicies for Service {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<OutboundPolicy, Status>> + Send>>;

    async fn get(&self, request: Request<TrafficSpec>) -> Result<Response<OutboundPolicy>, Status> {
        let (_, policy) = self.subscribe(request.into_inner())?;
        Ok(Response::new(policy))
    }

    async fn watch(&self, request: Request<TrafficSpec>) -> Result<Response<Self::WatchStream>, Status> {
        let (subscription, first) = self.subscribe(request.into_inner())?;
        let following = (subscription, self.drain.clone(), self.config, Some(first));
        let messages = stream::unfold(following, async |(mut subscription, drain, config, first)| {
            let message = match first {
                Some(first) => first,
                None => next(&mut subscription, &drain, config).await?,
            };
            Some((Ok(message), (subscription, drain, config, None)))
        });
        Ok(Response::new(Box::pin(messages)))
    }
}

/// The next policy, or nothing when there is none any more, so that the proxy asks anew, or the control plane shuts down.
async fn next(
    subscription: &mut Subscription<Outbound>,
    drain: &drain::Watch,
    config: Config,
) -> Option<OutboundPolicy> {
    let outbound = tokio::select! {
        outbound = subscription.changed() => outbound,
        () = drain.signaled() => return None,
    };
    match &*outbound {
        Outbound::Policy(policy) => Some(translate::outbound::policy(policy, config)),
        Outbound::Unknown => None,
    }
}

/// Reads `name.namespace.svc[.<domain>][.][:port]`; the port is 80 when there is none.
fn parse_authority(authority: &str, cluster_domain: &str) -> Result<(Name, u16), Status> {
    let refused = || Status::invalid_argument(format!("Invalid authority: {authority}"));
    let (host, port) = match authority.split_once(':') {
        None => (authority, 80),
        Some((host, port)) => match port.parse::<u16>() {
            Ok(port) if port > 0 => (host, port),
            _ => return Err(refused()),
        },
    };
    if host.is_empty()
        || host
            .bytes()
            .any(|byte| byte.is_ascii_whitespace() || b"/@?#[]".contains(&byte))
    {
        return Err(refused());
    }
    let host = host.strip_suffix('.').unwrap_or(host);
    let mut labels = host.splitn(4, '.');
    let (name, namespace, svc, domain) = (labels.next(), labels.next(), labels.next(), labels.next());
    match (name, namespace, svc, domain) {
        (Some(name), Some(namespace), Some("svc"), domain)
            if !name.is_empty() && !namespace.is_empty() && domain.is_none_or(|domain| domain == cluster_domain) =>
        {
            Ok((Name::new(namespace, name), port))
        }
        _ => Err(Status::not_found("No such service")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tonic::Code;

    use super::*;

    proptest! {
        #[test]
        fn no_authority_panics(text in ".*|[a-z.:0-9]*") {
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
        check("", Err(Code::InvalidArgument));
        check(":80", Err(Code::InvalidArgument));
        check("web.shop.svc:0", Err(Code::InvalidArgument));
        check("web.shop.svc:http", Err(Code::InvalidArgument));
        check("user@web.shop.svc", Err(Code::InvalidArgument));
    }
}
